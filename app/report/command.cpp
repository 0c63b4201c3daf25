// The command `report`: runs with --trace, or one that failed, as HTML, as text on standard output, or as a figure.
#include <fmt/format.h>

#include <filesystem>
#include <string>
#include <vector>

#include "app/commands.h"
#include "app/output.h"
#include "app/report/report.h"
#include "app/run/directory.h"
#include "data/files.h"
#include "tensor/error.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;

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
