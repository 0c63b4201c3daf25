// What ran, and the curve of its loss.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <string>

#include "app/report/parts.h"
#include "app/report/svg.h"

namespace tessera::report {
namespace {

constexpr double kHeight = 240, kLeft = 60, kTop = 12, kBottom = 30;

// Where steps and losses lie in the picture.
struct Scale {
  double first = 1, last = 1, low = 0, high = 1;
  double x(int64_t step) const {
    return kLeft + (kWidth - kLeft - 10) * (static_cast<double>(step) - first) / std::max(1.0, last - first);
  }
  double y(double loss) const { return kTop + (kHeight - kTop - kBottom) * (high - loss) / (high - low); }
};

Scale scale_of(const Record& r) {
  Scale s;
  double low = r.losses[0].value, high = low;
  s.first = s.last = static_cast<double>(r.losses[0].step);
  const auto take = [&](const Point& p) {
    low = std::min(low, p.value);
    high = std::max(high, p.value);
    s.first = std::min(s.first, static_cast<double>(p.step));
    s.last = std::max(s.last, static_cast<double>(p.step));
  };
  for (const Point& p : r.losses) take(p);
  for (const Point& p : r.validations) take(p);
  const double room = std::max(1e-3, (high - low) * 0.06);
  s.low = low - room;
  s.high = high + room;
  return s;
}

std::string loss_picture(const Record& r) {
  if (r.losses.empty()) return "<p>No step was recorded.</p>\n";
  const Scale s = scale_of(r);
  std::string out = open_svg(kHeight, "loss by step");
  for (const double tick : ticks(s.low, s.high, 5)) {
    const double y = s.y(tick);
    out +=
        fmt::format("<line class=\"grid\" x1=\"{}\" x2=\"{}\" y1=\"{:.1f}\" y2=\"{:.1f}\"/>", kLeft, kWidth - 10, y, y);
    out += text_at(kLeft - 6, y + 4, "end", fmt::format("{:.4g}", tick));
  }
  for (const double tick : ticks(s.first, s.last, 10))
    if (tick == std::floor(tick))
      out += text_at(s.x(static_cast<int64_t>(tick)), kHeight - 10, "mid", fmt::format("{:.0f}", tick));
  out += "<polyline class=\"loss\" points=\"";
  for (const Point& p : r.losses) out += fmt::format("{:.1f},{:.1f} ", s.x(p.step), s.y(p.value));
  out += "\"/>\n";
  for (const Point& p : r.validations)
    out += fmt::format(
        "<circle class=\"val\" cx=\"{:.1f}\" cy=\"{:.1f}\" r=\"4\" data-tip=\"step {}: validation loss {:.4f}\"/>\n",
        s.x(p.step), s.y(p.value), p.step, p.value);
  return out + "</svg>\n";
}

std::string fact(const std::string& name, const std::string& value) {
  return fmt::format("<div><dt>{}</dt><dd>{}</dd></div>\n", escaped(name), escaped(value));
}

}  // namespace

std::string head_part(const Record& r) {
  std::string out = fmt::format(
      "<section id=\"run\">\n<h1>A training run of Tessera</h1>\n<p class=\"model\">{}</p>\n<dl>\n", escaped(r.model));
  out += fact("written", r.written) + fact("steps", grouped(r.steps));
  if (r.tokens_per_s > 0) out += fact("tokens/s", grouped(std::llround(r.tokens_per_s)) + " (median step)");
  if (!r.losses.empty()) out += fact("loss at the end", fmt::format("{:.4f}", r.losses.back().value));
  if (!r.validations.empty()) out += fact("validation loss", fmt::format("{:.4f}", r.validations.back().value));
  for (const auto& [name, value] : r.plan) out += fact(name, value);
  out += fact("cores", fmt::format("{} for {} threads of ranks", r.cores, r.threads));
  out += fact("traced", r.kept) + fact("times", r.clock);
  out +=
      "</dl>\n</section>\n<section id=\"loss\">\n<h2>Loss</h2>\n<p>The line is the training loss of each step, the "
      "dots "
      "are the mean loss over the whole validation split. A line that falls while the dots rise has begun to learn "
      "the text by heart.</p>\n";
  return out + legend({{"loss-key", "training"}, {"val", "validation"}}) + loss_picture(r) + "</section>\n";
}

}  // namespace tessera::report
