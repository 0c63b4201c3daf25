// metrics.jsonl of a run directory: one JSON object per line, the same that `--format json` prints.
#pragma once
#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <string>
#include <string_view>

namespace tessera {

// The records of a metrics file up to a step, and those alone. A last line without its end was cut by a kill and is
// dropped, and so is the summary of an earlier run. `what` names the file in messages. Throws InputError.
std::string records_until(std::string_view file, int64_t step, const std::string& what);

class Metrics {
 public:
  // Opens the file to append. On resume, records of steps after `resumed_step` are dropped first: they will be made
  // again. Throws OutputError, and InputError for a file that is no list of such records.
  Metrics(const std::filesystem::path& file, int64_t resumed_step);
  ~Metrics();
  Metrics(const Metrics&) = delete;
  Metrics& operator=(const Metrics&) = delete;

  void write(const std::string& json_line);  // at once, so that a run can be followed; throws OutputError

 private:
  std::filesystem::path path_;
  std::FILE* file_ = nullptr;
};

}  // namespace tessera
