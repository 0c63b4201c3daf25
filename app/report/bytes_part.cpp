// What was sent along which axis, by which operation.
#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <string>
#include <utility>

#include "app/report/parts.h"
#include "app/report/svg.h"

namespace tessera::report {
namespace {

constexpr double kBar = 420;

std::string bar(const Sent& s, int64_t bytes, int64_t most) {
  const double width = kBar * static_cast<double>(bytes) / static_cast<double>(most);
  return fmt::format("<svg class=\"bar\" viewBox=\"0 0 {} 14\" aria-hidden=\"true\">", kBar) +
         (bytes > 0
              ? box({0, 1, width, 12}, css_of_axis(s.axis),
                    fmt::format("{} {} | {} in a step", s.axis, s.operation, short_bytes(static_cast<double>(bytes))))
              : "") +
         "</svg>";
}

}  // namespace

std::string bytes_part(const Record& r, const StepSpan& step) {
  std::string out = fmt::format(
      "<section id=\"bytes\">\n<h2>Bytes by axis and operation</h2>\n<p>Each bar shows the bytes that all ranks "
      "together "
      "sent in step {} by one operation along one axis of the mesh. A long bar shows where a faster network between "
      "ranks would help. Beside it is the whole run, with its set-up and validation.</p>\n",
      step.step);
  if (r.sent.empty()) return out + "<p>One rank sends nothing.</p>\n</section>\n";
  std::map<std::pair<std::string, std::string>, SentInStep> in_step;
  SentInStep sum;
  int64_t most = 1, bytes = 0, calls = 0;
  for (const SentInStep& s : sent_in_step(r, step)) {
    in_step[{s.axis, s.operation}] = s;
    most = std::max(most, s.bytes);
    sum.bytes += s.bytes;
    sum.calls += s.calls;
  }
  for (const Sent& s : r.sent) bytes += s.bytes, calls += s.calls;
  out +=
      "<table id=\"sent\"><thead><tr><th>axis</th><th>operation</th><th class=\"n\">calls in the step</th><th "
      "class=\"n\">bytes</th><th></th><th class=\"n\">calls in the run</th><th class=\"n\">bytes</th></tr></thead>\n"
      "<tbody>\n";
  const auto row = [&](const std::string& head, const SentInStep& s, const std::string& drawn, int64_t all_calls,
                       int64_t all_bytes) {
    out += fmt::format(
        "{}<td class=\"n\">{}</td><td class=\"n\">{}</td><td>{}</td><td class=\"n\">{}</td><td "
        "class=\"n\">{}</td></tr>\n",
        head, grouped(s.calls), grouped(s.bytes), drawn, grouped(all_calls), grouped(all_bytes));
  };
  for (const Sent& s : r.sent) {
    const SentInStep one = in_step[{s.axis, s.operation}];
    row(fmt::format("<tr><td>{}</td><td>{}</td>", escaped(s.axis), escaped(s.operation)), one, bar(s, one.bytes, most),
        s.calls, s.bytes);
  }
  row("<tr class=\"sum\"><td>all</td><td></td>", sum, "", calls, bytes);
  return out + "</tbody></table>\n</section>\n";
}

}  // namespace tessera::report
