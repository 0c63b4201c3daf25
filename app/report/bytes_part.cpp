// What was sent along which axis, by which operation.
#include <fmt/format.h>

#include <algorithm>
#include <string>

#include "app/report/parts.h"
#include "app/report/svg.h"

namespace tessera::report {
namespace {

constexpr double kBar = 420;

std::string css_of(const std::string& axis) {
  for (const char* known : {"dp", "tp", "cp", "pp"})
    if (axis.starts_with(known)) return fmt::format("a-{}", known);
  return "a-world";
}

std::string bar(const Sent& s, int64_t most) {
  const double width = kBar * static_cast<double>(s.bytes) / static_cast<double>(most);
  return fmt::format("<svg class=\"bar\" viewBox=\"0 0 {} 14\" aria-hidden=\"true\">", kBar) +
         (s.bytes > 0 ? box({0, 1, width, 12}, css_of(s.axis),
                            fmt::format("{} {} | {} in {} calls", s.axis, s.operation,
                                        short_bytes(static_cast<double>(s.bytes)), grouped(s.calls)))
                      : "") +
         "</svg>";
}

}  // namespace

std::string bytes_part(const Record& r) {
  std::string out =
      "<section id=\"bytes\">\n<h2>Bytes by axis and operation</h2>\n<p>Each bar is what all ranks together sent in "
      "the "
      "whole run by one operation along one axis of the mesh, setting up and validation among it. A long bar along an "
      "axis is what a faster network between those ranks would shorten.</p>\n";
  if (r.sent.empty()) return out + "<p>One rank sends nothing.</p>\n</section>\n";
  int64_t most = 1, bytes = 0, calls = 0;
  for (const Sent& s : r.sent) {
    most = std::max(most, s.bytes);
    bytes += s.bytes;
    calls += s.calls;
  }
  out +=
      "<table id=\"sent\"><thead><tr><th>axis</th><th>operation</th><th class=\"n\">calls</th><th class=\"n\">bytes "
      "sent</th><th></th></tr></thead>\n<tbody>\n";
  for (const Sent& s : r.sent)
    out += fmt::format("<tr><td>{}</td><td>{}</td><td class=\"n\">{}</td><td class=\"n\">{}</td><td>{}</td></tr>\n",
                       escaped(s.axis), escaped(s.operation), grouped(s.calls), grouped(s.bytes), bar(s, most));
  out += fmt::format(
      "<tr class=\"sum\"><td>all</td><td></td><td class=\"n\">{}</td><td class=\"n\">{}</td><td></td></tr>\n",
      grouped(calls), grouped(bytes));
  return out + "</tbody></table>\n</section>\n";
}

}  // namespace tessera::report
