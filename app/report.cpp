// The command `report`: a run with --trace as one HTML file, or as text on standard output.
#include <fmt/format.h>

#include <filesystem>
#include <string>

#include "app/commands.h"
#include "app/output.h"
#include "app/report/parts.h"
#include "app/report/record.h"
#include "data/files.h"
#include "tensor/error.h"

namespace tessera {

int run_report(const ReportOptions& o) {
  const std::filesystem::path run(o.run);
  if (o.format == "text") {
    if (o.out) throw Error("--out: expected no file with --format text, which goes to standard output");
    print(report::text(report::read_record(run)));
    return 0;
  }
  const std::filesystem::path out = o.out ? std::filesystem::path(*o.out) : run / "report.html";
  const std::string page = report::page(report::read_record(run));
  remove_stale(out.has_parent_path() ? out.parent_path() : ".", false);
  if (write_file(out, page)) print(one_line(out.string()) + "\n");
  return 0;
}

}  // namespace tessera
