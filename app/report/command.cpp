// The command `report`: runs with --trace, or one that failed, as HTML, as text on standard output, or as a figure. Its
// words are runs, or the options of a plan.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <filesystem>
#include <string>
#include <vector>

#include "app/commands.h"
#include "app/option_values.h"
#include "app/output.h"
#include "app/report/options.h"
#include "app/report/report.h"
#include "app/run/directory.h"
#include "app/run_words.h"
#include "data/files.h"
#include "tensor/error.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;

constexpr const char* kExamples =
    "Examples:\n"
    "  tessera train --trace --pp 2 --microbatches 6 --out runs/mine   a run that leaves a timeline\n"
    "  tessera report runs/mine                        draws it: runs/mine/report.html, for any browser\n"
    "  tessera report runs/mine runs/other             two runs beside each other; one may have no trace\n"
    "  tessera report runs/mine --figure timeline --svg              one picture: runs/mine/timeline.svg\n"
    "  tessera report --figure memory --svg --ranks 4 --zero 0,1,2,3 > zero.svg    plans that have not run\n"
    "  tessera report --figure pipeline --svg --pp 4 --microbatches 8 --schedule 1f1b,zb-h1 --out two.svg";

// Whether an option of `train` says what a plan sends and holds.
bool is_of_plan_drawn(std::string_view name) {
  if (name == "record" || name == "replay" || name == "staleness") return false;
  bool out = name == "batch" || name == "microbatches" || name == "recompute" || name == "optimizer";
  for_each_option(TrainOptions{}, [&](const OptionInfo& info, const auto&) {
    out = out || (info.name == name && (info.group == "Model" || info.group == "Plan"));
  });
  return out;
}

// Draws what the ranks of a run that failed did last; of another run, its trace.
std::string drawn(const fs::path& run, bool as_page) {
  const fs::path flights = run / kFlightFile;
  std::error_code none;
  if (fs::exists(flights, none))
    return report::flights_of(report::parse_flights(read_file(flights), flights.string()), as_page);
  return report::report_of(report::read_record(run), as_page);
}

std::vector<report::Record> records_of(const ReportOptions& o) {
  if (o.runs.empty()) return report::planned(o.words);
  std::vector<report::Record> out;
  for (const std::string& run : o.runs) out.push_back(report::read_record(run, true));
  return out;
}

std::string content(const ReportOptions& o) {
  const bool as_page = o.format != "text";
  if (o.figure) return report::as_svg_file(report::figure_of(*o.figure, records_of(o)));
  if (o.runs.size() == 1) return drawn(o.runs[0], as_page);
  const std::vector<report::Record> runs = records_of(o);
  return report::comparison_of(runs[0], runs[1], as_page);
}

// The file stands beside the first run, where nothing else is said; the second gives it its name.
fs::path place_of(const ReportOptions& o) {
  if (o.out) return *o.out;
  std::string name = o.figure.value_or("report");
  if (o.runs.size() == 2) {
    const fs::path other = fs::path(o.runs[1]).lexically_normal();
    name += "-" + (other.has_filename() ? other : other.parent_path()).filename().string();
  }
  return fs::path(o.runs[0]) / (name + (o.figure ? ".svg" : ".html"));
}

void check(const ReportOptions& o) {
  if (o.svg && !o.figure) throw Error("--svg: expected --figure beside it, found none");
  if (o.figure && !o.svg) throw Error("--figure: a figure is an SVG file; expected --svg beside it, found none");
  if (o.figure && o.format == "text")
    throw Error("--format: a figure has no text; expected no --format beside --figure, found text");
  if (o.format == "text" && o.out)
    throw Error("--out: expected no file with --format text, which goes to standard output");
  if (o.runs.empty() && !o.figure) throw Error("RUN: expected a run directory, found none");
  if (o.runs.size() > 2) throw Error(fmt::format("RUN: expected at most two, found {}", o.runs.size()));
  if (!o.runs.empty() && !o.words.empty())
    throw Error(fmt::format("--{}: expected no option of a plan beside a run", o.words.front().first));
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

int run_report(const ReportOptions& o) {
  check(o);
  const std::string made = content(o);
  if (o.format == "text" || (o.runs.empty() && !o.out)) {
    print(made);
    return 0;
  }
  const fs::path out = place_of(o);
  remove_stale(out.has_parent_path() ? out.parent_path() : ".", false);
  if (write_file(out, made)) print(one_line(out.string()) + "\n");
  return 0;
}

}  // namespace tessera
