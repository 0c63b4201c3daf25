// The numbers of a run, in its directory: metrics.jsonl (one JSON object per line, the same that `--format json`
// prints) and an event file for TensorBoard.
#pragma once
#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "data/event_file.h"

namespace tessera {

// The records of a metrics file up to a step, and those alone. A last line without its end was cut by a kill and is
// dropped, and so is the summary of an earlier run. `what` names the file in messages. Throws InputError.
struct KeptRecords {
  std::string records;
  int64_t validated_step = -1;  // the last with a validation
};
KeptRecords records_until(std::string_view file, int64_t step, const std::string& what);

// Of the tokens per second of a run's steps: the median, without the first steps where there are more, which touch
// memory for the first time and compile kernels.
double median_rate(std::vector<double> rates);

class Metrics {
 public:
  // Opens `run`/metrics.jsonl to append and begins an event file. On resume, records of steps after `resumed_step` are
  // dropped first: they will be made again. Throws OutputError, and InputError for a file that is no list of such
  // records.
  Metrics(const std::filesystem::path& run, int64_t resumed_step);
  ~Metrics();
  Metrics(const Metrics&) = delete;
  Metrics& operator=(const Metrics&) = delete;

  // Written at once, so that a run can be followed. The event comes first: what metrics.jsonl has, both have. Throws
  // OutputError.
  void write(const std::string& json_line, int64_t step, std::span<const Scalar> scalars);
  void write(const std::string& json_line);
  // Whether the run that is resumed has recorded this step's validation: a run killed at its very end makes it again.
  bool has_validation_of(int64_t step) const { return step == validated_step_; }

 private:
  static int64_t drop_records_after(const std::filesystem::path& file, int64_t step);
  std::filesystem::path path_;
  int64_t validated_step_;  // the last that is in the file already; -1: none
  EventFile events_;
  std::FILE* file_;
};

}  // namespace tessera
