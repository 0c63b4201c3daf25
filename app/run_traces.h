// What a run's folder says of it to another process, while the run goes on or after it has failed.
#pragma once
#include <chrono>
#include <cstdint>
#include <filesystem>
#include <string>

namespace tessera {

// The steps of the newest checkpoint and when it was made; 0 where there is none.
struct SavedStep {
  int64_t step = 0;
  std::chrono::system_clock::time_point at{};
};
SavedStep newest_saved(const std::filesystem::path& run);

uintmax_t size_of_records(const std::filesystem::path& run);  // metrics.jsonl; 0 where there is none
int64_t last_recorded_step(const std::filesystem::path& run);

// What a rank said of a failure since then (parallel/comm/flight.h): "rank 1: ..."; empty where none could.
std::string cause_of_flight(const std::filesystem::path& run, std::chrono::system_clock::time_point since);

}  // namespace tessera
