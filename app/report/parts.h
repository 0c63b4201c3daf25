// The report of a run, as a page and as text; its pictures, each of which may also stand alone.
#pragma once
#include <optional>
#include <string>
#include <vector>

#include "app/report/measured.h"
#include "app/report/record.h"
#include "app/report/svg.h"

namespace tessera::report {

// The file around what its <main> has: style and script stand in it, and `data` behind it, for programs.
std::string whole_page(const std::string& title, const std::string& main, const std::string& data = "");

// A schedule on its clock, a row of boxes for each rank; `scale` is the time that the whole width shows.
struct Panel {
  const Simulation& sim;
  std::string title;
  double scale = 1;
  bool in_ms = true;
  double width = kWidth;
};
Picture panel_picture(const Panel& panel);
std::string panel_svg(const Panel& panel);  // in a page, below its title
// As planned, as replayed, and as measured where that says something of the plan.
std::vector<Panel> panels_of(const Record& record, const MeasuredPipeline& pipeline, const StepSpan& step);
std::vector<LegendEntry> pass_legend(const Schedule& schedule);

// A rank's tracks in one step, from its begin on; `span` is the time that the whole width shows.
Picture rank_timeline(const Rank& rank, const StepSpan& step, double span, double width);
std::vector<LegendEntry> timeline_legend(const Record& record);

// What a rank held during a step; `most` is what the whole height shows.
Picture rank_memory(const Rank& rank, const StepSpan& step, double most, double width, bool tips = true);
int64_t most_held(const Rank& rank, const StepSpan& step);
std::vector<LegendEntry> memory_legend();

// Losses of one run, or of two.
Picture loss_picture(const std::vector<const Record*>& runs, double width);
std::vector<LegendEntry> loss_legend(const std::vector<const Record*>& runs);

// Bars that begin at one line, each made of parts.
struct BarPart {
  std::string css, tip;
  double value = 0;
};
struct Bar {
  std::string name;
  std::vector<BarPart> parts;
  std::string total;  // what is written behind it
};
struct Bars {
  std::string title;
  std::vector<Bar> bars;
  double most = 1;  // what the longest may be
  double width = kWidth;
  std::optional<double> limit = {};  // a line across, with its words
  std::string limit_words = {};
};
Picture bars_picture(const Bars& bars);  // values are bytes
std::string css_of_axis(const std::string& axis);

// The parts of the page: each gives a <section> with a heading, how to read it, and its picture.
std::string head_part(const Record& record);  // what ran, and its loss
std::string pipeline_part(const Record& record, const MeasuredPipeline& pipeline, const StepSpan& step);
std::string timeline_part(const Record& record, const StepSpan& step);  // every rank's tracks in one step
std::string timeline_text(const Record& record, const StepSpan& step);  // two lines for each rank
std::string memory_part(const Record& record, const StepSpan& step);
std::string bytes_part(const Record& record, const StepSpan& step);
std::string experts_part(const Record& record, const StepSpan& step);  // nothing of a model without experts
std::string experts_text(const Record& record, const StepSpan& step);

// The whole file: HTML with its style and script inside.
std::string page(const Record& record);
// The same as text, without the curves: the pipeline planned and measured, to scale, then ranks in one step, bytes by
// axis and peaks of memory.
std::string text(const Record& record);
extern const char* const kScript;

}  // namespace tessera::report
