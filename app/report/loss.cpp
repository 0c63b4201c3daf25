// Curves of loss.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>

#include "app/report/parts.h"

namespace tessera::report {
namespace {

constexpr double kHeight = 240, kLeft = 60, kTop = 12, kBottom = 30;

// Where steps and losses lie in the picture.
struct Scale {
  double width = 1, first = std::numeric_limits<double>::infinity(), last = 0, low = first, high = -first;

  void take(const std::vector<Point>& points) {
    for (const Point& p : points) {
      low = std::min(low, p.value);
      high = std::max(high, p.value);
      first = std::min(first, static_cast<double>(p.step));
      last = std::max(last, static_cast<double>(p.step));
    }
  }
  void make_room() {
    const double room = std::max(1e-3, (high - low) * 0.06);
    low -= room;
    high += room;
  }
  double x(int64_t step) const {
    return kLeft + (width - kLeft - 10) * (static_cast<double>(step) - first) / std::max(1.0, last - first);
  }
  double y(double loss) const { return kTop + (kHeight - kTop - kBottom) * (high - loss) / (high - low); }
};

std::string grid(const Scale& s) {
  std::string out;
  for (const double tick : ticks(s.low, s.high, 5)) {
    const double y = s.y(tick);
    out += fmt::format("<line class=\"grid\" x1=\"{}\" x2=\"{}\" y1=\"{:.1f}\" y2=\"{:.1f}\"/>\n", kLeft, s.width - 10,
                       y, y);
    out += text_at(kLeft - 6, y + 4, "end", fmt::format("{:.4g}", tick));
  }
  for (const double tick : ticks(s.first, s.last, 10))
    if (tick == std::floor(tick))
      out += text_at(s.x(static_cast<int64_t>(tick)), kHeight - 10, "mid", fmt::format("{:.0f}", tick));
  return out;
}

const char* second(size_t run) { return run > 0 ? "2" : ""; }

}  // namespace

Picture loss_picture(const std::vector<const Record*>& runs, double width) {
  Scale s{.width = width};
  for (const Record* r : runs) s.take(r->losses), s.take(r->validations);
  Picture out{.title = "Loss by step", .width = width, .height = kHeight};
  if (s.low > s.high) return out;
  s.make_room();
  out.body = grid(s);
  for (size_t i = 0; i < runs.size(); ++i) {
    out.body += fmt::format("<polyline class=\"loss{}\" points=\"", second(i));
    for (const Point& p : runs[i]->losses) out.body += fmt::format("{:.1f},{:.1f} ", s.x(p.step), s.y(p.value));
    out.body += "\"/>\n";
    for (const Point& p : runs[i]->validations)
      out.body += fmt::format(
          "<circle class=\"val{}\" cx=\"{:.1f}\" cy=\"{:.1f}\" r=\"4\" data-tip=\"step {}: validation loss "
          "{:.4f}\"/>\n",
          second(i), s.x(p.step), s.y(p.value), p.step, p.value);
  }
  return out;
}

std::vector<LegendEntry> loss_legend(const std::vector<const Record*>& runs) {
  std::vector<LegendEntry> out;
  for (size_t i = 0; i < runs.size(); ++i) {
    const std::string of = runs.size() > 1 ? runs[i]->label + ", " : "";
    out.push_back({fmt::format("loss-key{}", second(i)), of + "training"});
    if (!runs[i]->validations.empty()) out.push_back({fmt::format("val{}", second(i)), of + "validation"});
  }
  return out;
}

}  // namespace tessera::report
