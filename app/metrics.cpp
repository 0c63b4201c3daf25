// Appending records, and dropping those that a resumed run will make again.
#include "app/metrics.h"

#include <fmt/format.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstring>
#include <nlohmann/json.hpp>
#include <optional>
#include <utility>

#include "data/files.h"
#include "data/json.h"
#include "tensor/error.h"
#include "train/median.h"

namespace tessera {

double median_rate(std::vector<double> rates) {
  constexpr size_t kWarmupSteps = 5;
  if (rates.size() > kWarmupSteps) rates.erase(rates.begin(), rates.begin() + kWarmupSteps);
  return median(std::move(rates));
}

KeptRecords records_until(std::string_view file, int64_t step, const std::string& what) {
  KeptRecords out;
  for (size_t at = 0, end; (end = file.find('\n', at)) != std::string_view::npos; at = end + 1) {
    const std::string_view line = file.substr(at, end - at);
    const nlohmann::json j = parse_json(line, what);
    const std::optional<int64_t> found = j.is_object() ? natural(j.value("step", nlohmann::json())) : std::nullopt;
    if (!found) {
      if (j.is_object() && j.value("event", nlohmann::json()) == "summary") continue;  // of the run before
      throw InputError(fmt::format("{}: expected records with a step, found {}", what, line));
    }
    if (*found > step) continue;
    out.records.append(line).append("\n");
    if (j.value("event", nlohmann::json()) == "eval") out.validated_step = *found;
  }
  return out;
}

int64_t Metrics::drop_records_after(const std::filesystem::path& file, int64_t step) {
  std::error_code unknown;
  if (!std::filesystem::is_regular_file(file, unknown)) return -1;
  const KeptRecords kept = records_until(read_file(file), step, file.string());
  write_file(file, kept.records);
  return kept.validated_step;
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
