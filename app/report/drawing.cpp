// Number formatting, SVG figures, and rendering of parts and pages as HTML, text and SVG.
#include "app/report/drawing.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <map>
#include <sstream>

#include "base/setting.h"

namespace tessera::report {
namespace {

constexpr double kLetter = 6.7;  // approximate width in pixels
constexpr double kLetterLine = 13, kKey = 11, kLine = 20, kBelow = 22, kThin = 4;

double text_width(std::string_view text) {
  return kLetter * static_cast<double>(std::ranges::count_if(text, [](char c) { return (c & 0xc0) != 0x80; }));
}

std::string line(std::string_view css, double x1, double y1, double x2, double y2) {
  return fmt::format("<line class=\"{}\" x1=\"{:.1f}\" x2=\"{:.1f}\" y1=\"{:.1f}\" y2=\"{:.1f}\"/>\n", css, x1, x2, y1,
                     y2);
}

struct Colour {
  const char *name, *light, *dark;
};
constexpr Colour kColours[] = {
    {"ground", "#fbfbfa", "#14171c"}, {"card", "#ffffff", "#1b1f26"},    {"ink", "#1d2129", "#e3e6ea"},
    {"soft", "#535b67", "#a3acb8"},   {"line", "#dfe2e6", "#323842"},    {"idle", "#eef0f2", "#252a33"},
    {"on", "#ffffff", "#0e1115"},     {"k-F", "#2f6db5", "#6ea8ea"},     {"k-B", "#bd561b", "#ee9257"},
    {"k-I", "#966b02", "#dcb548"},    {"k-W", "#2f7d4e", "#6cc08c"},     {"k-opt", "#7d5bb3", "#ae90e2"},
    {"k-fin", "#6d7582", "#8b94a1"},  {"k-msg", "#5b6b7d", "#8d9db0"},   {"wait", "#b9c0c9", "#59626f"},
    {"a-pp", "#2f4b7c", "#b9c8ec"},   {"a-dp", "#1a7d7d", "#4fbdbd"},    {"a-tp", "#b8487d", "#e07aab"},
    {"a-cp", "#8a6a3a", "#c09d68"},   {"a-world", "#6e757f", "#79828f"}, {"m0", "#2f6db5", "#6ea8ea"},
    {"m1", "#bd561b", "#ee9257"},     {"m2", "#7d5bb3", "#ae90e2"},      {"m3", "#2f7d4e", "#6cc08c"},
    {"m4", "#8e7210", "#dcb548"},     {"m5", "#6e757f", "#79828f"},      {"warn", "#fdf1dc", "#3a2f17"},
};

// A file of app/report/page/ without its first line, a comment, and with `values` in place of the names in braces.
// `values` begin with the last name in the file, so that inserted text is never searched.
std::string page_file(std::string_view name, const std::vector<std::pair<const char*, std::string>>& values = {}) {
  const std::string_view file = std::ranges::find(page_files(), name, &EmbeddedFile::name)->text;
  std::string out(file.substr(file.find('\n') + 1));
  for (const auto& [key, text] : values) {
    const std::string braced = fmt::format("{{{}}}", key);
    out.replace(out.find(braced), braced.size(), text);
  }
  return out;
}

// Each colour's name is also the CSS class of its elements.
std::string picture_rules() {
  std::string out = page_file("figure");
  for (const Colour& c : kColours) out += fmt::format(".{0} {{ fill: var(--{0}); }}\n", c.name);
  return out;
}

std::string variables(const char* Colour::*which) {
  std::string out;
  for (const Colour& c : kColours) out += fmt::format(" --{}: {};", c.name, c.*which);
  return out;
}

std::string coloured(std::string rule, const char* Colour::*which) {
  for (const Colour& c : kColours) {
    const std::string name = fmt::format("var(--{})", c.name);
    for (size_t at; (at = rule.find(name)) != std::string::npos;) rule.replace(at, name.size(), c.*which);
  }
  return rule;
}

bool uses(const std::string& body, const std::string& rule) {
  const size_t dot = rule.find('.'), brace = rule.find(" {");
  if (dot == std::string::npos || dot > brace) return true;
  const std::string name = rule.substr(dot + 1, brace - dot - 1);
  for (size_t at = 0; (at = body.find(name, at)) != std::string::npos; at += name.size()) {
    const char before = body[at - 1], after = body[at + name.size()];
    if ((before == '"' || before == ' ') && (after == '"' || after == ' ')) return true;
  }
  return false;
}

// Contains only rules for classes in `body`, with literal colours, because most SVG viewers other than browsers lack
// variables. The rules are repeated for dark screens.
std::string figure_style(const std::string& body) {
  std::string light, dark;
  std::istringstream rules(picture_rules());
  for (std::string rule; std::getline(rules, rule);) {
    if (!uses(body, rule)) continue;
    light += coloured(rule, &Colour::light) + "\n";
    if (rule.find("var(") != std::string::npos) dark += coloured(rule, &Colour::dark) + "\n";
  }
  return page_file("svg", {{"dark", dark}, {"light", light}});
}

constexpr double kBar = 420, kMargin = 16, kHeading = 20, kBetween = 14;

std::string paragraph(std::string_view css, const std::string& text) {
  return text.empty() ? "" : fmt::format("<p class=\"{}\">{}</p>\n", css, escaped(text));
}
std::string paragraphs(std::string_view css, const std::vector<std::string>& all) {
  std::string out;
  for (const std::string& text : all) out += paragraph(css, text);
  return out;
}

std::string legend(const std::vector<LegendEntry>& entries) {
  std::string out;
  for (const LegendEntry& e : entries)
    out += fmt::format(
        R"(<span><svg class="key" viewBox="0 0 12 12"><rect class="{}" width="12" height="12"/></svg>{}</span> )",
        e.css, escaped(e.text));
  return entries.empty() ? "" : "<p class=\"legend\">" + out + "</p>\n";
}

// The first column has the same width in the heading as in the indented rows.
std::string table_text(const Table& t) {
  if (std::ranges::none_of(t.columns, &Column::width)) return "";
  std::string out = t.above;
  const auto add_line = [&](size_t indent, auto&& make_cell) {
    std::string cells;
    for (size_t c = 0; c < t.columns.size(); ++c) {
      if (t.columns[c].width == 0) continue;
      const size_t width = t.columns[c].width + (cells.empty() ? t.indent - indent : 0);
      cells += cells.empty() ? std::string(indent, ' ') : " ";
      cells += fmt::format(fmt::runtime(t.columns[c].number ? "{:>{}}" : "{:<{}}"), make_cell(c).text, width);
    }
    out += cells + "\n";
  };
  if (std::ranges::any_of(t.columns, [](const Column& c) { return c.width > 0 && !c.head.text.empty(); }))
    add_line(0, [&](size_t c) -> const Cell& { return t.columns[c].head; });
  for (const Row& r : t.rows) {
    out += r.above;
    if (r.css != Row::kHead) add_line(t.indent, [&](size_t c) -> const Cell& { return r.cells.at(c); });
  }
  return out + t.below;
}

std::string pictures_html(const Part& p) {
  std::string out;
  const bool pairs = !p.pictures.empty() && p.pictures[0].width < kWidth / 2;
  for (const Picture& picture : p.pictures) {
    const std::string& name = picture.title.empty() ? p.title : picture.title;
    const std::string svg =
        fmt::format("<svg viewBox=\"0 0 {:.0f} {:.0f}\" role=\"img\" aria-label=\"{}\">\n{}</svg>\n", picture.width,
                    picture.height, escaped(name), picture.body);
    if (pairs)
      out += fmt::format("<figure><figcaption>{}</figcaption>\n{}</figure>\n", escaped(picture.title), svg);
    else
      out += (picture.title.empty() ? "" : fmt::format("<h3>{}</h3>\n", escaped(picture.title))) + svg;
  }
  return pairs ? "<div class=\"pair\">\n" + out + "</div>\n" : out;
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

std::string percent(double fraction) { return fmt::format("{:.1f}%", 100 * fraction); }
std::string tick_of_ms(double time) { return fmt::format("{:.4g} ms", time); }

std::string render_svg(const Box& b) {
  const std::string tip = b.tip.empty() ? "" : fmt::format(" data-tip=\"{}\"", escaped(b.tip));
  std::string out = fmt::format(R"(<rect class="{}" x="{:.2f}" y="{:.2f}" width="{:.2f}" height="{:.2f}"{}{}/>)", b.css,
                                b.x, b.y, std::max(0.4, b.width), b.height, tip, b.attributes);
  const bool pale = b.css.find(" c") != std::string::npos;
  for (const std::string& label : b.labels) {
    const std::vector<std::string> lines = split(label, '\n');
    const double foot = b.y + b.height / 2 + 4 - kLetterLine / 2 * (static_cast<double>(lines.size()) - 1);
    if (label.empty() || b.height < kLetterLine * static_cast<double>(lines.size()) - 2 ||
        std::ranges::any_of(lines, [&](const std::string& line) { return b.width <= text_width(line) + 3; }))
      continue;
    for (size_t i = 0; i < lines.size(); ++i)
      out += fmt::format(R"(<text class="{}" x="{:.2f}" y="{:.2f}">{}</text>)", pale ? "over" : "on", b.x + b.width / 2,
                         foot + kLetterLine * static_cast<double>(i), escaped(lines[i]));
    break;
  }
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
    const double wide = kKey + 6 + text_width(e.text) + 14;
    if (x > left && x + wide > left + width) x = left, y += kLine;
    out += render_svg({x, y + 3, kKey, kKey, e.css}) + text_at(x + kKey + 6, y + 13, "key", e.text);
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

std::string Chart::axis(double foot, const NumberFormat& format, double count) const {
  std::string out;
  for (const double tick : ticks(0, last - first, count > 0 ? count : width > kFigureWidth ? 10 : 6)) {
    const double at = x(first + tick);
    if (at + text_width(format(tick)) / 2 > width - (count > 0 ? 0 : right)) break;
    if (count > 0) out += line("grid", at, top, at, foot - 10);
    out += text_at(at, foot, tick > 0 ? "mid" : "key", format(tick));
  }
  return out;
}

std::string Chart::grid(const NumberFormat& format) const {
  std::string out;
  for (const double tick : ticks(low, high, 5))
    out += line("grid", left, y(tick), width - right, y(tick)) + text_at(left - 6, y(tick) + 4, "end", format(tick));
  return out;
}

double left_edge(const std::vector<Lane>& lanes) {
  double left = 40;
  for (const Lane& lane : lanes) left = std::max(left, text_width(lane.name) + 14);
  return left;
}

void stack(Lane& lane, double value, const std::string& css, const std::string& tip, const std::string& label) {
  const double begin = lane.marks.empty() ? 0 : lane.marks.back().end;
  if (value > 0) lane.marks.push_back({begin, begin + value, css, tip, {label}});
}

Picture render_lanes(const Lanes& l) {
  const double top = l.axis && !l.limit_label.empty() ? kBelow : 0, tall = l.tall - l.gap, foot = tall / 2 + 4.5,
               end = top + static_cast<double>(l.lanes.size()) * l.tall;
  const Chart chart{.width = l.width, .height = end, .left = l.left, .right = l.right, .top = top, .last = l.max};
  Picture out{.title = l.title, .width = l.width, .height = end + (l.limit || l.axis ? kBelow : 0)};
  if (l.axis) out.body += chart.axis(end + 14, l.axis, l.ticks);
  for (size_t i = 0; i < l.lanes.size(); ++i) {
    const double y = top + static_cast<double>(i) * l.tall;
    const Lane& lane = l.lanes[i];
    for (const Mark& m : lane.marks)
      out.body += render_svg({chart.x(m.begin), m.thin ? y + tall - kThin : y, chart.x(m.end) - chart.x(m.begin),
                              m.thin ? kThin : tall, m.css, m.tip, l.tall > 12 ? m.labels : std::vector<std::string>(),
                              m.attributes});
    if (i % l.named > 0) continue;
    out.body += text_at(l.left - 8, y + foot, "end", lane.name);
    const double end_x = chart.x(lane.marks.empty() ? 0 : lane.marks.back().end) + 6;
    if (!lane.suffix.empty()) out.body += text_at(end_x, y + foot, lane.suffix_css, lane.suffix);
  }
  if (!l.limit) return out;
  const double at = chart.x(*l.limit);
  for (const char* css : {"halo", "limit"}) out.body += line(css, at, top, at, end);
  out.body += l.axis ? text_at(at, top - 8, "bad end", l.limit_label) : text_at(at, end + 14, "mid", l.limit_label);
  return out;
}

Cell count_cell(int64_t n) { return {grouped(n), fmt::format("{}", n)}; }
Cell ms_cell(double ms) { return {short_time(ms), fmt::format("{:.3f}", ms)}; }

Cell bar_cell(double fraction, const std::string& css, const std::string& tip) {
  Cell out("");
  out.html = fmt::format("<svg class=\"bar\" viewBox=\"0 0 {} 14\" aria-hidden=\"true\">{}</svg>", kBar,
                         fraction > 0 ? render_svg({0, 1, kBar * fraction, 12, css, tip}) : "");
  return out;
}

std::string as_html(const Table& t) {
  if (std::ranges::none_of(t.columns, &Column::on_page)) return "";
  std::string out = t.title.empty() ? "" : fmt::format("<h3>{}</h3>\n", escaped(t.title));
  out += fmt::format("<table id=\"{}\"><thead>", t.id);
  const auto row = [&](std::string_view tag, const std::string& row_css, auto&& make_cell) {
    out += row_css.empty() ? "<tr>" : fmt::format("<tr class=\"{}\">", row_css);
    for (size_t c = 0; c < t.columns.size(); ++c) {
      if (!t.columns[c].on_page) continue;
      const Cell& cell = make_cell(c);
      const std::string css = cell.css + (t.columns[c].number ? " n" : "");
      out += fmt::format("<{}{}>{}{}</{}>", tag,
                         css.empty() ? "" : fmt::format(" class=\"{}\"", css.substr(css[0] == ' ')), escaped(cell.page),
                         cell.html, tag.substr(0, 2));
    }
    out += "</tr>\n";
  };
  row("th scope=\"col\"", "", [&](size_t c) -> const Cell& { return t.columns[c].head; });
  out += "</thead><tbody>\n";
  for (const Row& r : t.rows) row("td", r.css, [&](size_t c) -> const Cell& { return r.cells.at(c); });
  return out + "</tbody></table>\n" + paragraph("note", t.note);
}

std::string fitted_text(const Table& t) {
  std::vector<size_t> widths(t.columns.size(), 0);
  std::vector<Row> lines = {{}};
  for (const Column& column : t.columns) lines[0].cells.push_back(column.head);
  lines.insert(lines.end(), t.rows.begin(), t.rows.end());
  for (const Row& row : lines)
    for (size_t c = 0; c < widths.size(); ++c) widths[c] = std::max(widths[c], row.cells[c].text.size());
  std::string out;
  for (const Row& row : lines) {
    std::string line = " ";
    for (size_t c = 0; c < widths.size(); ++c)
      line += fmt::format(fmt::runtime(t.columns[c].number ? " {:>{}}" : " {:<{}}"), row.cells[c].text, widths[c] + 1);
    out += line.substr(0, line.find_last_not_of(' ') + 1) + "\n";
  }
  return out;
}

std::string as_html(const std::vector<std::pair<std::string, std::string>>& facts) {
  std::string out;
  for (const auto& [name, value] : facts)
    out += fmt::format("<div><dt>{}</dt><dd>{}</dd></div>\n", escaped(name), escaped(value));
  return facts.empty() ? "" : "<dl>\n" + out + "</dl>\n";
}

std::string list_html(const std::vector<std::string>& lines) {
  std::string out = "<ul>\n";
  for (const std::string& line : lines) out += "<li>" + escaped(line) + "</li>\n";
  return out + "</ul>\n";
}

std::string as_html(const Part& p, int level) {
  std::string out = fmt::format("<section id=\"{0}\">\n<h{1}>{2}</h{1}>\n", p.id, level, escaped(p.title)) +
                    paragraphs("model", p.about) + paragraph("words", p.caption) + legend(p.legend) +
                    paragraphs("note", p.hints) + pictures_html(p) + paragraphs("note", p.notes) +
                    paragraph("warn", p.warning) + as_html(p.facts);
  for (const Table& t : p.tables) out += as_html(t);
  return out + p.more + "</section>\n";
}

std::string as_text(const std::vector<Part>& parts) {
  std::string out;
  for (const Part& p : parts) {
    out += p.text;
    for (const Table& t : p.tables) out += table_text(t);
  }
  for (char& c : out)  // names may contain control characters
    if (c != '\n' && static_cast<unsigned char>(c) < 0x20) c = ' ';
  return out;
}

std::string as_svg_file(const Part& f) {
  double y = kMargin;
  std::string body = text_at(kMargin, y + 15, "title", f.title);
  y += 28;
  body += legend_svg(f.legend, kMargin, kFigureWidth, y);
  double x = 0, lowest = y;
  for (const Picture& p : f.pictures) {
    if (x > 0 && x + p.width > kFigureWidth + 1) x = 0, y = lowest;
    const double heading = p.title.empty() ? 0 : kHeading;
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
             "id=\"d\">{3}</desc>\n<style>\n",
             width, height, escaped(f.title), escaped(f.caption)) +
         figure_style(frame + body) + "</style>\n" + frame + body + "</svg>\n";
}

std::string html_page(const std::string& title, const std::vector<Part>& parts, const std::string& values) {
  std::string main;
  for (const Part& p : parts) main += as_html(p, main.empty() ? 1 : 2);
  const std::string data =
      values.empty() ? "" : "<script type=\"application/json\" id=\"numbers\">" + values + "</script>\n";
  return page_file("page", {{"script", page_file("script")},
                            {"numbers", data},
                            {"main", main},
                            {"rules", page_file("style") + picture_rules()},
                            {"dark", variables(&Colour::dark)},
                            {"light", variables(&Colour::light)},
                            {"title", escaped(title)}});
}

}  // namespace tessera::report
