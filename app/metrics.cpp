// Appending records, and dropping those that a resumed run will make again.
#include "app/metrics.h"

#include <fmt/format.h>

#include <cerrno>
#include <cstddef>
#include <cstring>
#include <nlohmann/json.hpp>

#include "data/files.h"
#include "data/json.h"
#include "tensor/error.h"

namespace tessera {

// Drops the records of later steps, a summary, and a last line without its end, which was cut by a kill. Returns the
// step of the last validation that stays, or -1.
int64_t Metrics::drop_records_after(const std::filesystem::path& file, int64_t step) {
  if (!std::filesystem::is_regular_file(file)) return -1;
  const std::string all = read_file(file);
  std::string kept;
  int64_t validated = -1;
  for (size_t at = 0, end; (end = all.find('\n', at)) != std::string::npos; at = end + 1) {
    const std::string line = all.substr(at, end - at);
    const nlohmann::json j = parse_json(line, file.string());
    const std::string event = j.is_object() ? j.value("event", nlohmann::json()).dump() : "";
    if (!j.is_object() || !j.value("step", nlohmann::json()).is_number_integer()) {
      if (event == R"("summary")") continue;  // of the run before
      throw InputError(fmt::format("{}: expected records with a step, found {}", file.string(), line));
    }
    const auto of = j["step"].get<int64_t>();
    if (of > step) continue;
    kept += line + "\n";
    if (event == R"("eval")") validated = of;
  }
  write_file(file, kept);
  return validated;
}

Metrics::Metrics(const std::filesystem::path& run, int64_t resumed_step)
    : path_(run / "metrics.jsonl"),
      validated_step_(drop_records_after(path_, resumed_step)),
      events_(run, resumed_step + 1),
      file_(std::fopen(path_.c_str(), "ae")) {
  if (!file_) throw OutputError(fmt::format("cannot write {}: {}", path_.string(), std::strerror(errno)));
}

Metrics::~Metrics() { std::fclose(file_); }

void Metrics::write(const std::string& json_line, int64_t step, std::span<const Scalar> scalars) {
  events_.write(step, scalars);
  write(json_line);
}

void Metrics::write(const std::string& json_line) {
  if (std::fputs(json_line.c_str(), file_) < 0 || std::fputc('\n', file_) == EOF || std::fflush(file_) != 0)
    throw OutputError(fmt::format("cannot write {}: {}", path_.string(), std::strerror(errno)));
}

}  // namespace tessera
