// The parts of a report: of a run, of two runs beside each other, of one that failed, of rows of `bench`; figures of
// runs and of plans.
#pragma once
#include "app/options.h"
#include "app/report/drawing.h"
#include "parallel/pipeline/simulate.h"
#include "train/usage.h"

namespace tessera::report {

// A run as it is read back, in plain structs: metrics.jsonl of its folder, and of one with --trace report.json and
// trace.json. A plan that has not run is one too, as far as theory knows it (planned() below).
// It also has what is worked out of a trace: which step stands for the run, its pipeline beside the plans for it,
// and what communication costs.

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
  std::map<std::string, std::string> options;             // of its config.toml
  Schedule schedule;
  int64_t steps = 0, cores = 0, threads = 0;
  bool shared = false;  // there are more threads of ranks than cores
  std::vector<Rank> ranks;
  std::vector<SentBytes> sent;  // in the whole run; of a plan, in a step
  std::vector<Point> losses, validations;
  ExpertsOfRun experts;
  int64_t shard_ranks = 0;               // ranks of the data axis that share out what ZeRO does; 0: all of them
  double tokens_per_s = 0, step_ms = 0;  // median_rate() of the run's steps
  double quick_ms = 0, slow_ms = 0;      // a quarter of these steps is faster, a quarter slower
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
struct SentInStep : SentBytes {
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
Overlap measure_overlap(const Record& record, const StepSpan& step, const std::string& axis,
                        const std::string& operation);

// Parts and figures.

inline constexpr std::string_view kFigures = "pipeline|memory|timeline|bytes|loss|bench";
// One of kFigures but bench, of pictures that together are so wide, and of at most drawn_ranks() of a run. Runs have
// one scale. Throws Error (usage) that says which run lacks what the figure shows.
Part make_figure(std::string_view name, const std::vector<Record>& runs, double width = kFigureWidth);
constexpr size_t drawn_ranks(double width) { return width > kFigureWidth ? 16 : 8; }

// A schedule on its clock, a lane for each rank; `scale` is the time that the whole width shows.
struct Panel {
  const Simulation& sim;
  std::string title;
  double scale = 1;
  Wording words = short_time, tick = tick_of_ms;  // for its times
};
Lanes panel_lanes(const Panel& panel, double width = kWidth);
// As planned, as replayed, and as measured where that says something of the plan.
std::vector<Panel> make_panels(const Record& record, const MeasuredPipeline& pipeline, const StepSpan& step);
std::vector<LegendEntry> pass_legend(const Schedule& schedule);

std::vector<LegendEntry> memory_legend();
std::string css_of_axis(const std::string& axis);

// Parts of a run; without a measured pipeline the part says so.
Part pipeline_part(const Record& record, const StepSpan& step, const std::optional<MeasuredPipeline>& pipeline);
Part experts_part(const Record& record, const StepSpan& step);
// A run as one file of HTML, or as text without the curves, in lines of at most 120 characters: the pipeline planned
// and measured, to scale, then ranks in one step, bytes by axis and peaks of memory.
std::string make_report(const Record& record, bool as_page);

// Two runs beside each other. Either may have no trace, and they may have made different numbers of steps: what both
// have is compared, and what one lacks is said.
std::string compare_to_text(const Record& a, const Record& b, bool as_page);

// A flight record, the file `flight.json` (parallel/comm/trace.h), says what the ranks of a failed run had come to.
struct FlightOperation {
  std::string axis, operation;
  int64_t number = 0, bytes = 0;
  double begun = 0, ended = -1;  // seconds since the rank began; negative: it was still in it
};
struct RankFlight {
  int64_t rank = 0;
  std::string cause;
  std::vector<FlightOperation> operations;
};
// In the order of ranks; those that wrote nothing are not there, and `ranks` is how many there were. Throws InputError.
struct Flights {
  int64_t ranks = 0;
  std::vector<RankFlight> written;
};
Flights parse_flights(std::string_view file, const std::string& what);
// A table with the ranks beside each other and a row for each of the last operations of an axis: which ranks have done
// it, which were in it, which did not come, and which did something else in its place.
std::string record_flights(const Flights& flights, bool as_page);

// Rows of `bench`, as its JSON has them, and those of other programs of Google Benchmark; of one side or of two that
// are compared, each of one file or more.
struct BenchRun {
  std::vector<double> rounds, reference, machine;  // bench/run.h: add_rounds()
  bool busy = false;                               // others used more than a tenth of the processors
  int start = 0;                                   // number of its file
};
enum class Sample : uint8_t { time, ratio, reference, machine };  // ratio: a round over the reference round before it
struct BenchRow {
  std::string name, unit, label;
  std::array<std::vector<BenchRun>, 2> runs = {};  // in that unit, by side and repetition
  std::map<std::string, std::vector<double>> counters = {};
  // The values that represent it on a side: medians of its runs if there are five or more, which include what differs
  // from start to start; else all rounds. Empty if the row is missing, failed, or has no such list.
  std::vector<double> values(size_t side, Sample what) const;
  std::vector<double> times(size_t side) const { return values(side, Sample::time); }
};
struct Bench {
  struct Files {  // files of one side, one after another, that say the same of machine and program
    size_t side;
    std::string first, machine, since, until;
    size_t count = 1;
  };
  std::vector<Files> files = {};
  std::vector<BenchRow> rows = {};
  int starts = 0;
  // Throws InputError.
  void read(size_t side, const std::string& name, const std::string& json);
  // A part for each group of rows, with pictures that are so wide.
  std::vector<Part> parts(size_t sides, double width = kWidth) const;
  // A line for each run of equal files.
  std::string about() const;
};

// How much longer b takes than a: of all ratios of a time of b and one of a the median, and the interval in which the
// rank-sum test of Mann and Whitney finds no difference at a level of 2% (Hodges and Lehmann 1963). Nothing is assumed
// of how times are distributed. Fewer than five rounds each have no interval.
struct Change {
  double ratio = 1, low = 0, high = 0;
  bool known() const { return low > 0; }
  bool seen() const { return known() && (low > 1 || high < 1); }
};
Change compute_change(const std::vector<double>& a, const std::vector<double>& b);

// The comparison of a row. Rounds of one process are not independent, so an interval alone shows false differences:
// the verdict requires in addition a quiet machine and a change beyond what the control measurements changed.
struct Verdict {
  Change ratio, time;  // ratio: unknown without reference rounds
  // "slower", "faster", "no", "slower, one rank too"; without a verdict "busy", "machine", "no control", "too few
  // rounds"
  std::string words;
};
// Of each row of a group, such as all strategies: rows are controls for each other.
std::vector<Verdict> verdicts(const std::vector<const BenchRow*>& group);

// A plan that has not run, as far as theory knows it: its schedule, what its ranks send in a step by closed forms,
// and what they hold: parameters, gradients and optimizer state by closed forms, the rest by a dry run. Nothing is
// computed, and no rank is started. Of one option the words may have several values, 1f1b,zb-h1, which give one plan
// each, labelled with its value. Throws Error (usage) for a plan that cannot be.
std::vector<Record> planned(const Args& words);

}  // namespace tessera::report
