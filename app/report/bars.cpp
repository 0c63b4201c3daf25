// Bars of bytes.
#include <fmt/format.h>

#include <algorithm>
#include <string>

#include "app/report/parts.h"

namespace tessera::report {
namespace {
constexpr double kRow = 24, kGap = 5, kBelow = 20, kTotal = 96;
constexpr const char* kPale = " c2";  // nothing can be read on it
}  // namespace

std::string css_of_axis(const std::string& axis) {
  for (const char* known : {"dp", "tp", "cp", "pp"})
    if (axis.starts_with(known)) return fmt::format("a-{}", known);
  return "a-world";
}

Picture bars_picture(const Bars& b) {
  double left = 40;
  for (const Bar& bar : b.bars) left = std::max(left, width_of(bar.name) + 14);
  const double byte = (b.width - left - kTotal) / std::max(1.0, b.most),
               rows = static_cast<double>(b.bars.size()) * kRow;
  Picture out{.title = b.title, .width = b.width, .height = rows + (b.limit ? kBelow : 0)};
  for (size_t i = 0; i < b.bars.size(); ++i) {
    const double y = static_cast<double>(i) * kRow;
    out.body += text_at(left - 8, y + 14, "end", b.bars[i].name);
    double x = left;
    for (const BarPart& part : b.bars[i].parts) {
      if (part.value <= 0) continue;
      out.body += box({x, y, part.value * byte, kRow - kGap}, part.css + " pass", part.tip,
                      {part.css.ends_with(kPale) ? "" : short_bytes(part.value)});
      x += part.value * byte;
    }
    out.body += text_at(x + 6, y + 14, "start", b.bars[i].total);
  }
  if (!b.limit) return out;
  const double at = left + *b.limit * byte;
  out.body += fmt::format("<line class=\"limit\" x1=\"{0:.1f}\" x2=\"{0:.1f}\" y1=\"0\" y2=\"{1:.1f}\"/>\n", at, rows);
  out.body += text_at(at, rows + 14, "mid", b.limit_words);
  return out;
}

}  // namespace tessera::report
