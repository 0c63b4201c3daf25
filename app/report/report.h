// Reports on runs and `bench` rows; figures of runs and plans.
#pragma once
#include <array>
#include <cstdint>
#include <filesystem>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "app/options.h"
#include "app/report/drawing.h"
#include "parallel/pipeline/simulate.h"
#include "train/usage.h"

namespace tessera::report {

// A run read from metrics.jsonl and, with --trace, report.json and trace.json; or a predicted plan (planned()).

// Times are in milliseconds.
struct Event {
  std::string track, name;
  double begin = 0, end = 0;
  int64_t step = 0;                 // 0: between steps
  int stage = -1, microbatch = -1;  // pipeline action
  double cpu_s = 0;                 // CPU time of its thread
  std::string axis, operation;      // communication
  int64_t bytes = 0, sent = 0;      // of the array; sent by the rank
};
struct MemorySample {
  double time = 0;
  std::array<int64_t, kCategories> bytes = {};
};
struct Rank {
  std::string name;
  std::vector<std::pair<std::string, int64_t>> at;  // axis, coordinate
  int64_t peak = 0;
  std::array<int64_t, kCategories> peaks = {};
  std::vector<Event> events;
  std::vector<MemorySample> memory;
};
struct Point {
  int64_t step = 0;
  double value = 0;
};

// `ranks` shard the experts of every layer.
struct ExpertsOfRun {
  ExpertLoad load = {};
  int64_t ranks = 1;
};

struct Record {
  std::string label;
  bool planned = false;      // sizes and bytes per step come from closed forms
  bool traced = false;       // otherwise only losses, rates and summary are known
  bool waits_noted = false;  // the trace contains stalls
  std::string written, recorded, clock;
  std::string model;
  std::vector<std::pair<std::string, std::string>> plan;
  std::map<std::string, std::string> options;
  Schedule schedule;
  int64_t steps = 0, cores = 0, threads = 0;
  bool shared = false;  // more threads than cores
  std::vector<Rank> ranks;
  std::vector<SentBytes> sent;  // per step if planned, otherwise of the full run
  std::vector<Point> losses, validations;
  ExpertsOfRun experts;
  int64_t shard_ranks = 0;  // data ranks per set of ZeRO shards; 0: all
  double tokens_per_s = 0, step_ms = 0;
  double quick_ms = 0, slow_ms = 0;  // quartiles of the step time
};

// Throws InputError if there is no trace (unless `may_lack_trace`) or if a file is damaged.
Record read_record(const std::filesystem::path& run, bool may_lack_trace = false);
// `name` prefixes file names in messages. Validates that ranks, stages and micro-batches match the schedule and that no
// event ends before it begins.
struct Files {
  std::string_view report, trace, metrics;
};
Record parse_record(const Files& files, const std::string& name);
Record parse_metrics(std::string_view metrics, const std::string& name);

// Covers all ranks; step 0 if the trace has no steps.
struct StepSpan {
  int64_t step = 0;
  double begin = 0, end = 0;
};
StepSpan median_step(const Record& record);

// Bytes of all ranks by axis and operation; mean time per rank.
struct SentInStep : SentBytes {
  double ms = 0;
};
std::vector<SentInStep> sent_in_step(const Record& record, const StepSpan& step);

// Rank 0's pipeline (ranks that differ only along pp) in one step.
struct MeasuredPipeline {
  Times times;          // per pass and message, in milliseconds
  Simulation equal;     // F, I and W of equal length
  Simulation replayed;  // with measured times
  Simulation measured;  // as recorded, including messages
  std::optional<double> formula;
};
// If ranks share cores, times are CPU times of the passes, as if each rank had its own core, and messages take no time.
// nullopt without a pipeline, or if the trace lacks actions of the schedule.
std::optional<MeasuredPipeline> measure_pipeline(const Record& record, const StepSpan& step);

// Milliseconds of a rank in one step. Its thread is stalled while other ranks have not arrived (`waiting`) and while
// data are moved and reduced (`transfer`); `hidden` communication overlaps computation.
struct Exposure {
  double step = 0, waiting = 0, transfer = 0, hidden = 0;
  double exposed() const { return waiting + transfer; }
};
// nullopt if the trace has no stalls: traces of older versions, and of GPU ranks, whose host threads do not wait.
std::optional<std::vector<Exposure>> exposures(const Record& record, const StepSpan& step);
Exposure mean(const std::vector<Exposure>& all);

// Mean milliseconds per rank and step in one operation along an axis, total and exposed.
struct Overlap {
  double all = 0, exposed = 0;
};
Overlap measure_overlap(const Record& record, const StepSpan& step, const std::string& axis,
                        const std::string& operation);

inline constexpr std::string_view kFigures = "pipeline|memory|timeline|bytes|loss|bench";
// Any of kFigures except bench, with the given total width and at most shown_ranks() ranks per run. Runs share a scale.
// Throws Error (usage) naming the run that lacks the required data.
Part make_figure(std::string_view name, const std::vector<Record>& runs, double width = kFigureWidth);
constexpr size_t shown_ranks(double width) { return width > kFigureWidth ? 16 : 8; }

// `scale`: time across the full width.
struct Panel {
  const Simulation& sim;
  std::string title;
  double scale = 1;
  NumberFormat format = short_time, tick = tick_of_ms;
};
Lanes panel_lanes(const Panel& panel, double width = kWidth);
// Planned, replayed and, if meaningful, measured.
std::vector<Panel> make_panels(const Record& record, const MeasuredPipeline& pipeline, const StepSpan& step);
std::vector<LegendEntry> pass_legend(const Schedule& schedule);

std::vector<LegendEntry> memory_legend();
std::string css_of_axis(const std::string& axis);

Part pipeline_part(const Record& record, const StepSpan& step, const std::optional<MeasuredPipeline>& pipeline);
Part experts_part(const Record& record, const StepSpan& step);
// Text has lines of at most 120 characters and no loss curve.
std::string make_report(const Record& record, bool as_page);

// Either run may lack a trace, and the numbers of steps may differ; missing data are listed.
std::string compare_to_text(const Record& a, const Record& b, bool as_page);

// From `flight.json` (parallel/comm/trace.h): the last operations of a failed run's ranks.
struct FlightOperation {
  std::string axis, operation;
  int64_t number = 0, bytes = 0;
  double begun = 0, ended = -1;  // seconds since the rank's start; negative: not completed
};
struct RankFlight {
  int64_t rank = 0;
  std::string cause;
  std::vector<FlightOperation> operations;
};
// In rank order, without ranks that wrote nothing; `ranks`: world size. Throws InputError.
struct Flights {
  int64_t ranks = 0;
  std::vector<RankFlight> written;
};
Flights parse_flights(std::string_view file, const std::string& what);
// A column per rank and a row for each of the last operations of an axis.
std::string record_flights(const Flights& flights, bool as_page);

// Rows of Google Benchmark programs such as `bench`, of one side or two to compare; a side may have several files.
struct BenchRun {
  std::vector<double> rounds, reference, machine;  // add_rounds() in bench/run.h
  bool busy = false;                               // other processes used more than a tenth of the cores
  int start = 0;                                   // file index
};
enum class Sample : uint8_t { time, ratio, reference, machine };  // ratio: to the preceding reference
struct BenchRow {
  std::string name, unit, label;
  std::array<std::vector<BenchRun>, 2> runs = {};  // in `unit`, by side and repetition
  std::map<std::string, std::vector<double>> counters = {};
  // Medians of the side's runs, which include the variation between starts, if there are at least five; otherwise all
  // rounds. Empty if the row is missing, failed, or lacks such values.
  std::vector<double> values(size_t side, Sample what) const;
  std::vector<double> times(size_t side) const { return values(side, Sample::time); }
};
struct Bench {
  struct Files {  // consecutive, with the same side, machine and program
    size_t side;
    std::string first, machine, since, until;
    size_t count = 1;
  };
  std::vector<Files> files = {};
  std::vector<BenchRow> rows = {};
  int starts = 0;
  void read(size_t side, const std::string& name, const std::string& json);
  std::vector<Part> parts(size_t sides, double width = kWidth) const;
  std::string about() const;
};

// The relative change from a to b: the median of all ratios b/a, and the interval in which the Mann-Whitney rank-sum
// test finds no difference at the 2% level (Hodges and Lehmann 1963), without assuming a distribution. The interval
// requires five rounds per side.
struct Change {
  double ratio = 1, low = 0, high = 0;
  bool known() const { return low > 0; }
  bool seen() const { return known() && (low > 1 || high < 1); }
};
Change compute_change(const std::vector<double>& a, const std::vector<double>& b);

// Rounds of one process are not independent, so the interval alone yields false positives: a verdict also requires a
// quiet machine and a change larger than that of the control measurements.
struct Verdict {
  Change ratio, time;  // `ratio` requires reference rounds
  // "slower", "faster", "no", "slower, also on one rank"; without a verdict "busy", "machine", "no control", "too few
  // rounds".
  std::string text;
};
// The rows of a group are controls for each other.
std::vector<Verdict> verdicts(const std::vector<const BenchRow*>& group);

// Predictions by closed forms and dry runs; no ranks are started. One option may have several comma-separated values,
// such as 1f1b,zb-h1; each yields a labelled record. Throws Error (usage) for invalid plans.
std::vector<Record> planned(const Args& args);

}  // namespace tessera::report
