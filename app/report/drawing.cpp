// Words for numbers, and pictures: boxes, lanes, charts and axes.
#include "app/report/drawing.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <map>

namespace tessera::report {
namespace {

constexpr double kLetter = 6.7;  // about the width of one, in pixels
constexpr double kKey = 11, kLine = 20, kBelow = 22, kThin = 4;

// About how wide a text of UTF-8 is, in pixels.
double width_of(std::string_view text) {
  return kLetter * static_cast<double>(std::ranges::count_if(text, [](char c) { return (c & 0xc0) != 0x80; }));
}

std::string line(std::string_view css, double x1, double y1, double x2, double y2) {
  return fmt::format("<line class=\"{}\" x1=\"{:.1f}\" x2=\"{:.1f}\" y1=\"{:.1f}\" y2=\"{:.1f}\"/>\n", css, x1, x2, y1,
                     y2);
}

}  // namespace

std::string escaped(std::string_view text) {
  static const std::map<char, const char*> names = {{'&', "&amp;"}, {'<', "&lt;"}, {'>', "&gt;"}, {'"', "&quot;"}};
  std::string out;
  for (const char c : text)
    if (const auto name = names.find(c); name != names.end())
      out += name->second;
    else
      out += static_cast<unsigned char>(c) < 0x20 ? ' ' : c;
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
std::string tick_of_ms(double time) { return fmt::format("{:.4g} ms", time); }

std::string svg_of(const Box& b) {
  const std::string tip = b.tip.empty() ? "" : fmt::format(" data-tip=\"{}\"", escaped(b.tip));
  std::string out = fmt::format(R"(<rect class="{}" x="{:.2f}" y="{:.2f}" width="{:.2f}" height="{:.2f}"{}{}/>)", b.css,
                                b.x, b.y, std::max(0.4, b.width), b.height, tip, b.attributes);
  const auto fits = std::ranges::find_if(
      b.labels, [&](const std::string& label) { return !label.empty() && b.width > width_of(label) + 3; });
  if (fits != b.labels.end())
    out += fmt::format(R"(<text class="on" x="{:.2f}" y="{:.2f}">{}</text>)", b.x + b.width / 2, b.y + b.height / 2 + 4,
                       escaped(*fits));
  return out + "\n";
}

std::string text_at(double x, double y, std::string_view css, std::string_view text) {
  return fmt::format("<text class=\"{}\" x=\"{:.2f}\" y=\"{:.2f}\">{}</text>\n", css, x, y, escaped(text));
}

std::string with_titles(const std::string& body) {
  static const std::string before = " data-tip=\"";
  std::string out;
  size_t from = 0;
  for (size_t at; (at = body.find(before, from)) != std::string::npos;) {
    const size_t open = body.rfind('<', at) + 1, begin = at + before.size(), end = body.find('"', begin);
    std::string tip = body.substr(begin, end - begin);
    for (size_t bar; (bar = tip.find(" | ")) != std::string::npos;) tip.replace(bar, 3, ", ");
    out += fmt::format("{}><title>{}</title></{}>", body.substr(from, at - from), tip,
                       body.substr(open, body.find(' ', open) - open));
    from = body.find("/>", end) + 2;
  }
  return out + body.substr(from);
}

std::string legend_svg(const std::vector<LegendEntry>& entries, double left, double width, double& y) {
  std::string out;
  double x = left;
  for (const LegendEntry& e : entries) {
    const double wide = kKey + 6 + width_of(e.words) + 14;
    if (x > left && x + wide > left + width) x = left, y += kLine;
    out += svg_of({x, y + 3, kKey, kKey, e.css}) + text_at(x + kKey + 6, y + 13, "key", e.words);
    x += wide;
  }
  y += entries.empty() ? 0 : kLine;
  return out;
}

std::vector<double> ticks(double low, double high, double count) {
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

std::string Chart::axis(double foot, const Wording& words, double count) const {
  std::string out;
  for (const double tick : ticks(0, last - first, count > 0 ? count : width > kFigureWidth ? 10 : 6)) {
    const double at = x(first + tick);
    if (at + width_of(words(tick)) / 2 > width - (count > 0 ? 0 : right)) break;
    if (count > 0) out += line("grid", at, top, at, foot - 10);
    out += text_at(at, foot, tick > 0 ? "mid" : "key", words(tick));
  }
  return out;
}

std::string Chart::grid(const Wording& words) const {
  std::string out;
  for (const double tick : ticks(low, high, 5))
    out += line("grid", left, y(tick), width - right, y(tick)) + text_at(left - 6, y(tick) + 4, "end", words(tick));
  return out;
}

double left_of(const std::vector<Lane>& lanes) {
  double left = 40;
  for (const Lane& lane : lanes) left = std::max(left, width_of(lane.name) + 14);
  return left;
}

void stack(Lane& lane, double value, const std::string& css, const std::string& tip, const std::string& label) {
  const double begin = lane.marks.empty() ? 0 : lane.marks.back().end;
  if (value > 0) lane.marks.push_back({begin, begin + value, css, tip, {label}});
}

Picture drawn(const Lanes& l) {
  const double end = static_cast<double>(l.lanes.size()) * l.tall, tall = l.tall - l.gap, foot = tall / 2 + 4.5;
  const Chart chart{.width = l.width, .height = end, .left = l.left, .right = l.right, .last = l.most};
  Picture out{.title = l.title, .width = l.width, .height = end + (l.limit || l.axis ? kBelow : 0)};
  if (l.axis) out.body += chart.axis(end + 14, l.axis, l.ticks);
  for (size_t i = 0; i < l.lanes.size(); ++i) {
    const double y = static_cast<double>(i) * l.tall;
    const Lane& lane = l.lanes[i];
    for (const Mark& m : lane.marks)
      out.body += svg_of({chart.x(m.begin), m.thin ? y + tall - kThin : y, chart.x(m.end) - chart.x(m.begin),
                          m.thin ? kThin : tall, m.css, m.tip, l.tall > 12 ? m.labels : std::vector<std::string>(),
                          m.attributes});
    if (i % l.named > 0) continue;
    out.body += text_at(l.left - 8, y + foot, "end", lane.name);
    const double behind = chart.x(lane.marks.empty() ? 0 : lane.marks.back().end) + 6;
    if (!lane.behind.empty()) out.body += text_at(behind, y + foot, lane.behind_css, lane.behind);
  }
  if (!l.limit) return out;
  const double at = chart.x(*l.limit);
  for (const char* css : {"halo", "limit"}) out.body += line(css, at, 0, at, end);
  out.body += l.axis ? text_at(at, -8, "bad end", l.limit_words) : text_at(at, end + 14, "mid", l.limit_words);
  return out;
}

}  // namespace tessera::report
