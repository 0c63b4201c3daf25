// The report of a run, as a page and as text. The parts of the page: each gives a <section> with a heading, how to read
// it, and its picture.
#pragma once
#include <optional>
#include <string>

#include "app/report/measured.h"
#include "app/report/record.h"

namespace tessera::report {

// The file around what its <main> has: style and script stand in it, and `data` behind it, for programs.
std::string whole_page(const std::string& title, const std::string& main, const std::string& data = "");
// A schedule on its clock, a row of boxes for each rank; `scale` is the time that the whole width shows.
struct Panel {
  const Simulation& sim;
  std::string title;
  double scale = 1;
  bool in_ms = true;
};
std::string panel_svg(const Panel& panel);

std::string head_part(const Record& record);  // what ran, and its loss
std::string pipeline_part(const Record& record, const MeasuredPipeline& pipeline, const StepSpan& step);
std::string timeline_part(const Record& record, const StepSpan& step);  // every rank's tracks in one step
std::string timeline_text(const Record& record, const StepSpan& step);  // two lines for each rank
std::string memory_part(const Record& record, const StepSpan& step);
std::string bytes_part(const Record& record);

// The whole file: HTML with its style and script inside.
std::string page(const Record& record);
// The same as text, without the curves: the pipeline planned and measured, to scale, then ranks in one step, bytes by
// axis and peaks of memory.
std::string text(const Record& record);
extern const char* const kStyle;
extern const char* const kScript;

}  // namespace tessera::report
