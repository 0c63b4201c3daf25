// Words of the command line for `report`: runs, or the options of a plan.
#include "app/report_options.h"

#include <fmt/format.h>

#include <CLI/CLI.hpp>

#include "app/option_values.h"
#include "app/report/figures.h"
#include "app/run_words.h"
#include "tensor/error.h"

namespace tessera {
namespace {

constexpr const char* kExamples =
    "Examples:\n"
    "  tessera train --trace --pp 2 --microbatches 6 --out runs/mine   a run that leaves a timeline\n"
    "  tessera report runs/mine                        draws it: runs/mine/report.html, for any browser\n"
    "  tessera report runs/mine runs/other             two runs beside each other; one may have no trace\n"
    "  tessera report runs/mine --figure timeline --svg              one picture: runs/mine/timeline.svg\n"
    "  tessera report --figure memory --svg --ranks 4 --zero 0,1,2,3 > zero.svg    plans that have not run\n"
    "  tessera report --figure pipeline --svg --pp 4 --microbatches 8 --schedule 1f1b,zb-h1 --out two.svg";

// Of `train`'s, those that say what a plan sends and holds.
bool is_of_plan_drawn(std::string_view name) {
  if (name == "record" || name == "replay" || name == "staleness") return false;
  bool out = name == "batch" || name == "microbatches" || name == "recompute" || name == "optimizer";
  for_each_option(TrainOptions{}, [&](const OptionInfo& info, const auto&) {
    out = out || (info.name == name && (info.group == "Model" || info.group == "Plan"));
  });
  return out;
}

}  // namespace

void add_report(CLI::App& app, ReportOptions& o, Findings& wrong) {
  CLI::App* r = app.add_subcommand("report", "Draw a run, or two beside each other: timeline, memory, bytes, loss");
  r->add_option(
       "RUN", o.runs,
       "run directory of a run with --trace; one of two runs may lack a trace; with --figure and no run: the plan "
       "of the options below, one of which may have several values: 1f1b,zb-h1")
      ->expected(0, 2)
      ->type_name("");
  add_words(*r, "--format", "html: a file; text: on standard output [html]",
            {[&o](const std::string& t) { o.format = parse_choice("--format", t, "html|text"); }, wrong});
  add_words(*r, "--figure", fmt::format("one picture: {}", report::kFigures),
            {[&o](const std::string& t) { o.figure = parse_choice("--figure", t, report::kFigures); }, wrong});
  r->add_flag("--svg", o.svg, "form of the picture: one SVG file");
  add_words(*r, "--out", "file to write; default: a name in RUN, or standard output for a plan",
            {[&o](const std::string& t) {
               if (t.empty()) throw Error("--out: expected a file to write, found ''");
               o.out = t;
             },
             wrong});
  const TrainOptions usual;
  add_run_words(*r, o.words, {.defaults = usual, .wanted = is_of_plan_drawn, .without_default = [](std::string_view) {
                                return true;
                              }});
  r->footer(kExamples);
}

}  // namespace tessera
