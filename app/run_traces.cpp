// Names, times and last lines of files.
#include "app/run_traces.h"

#include <fmt/format.h>

#include <cstdlib>
#include <cstring>
#include <fstream>
#include <nlohmann/json.hpp>

#include "app/run_directory.h"
#include "data/json.h"

namespace tessera {
namespace fs = std::filesystem;
using Json = nlohmann::json;

SavedStep newest_saved(const fs::path& run) {
  SavedStep out;
  std::error_code error;
  // A folder of that name is whole.
  for (fs::directory_iterator it(run / "checkpoints", error), end; !error && it != end; it.increment(error)) {
    const std::string name = it->path().filename().string();
    if (!name.starts_with("step-") || name.find(".tmp-") != name.npos) continue;
    const int64_t step = std::strtoll(name.c_str() + std::strlen("step-"), nullptr, 10);
    if (step <= out.step) continue;
    std::error_code gone;
    const auto written = fs::last_write_time(it->path() / "manifest.json", gone);
    if (!gone) out = {step, std::chrono::file_clock::to_sys(written)};
  }
  return out;
}

uintmax_t size_of_records(const fs::path& run) {
  std::error_code error;
  const uintmax_t size = fs::file_size(run / "metrics.jsonl", error);
  return error ? 0 : size;
}

int64_t last_recorded_step(const fs::path& run) {
  constexpr uintmax_t kTail = 1 << 16;
  std::ifstream file(run / "metrics.jsonl", std::ios::binary);
  if (const uintmax_t size = size_of_records(run); size > kTail) file.seekg(static_cast<std::streamoff>(size - kTail));
  int64_t step = 0;
  for (std::string line; std::getline(file, line);)
    if (const Json record = Json::parse(line, nullptr, false);
        record.is_object() && record.value("event", Json()) == "step")
      step = natural(record.value("step", Json())).value_or(step);
  return step;
}

std::string cause_of_flight(const fs::path& run, std::chrono::system_clock::time_point since) {
  std::error_code error;
  const auto written = fs::last_write_time(run / kFlightFile, error);
  if (error || std::chrono::file_clock::to_sys(written) < since) return "";
  std::ifstream file(run / kFlightFile);
  for (std::string line; std::getline(file, line);)
    if (const Json rank = Json::parse(line, nullptr, false); rank.is_object())
      if (const Json cause = rank.value("cause", Json()); cause.is_string() && !cause.get<std::string>().empty())
        return fmt::format("rank {}: {}", rank.value("rank", Json()).dump(), cause.get<std::string>());
  return "";
}

}  // namespace tessera
