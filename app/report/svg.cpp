// Boxes, numbers and scales.
#include "app/report/svg.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>

namespace tessera::report {
namespace {
constexpr double kLetter = 6.7;  // about the width of one, in pixels
}

std::string escaped(std::string_view text) {
  std::string out;
  for (const char c : text) {
    if (c == '&')
      out += "&amp;";
    else if (c == '<')
      out += "&lt;";
    else if (c == '>')
      out += "&gt;";
    else if (c == '"')
      out += "&quot;";
    else if (static_cast<unsigned char>(c) < 0x20)
      out += ' ';
    else
      out += c;
  }
  return out;
}

std::string grouped(int64_t n) {
  std::string digits = fmt::format("{}", n);
  for (size_t at = digits.size(); at > 3; at -= 3) digits.insert(at - 3, ",");
  return digits;
}

std::string short_bytes(double bytes) {
  constexpr std::array<const char*, 5> units = {"B", "KB", "MB", "GB", "TB"};
  size_t unit = 0;
  for (; bytes >= 1000 && unit + 1 < units.size(); ++unit) bytes /= 1000;
  return fmt::format("{:.{}f} {}", bytes, unit == 0 ? 0 : bytes < 10 ? 2 : 1, units[unit]);
}

std::string short_time(double ms) {
  if (ms < 1) return fmt::format("{:.0f} µs", ms * 1e3);
  return ms < 1e3 ? fmt::format("{:.{}f} ms", ms, ms < 100 ? 2 : 1) : fmt::format("{:.2f} s", ms / 1e3);
}

std::string percent(double share) { return fmt::format("{:.1f}%", 100 * share); }

// Of UTF-8.
double width_of(std::string_view text) {
  return kLetter * static_cast<double>(std::ranges::count_if(text, [](char c) { return (c & 0xc0) != 0x80; }));
}

std::string box(const Box& at, std::string_view css, std::string_view tip, const std::vector<std::string>& labels,
                std::string_view attributes) {
  std::string out =
      fmt::format(R"(<rect class="{}" x="{:.2f}" y="{:.2f}" width="{:.2f}" height="{:.2f}" data-tip="{}"{}/>)", css,
                  at.x, at.y, std::max(0.4, at.width), at.height, escaped(tip), attributes);
  const auto fits = std::ranges::find_if(
      labels, [&](const std::string& label) { return !label.empty() && at.width > width_of(label) + 3; });
  if (fits != labels.end())
    out += fmt::format(R"(<text class="on" x="{:.2f}" y="{:.2f}">{}</text>)", at.x + at.width / 2,
                       at.y + at.height / 2 + 4, escaped(*fits));
  return out + "\n";
}

std::string text_at(double x, double y, std::string_view css, std::string_view text) {
  return fmt::format("<text class=\"{}\" x=\"{:.2f}\" y=\"{:.2f}\">{}</text>\n", css, x, y, escaped(text));
}

std::string time_axis(const TimeAxis& a) {
  std::string out;
  for (const double tick : ticks(0, a.span, a.width > kFigureWidth ? 10 : 6)) {
    const std::string words = fmt::format("{:.4g}{}", tick, a.in_ms ? " ms" : "");
    const double x = a.left + tick / a.span * (a.width - a.left);
    if (x + width_of(words) / 2 > a.width) break;
    out += text_at(x, a.y, tick > 0 ? "mid" : "start", words);
  }
  return out;
}

std::vector<double> ticks(double low, double high, int count) {
  std::vector<double> out;
  if (!(high > low) || !std::isfinite(high - low)) return {low};
  const double rough = (high - low) / count, magnitude = std::pow(10, std::floor(std::log10(rough)));
  double unit = 10 * magnitude;
  for (const double factor : {5.0, 2.0, 1.0})
    if (factor * magnitude >= rough) unit = factor * magnitude;
  const double first = std::ceil(low / unit - 1e-9);
  for (int i = 0; i <= 2 * count && (first + i) * unit <= high + 1e-9 * unit; ++i) out.push_back((first + i) * unit);
  return out;
}

std::string legend(const std::vector<LegendEntry>& entries) {
  std::string out = "<p class=\"legend\">";
  for (const LegendEntry& e : entries)
    out += fmt::format(
        R"(<span><svg class="key" viewBox="0 0 12 12"><rect class="{}" width="12" height="12"/></svg>{}</span> )",
        e.css, escaped(e.words));
  return out + "</p>\n";
}

std::string inline_svg(const Picture& p) {
  return fmt::format("<svg viewBox=\"0 0 {:.0f} {:.0f}\" role=\"img\" aria-label=\"{}\">\n", p.width, p.height,
                     escaped(p.title)) +
         p.body + "</svg>\n";
}

}  // namespace tessera::report
