// A run as it is read back, in plain structs: metrics.jsonl of its folder, and of one with --trace report.json and
// trace.json. A plan that has not run is one too, as far as theory knows it (planned() in app/report/report.h).
// It also has what is worked out of a trace: which step stands for the run, its pipeline beside the plans for it,
// and what communication costs.
#pragma once
#include <array>
#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "parallel/pipeline/schedule.h"
#include "parallel/pipeline/simulate.h"
#include "tensor/arena.h"
#include "train/usage.h"

namespace tessera::report {

// Times are in milliseconds since the trace began.
struct Event {
  std::string track, name;
  double begin = 0, end = 0;
  int64_t step = 0;                 // 0: between steps
  int stage = -1, microbatch = -1;  // an action of the pipeline,
  double processor = 0;             // with the time for which its thread had a processor
  std::string axis, operation;      // a communication,
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
  int64_t most = 0;              // bytes of the busiest rank, where they are known
};
struct Point {
  int64_t step = 0;
  double value = 0;
};

// The load of a mixture of experts; `ranks` ranks share out the experts, evenly.
struct ExpertsOfRun {
  ExpertLoad load = {};
  int64_t ranks = 1;
};

struct Record {
  std::string label;         // its name beside others
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
  int64_t shard_ranks = 0;               // ranks of the data axis that share out what ZeRO does; 0: all of them
  double tokens_per_s = 0, step_ms = 0;  // median_rate() of the run's steps
};

// Reads the files of a run. Throws InputError: where there is no trace, unless the run may have none, in a line that
// says how to have one; where a file is damaged, naming it.
Record read_record(const std::filesystem::path& run, bool may_lack_trace = false);
// Parses files in memory; `name` is put before their names in messages. What they claim is held together: ranks, stages
// and micro-batches are those of the schedule, and nothing ends before it began.
struct Files {
  std::string_view report, trace, metrics;
};
Record parse_record(const Files& files, const std::string& name);
Record parse_metrics(std::string_view metrics, const std::string& name);  // a run without a trace

// A step of the trace as all ranks together see it. 0 where the trace has none.
struct StepSpan {
  int64_t step = 0;
  double begin = 0, end = 0;  // milliseconds
};
// The step that took the median time.
StepSpan median_step(const Record& record);

// Bytes that all ranks together sent in a step, by axis and operation, and how long a rank was in it on average.
struct SentInStep {
  std::string axis, operation;
  int64_t calls = 0, bytes = 0;
  int64_t most = 0;  // bytes of the busiest rank; 0: not known
  double ms = 0;
};
std::vector<SentInStep> sent_in_step(const Record& record, const StepSpan& step);

// One pipeline of ranks (those that differ from rank 0 along pp only) in one step.
struct MeasuredPipeline {
  Times times;          // each pass and a message, in milliseconds; see below
  Simulation equal;     // the plan where F, I and W take equally long
  Simulation replayed;  // the plan on the measured times
  Simulation measured;  // as it happened; messages among it
  std::optional<double> formula;
};
// The pipeline of a step. If ranks share cores, its times are those for which each pass had a processor, as a rank with
// a processor for itself would need them, and messages take none. Nothing where there is no pipeline, or where the
// trace lacks actions of the schedule.
std::optional<MeasuredPipeline> measure_pipeline(const Record& record, const StepSpan& step);

// Costs of communication for one rank in one step, in milliseconds. A rank's own thread is held up while another is not
// there yet (`waiting`), and while bytes are moved and added (`transfer`); what runs beside it is `hidden`.
struct Exposure {
  double step = 0, waiting = 0, transfer = 0, hidden = 0;
  double exposed() const { return waiting + transfer; }
};
// The exposure of each rank. Nothing where the trace does not say how long threads were held up: one of an older
// version, or of ranks that compute on GPUs, whose host waits for nothing.
std::optional<std::vector<Exposure>> exposures(const Record& record, const StepSpan& step);
// The mean of ranks.
Exposure mean(const std::vector<Exposure>& all);

// Calls of one operation on an axis: milliseconds of a step in which a rank was in one: in all, and while one
// held it up. The mean of ranks.
struct Overlap {
  double all = 0, exposed = 0;
};
Overlap overlap_of(const Record& record, const StepSpan& step, const std::string& axis, const std::string& operation);

}  // namespace tessera::report
