// The command `report`: runs with --trace, or one that failed, as HTML, as text on standard output, or as a figure.
#include <fmt/format.h>

#include <filesystem>
#include <string>
#include <vector>

#include "app/commands.h"
#include "app/output.h"
#include "app/report/compare.h"
#include "app/report/figures.h"
#include "app/report/flight.h"
#include "app/report/parts.h"
#include "app/report/planned.h"
#include "app/report/record.h"
#include "app/run/directory.h"
#include "data/files.h"
#include "tensor/error.h"

namespace tessera {

namespace {

namespace fs = std::filesystem;

// Of a run that failed, what its ranks did last; of others, its trace.
std::string drawn(const fs::path& run, bool as_text) {
  const fs::path flights = run / kFlightFile;
  std::error_code none;
  if (fs::exists(flights, none)) {
    const report::Flights all = report::parse_flights(read_file(flights), flights.string());
    return as_text ? report::flight_text(all) : report::flight_page(all);
  }
  const report::Record record = report::read_record(run);
  return as_text ? report::text(record) : report::page(record);
}

std::vector<report::Record> records_of(const ReportOptions& o) {
  if (o.runs.empty()) return report::planned(o.words);
  std::vector<report::Record> out;
  for (const std::string& run : o.runs) out.push_back(report::read_any_record(run));
  return out;
}

// What is written: beside the first run, where nothing else is said; the second gives it its name.
std::string content(const ReportOptions& o) {
  const bool as_text = o.format == "text";
  if (o.figure) return report::svg_file(report::figure_of(*o.figure, records_of(o)));
  if (o.runs.size() == 1) return drawn(o.runs[0], as_text);
  const std::vector<report::Record> runs = records_of(o);
  return as_text ? report::comparison_text(runs[0], runs[1]) : report::comparison_page(runs[0], runs[1]);
}

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
