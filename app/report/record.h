// A run as it is read back, in plain structs: metrics.jsonl of its folder, and of one with --trace report.json and
// trace.json. A plan that has not run is one too, as far as theory knows it (app/report/planned.h).
#pragma once
#include <array>
#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "parallel/pipeline/schedule.h"
#include "tensor/arena.h"
#include "train/usage.h"

namespace tessera::report {

// Times are in milliseconds since the trace began.
struct Event {
  std::string track, name;
  double begin = 0, end = 0;
  int64_t step = 0;                 // 0: between steps
  int stage = -1, microbatch = -1;  // of an action of the pipeline,
  double processor = 0;             // with the time for which its thread had a processor
  std::string axis, operation;      // of a communication,
  int64_t bytes = 0, sent = 0;      // with the bytes of its array, and those that left the rank
};
struct Held {
  double time = 0;
  std::array<int64_t, kCategories> bytes = {};
};
struct Rank {
  std::string name;
  std::vector<std::pair<std::string, int64_t>> at;  // axis and coordinate
  int64_t peak = 0;
  std::array<int64_t, kCategories> peaks = {};
  std::vector<Event> events;
  std::vector<Held> memory;
};
struct Sent {
  std::string axis, operation;
  int64_t calls = 0, bytes = 0;  // sums over ranks
  int64_t most = 0;              // of the busiest rank, where it is known
};
struct Point {
  int64_t step = 0;
  double value = 0;
};

// Of a mixture of experts; `ranks` of them share out the experts, evenly.
struct ExpertsOfRun {
  ExpertLoad load = {};
  int64_t ranks = 1;
};

struct Record {
  std::string label;         // what it is called beside others
  bool planned = false;      // it has not run: sizes and bytes of a step are those of closed forms
  bool traced = false;       // else it has losses, rates and what the summary of the run says alone
  bool waits_noted = false;  // the trace says how long communications held up each rank
  std::string written, kept, clock;
  std::string model;                                      // "gpt-nano: 4 layers, ..."
  std::vector<std::pair<std::string, std::string>> plan;  // words and values, for people
  Schedule schedule;
  int64_t steps = 0, cores = 0, threads = 0;
  bool shared = false;  // there are more threads of ranks than cores
  std::vector<Rank> ranks;
  std::vector<Sent> sent;  // in the whole run; of a plan, in a step
  std::vector<Point> losses, validations;
  ExpertsOfRun experts;
  int64_t shard_ranks = 0;               // of the data axis, that share out what ZeRO does; 0: all of them
  double tokens_per_s = 0, step_ms = 0;  // median_rate() of the run's steps
};

// Throws InputError: where the run has no trace, in a line that says how to have one; where a file is damaged, naming
// it.
Record read_record(const std::filesystem::path& run);
// The same of a run that may have no trace.
Record read_any_record(const std::filesystem::path& run);
// The same of files in memory; `name` is put before their names in messages. What they claim is held together: ranks,
// stages and micro-batches are those of the schedule, and nothing ends before it began.
struct Files {
  std::string_view report, trace, metrics;
};
Record parse_record(const Files& files, const std::string& name);
Record parse_metrics(std::string_view metrics, const std::string& name);  // of a run without a trace

}  // namespace tessera::report
