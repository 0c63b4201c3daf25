// Pictures as an SVG file: a frame, a heading, the key of its colours, and the pictures.
#include <fmt/format.h>

#include <algorithm>
#include <string>

#include "app/report/style.h"
#include "app/report/svg.h"

namespace tessera::report {
namespace {

constexpr double kMargin = 16, kLine = 20, kBetween = 14, kKey = 11;

// What boxes say when they are pointed at, as a browser shows it of an SVG file; what scripts need is left out.
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

// Flows from the left and breaks where the line is full; moves y to below itself.
std::string key(const std::vector<LegendEntry>& entries, double& y) {
  std::string out;
  double x = kMargin;
  if (entries.empty()) return out;
  for (const LegendEntry& e : entries) {
    const double width = kKey + 6 + width_of(e.words) + 14;
    if (x > kMargin && x + width > kMargin + kFigureWidth) x = kMargin, y += kLine;
    out += fmt::format("<rect class=\"{}\" x=\"{:.0f}\" y=\"{:.0f}\" width=\"{}\" height=\"{}\"/>", e.css, x, y + 3,
                       kKey, kKey);
    out += text_at(x + kKey + 6, y + 13, "start", e.words);
    x += width;
  }
  y += kLine;
  return out;
}

}  // namespace

std::string svg_file(const Figure& f) {
  double y = kMargin;
  std::string body = text_at(kMargin, y + 15, "title", f.title);
  y += 28;
  body += key(f.legend, y);
  double x = 0, lowest = y;
  for (const Picture& p : f.pictures) {
    if (x > 0 && x + p.width > kFigureWidth + 1) x = 0, y = lowest;
    const double heading = p.title.empty() ? 0 : kLine;
    if (heading > 0) body += text_at(kMargin + x, y + kBetween + 4, "name", p.title);
    body += fmt::format("<g transform=\"translate({:.0f} {:.0f})\">\n", kMargin + x, y + heading + kBetween / 2) +
            with_titles(p.body) + "</g>\n";
    lowest = std::max(lowest, y + heading + p.height + kBetween);
    x += p.width + kMargin;
  }
  const double width = kFigureWidth + 2 * kMargin, height = lowest + kMargin / 2;
  const std::string frame =
      fmt::format("<rect class=\"card\" x=\"0.5\" y=\"0.5\" width=\"{:.0f}\" height=\"{:.0f}\" rx=\"8\"/>\n", width - 1,
                  height - 1);
  return fmt::format(
             "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{0:.0f}\" height=\"{1:.0f}\" viewBox=\"0 0 {0:.0f} "
             "{1:.0f}\" role=\"img\" aria-labelledby=\"t d\">\n<title id=\"t\">{2}</title>\n<desc "
             "id=\"d\">{3}</desc>\n<style>",
             width, height, escaped(f.title), escaped(f.words)) +
         figure_style(frame + body) + "</style>\n" + frame + body + "</svg>\n";
}

}  // namespace tessera::report
