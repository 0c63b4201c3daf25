// The parts of a report: of a run, of two runs beside each other, of one that failed; figures of runs and of plans.
#pragma once
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "app/options.h"
#include "app/report/drawing.h"
#include "app/report/record.h"

namespace tessera::report {

inline constexpr std::string_view kFigures = "pipeline|memory|timeline|bytes|loss";
// One of kFigures, of pictures that together are so wide. Runs have one scale. Throws Error (usage) that says which run
// lacks what the figure shows.
Part figure_of(std::string_view name, const std::vector<Record>& runs, double width = kFigureWidth);

// A schedule on its clock, a lane for each rank; `scale` is the time that the whole width shows.
struct Panel {
  const Simulation& sim;
  std::string title;
  double scale = 1;
  Wording words = short_time, tick = tick_of_ms;  // for its times
};
Lanes lanes_of(const Panel& panel, double width = kWidth);
// As planned, as replayed, and as measured where that says something of the plan.
std::vector<Panel> panels_of(const Record& record, const MeasuredPipeline& pipeline, const StepSpan& step);
std::vector<LegendEntry> pass_legend(const Schedule& schedule);

// Pictures and legends that figures and parts of the page share: the first `ranks` in one step. `span` and `most` are
// the time and the bytes that a whole picture shows.
std::vector<Picture> timelines_of(const Record& record, const StepSpan& step, double span, size_t ranks, double width);
std::vector<LegendEntry> timeline_legend(const Record& record);
std::vector<Picture> memories_of(const Record& record, const StepSpan& step, double most, size_t ranks, double width);
double most_held(const Record& record, const StepSpan& step, size_t ranks);
std::vector<LegendEntry> memory_legend();
std::string css_of_axis(const std::string& axis);

// Parts of a run; without a measured pipeline the part says so.
Part pipeline_part(const Record& record, const StepSpan& step, const std::optional<MeasuredPipeline>& pipeline);
Part experts_part(const Record& record, const StepSpan& step);
// A run as one file of HTML, or as text without the curves, in lines of at most 120 characters: the pipeline planned
// and measured, to scale, then ranks in one step, bytes by axis and peaks of memory.
std::string report_of(const Record& record, bool as_page);

// Two runs beside each other. Either may have no trace, and they may have made different numbers of steps: what both
// have is compared, and what one lacks is said.
std::string comparison_of(const Record& a, const Record& b, bool as_page);

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
std::string flights_of(const Flights& flights, bool as_page);

// A plan that has not run, as far as theory knows it: its schedule, what its ranks send in a step by closed forms,
// and what they hold: parameters, gradients and optimizer state by closed forms, the rest by a dry run. Nothing is
// computed, and no rank is started. Of one option the words may have several values, 1f1b,zb-h1, which give one plan
// each, labelled with its value. Throws Error (usage) for a plan that cannot be.
std::vector<Record> planned(const Words& words);

}  // namespace tessera::report
