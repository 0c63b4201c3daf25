// The command `report`: a run with --trace, or one that failed, as one HTML file, or as text on standard output.
#include <fmt/format.h>

#include <filesystem>
#include <string>

#include "app/commands.h"
#include "app/output.h"
#include "app/report/flight.h"
#include "app/report/parts.h"
#include "app/report/record.h"
#include "app/run_directory.h"
#include "data/files.h"
#include "tensor/error.h"

namespace tessera {

namespace {

// Of a run that failed, what its ranks did last; of others, its trace.
std::string drawn(const std::filesystem::path& run, bool as_text) {
  const std::filesystem::path flights = run / kFlightFile;
  std::error_code none;
  if (std::filesystem::exists(flights, none)) {
    const report::Flights all = report::parse_flights(read_file(flights), flights.string());
    return as_text ? report::flight_text(all) : report::flight_page(all);
  }
  const report::Record record = report::read_record(run);
  return as_text ? report::text(record) : report::page(record);
}

}  // namespace

int run_report(const ReportOptions& o) {
  const std::filesystem::path run(o.run);
  if (o.format == "text") {
    if (o.out) throw Error("--out: expected no file with --format text, which goes to standard output");
    print(drawn(run, true));
    return 0;
  }
  const std::filesystem::path out = o.out ? std::filesystem::path(*o.out) : run / "report.html";
  const std::string page = drawn(run, false);
  remove_stale(out.has_parent_path() ? out.parent_path() : ".", false);
  if (write_file(out, page)) print(one_line(out.string()) + "\n");
  return 0;
}

}  // namespace tessera
