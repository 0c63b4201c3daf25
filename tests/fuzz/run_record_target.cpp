// A traced run as `tessera report` reads it: report.json, trace.json and metrics.jsonl separated by lines of ---. An
// accepted run can be plotted, also as single figures, and next to a run without a trace.

#include <string>
#include <string_view>

#include "app/report/report.h"
#include "tests/fuzz/target.h"

namespace tessera::fuzz {
const Target target("run_record", [](std::string_view bytes) {
  constexpr const char* kBetween = "\n---\n";
  const std::string_view report = take(bytes, kBetween), trace = take(bytes, kBetween);
  const report::Record record = report::parse_record({report, trace, bytes}, std::string(kWhat) + "/");
  const std::string page = report::make_report(record, true);
  require(page.ends_with("</html>\n"), "an accepted run can be plotted");
  require(report::make_report(record, false).ends_with('\n'), "its report can be printed");
  report::Record bare = report::parse_metrics(bytes, std::string(kWhat) + "/");
  require(report::compare_to_text(record, bare, true).ends_with("</html>\n"), "it can be compared with another run");
  require(report::compare_to_text(bare, record, false).ends_with('\n'), "in either order");
  for (const char* name : {"pipeline", "memory", "timeline", "bytes", "loss"}) try {
      const std::string svg = report::as_svg_file(report::make_figure(name, {record, record}));
      require(svg.ends_with("</svg>\n"), "a figure can be plotted");
    } catch (const InputError&) {
      throw;
    } catch (const Error&) {  // it lacks the data of the figure
    }
});

}  // namespace tessera::fuzz
