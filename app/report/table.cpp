// Writers of tables.
#include "app/report/table.h"

#include <fmt/format.h>

#include <algorithm>
#include <string>
#include <string_view>
#include <vector>

#include "app/report/drawing.h"

namespace tessera::report {
namespace {

// 0: not in text output.
std::vector<size_t> text_widths(const Table& t) {
  std::vector<size_t> out;
  for (size_t c = 0; c < t.columns.size(); ++c) {
    size_t& width = out.emplace_back(t.fitted ? t.columns[c].head.text.size() + 1 : t.columns[c].width);
    if (t.fitted)
      for (const Row& row : t.rows) width = std::max(width, row.cells[c].text.size() + 1);
  }
  return out;
}

}  // namespace

// The first column has the same width in the heading as in the indented rows.
std::string as_text(const Table& t) {
  const std::vector<size_t> widths = text_widths(t);
  if (std::ranges::count(widths, 0U) == std::ssize(widths)) return "";
  std::string out = t.above;
  const auto add_line = [&](size_t indent, bool trimmed, auto&& make_cell) {
    std::string line;
    for (size_t c = 0; c < widths.size(); ++c) {
      if (widths[c] == 0) continue;
      const size_t width = widths[c] + (line.empty() ? t.indent - indent : 0);
      line += line.empty() ? std::string(indent, ' ') : " ";
      line += fmt::format(fmt::runtime(t.columns[c].number ? "{:>{}}" : "{:<{}}"), make_cell(c).text, width);
    }
    out += (trimmed ? line.substr(0, line.find_last_not_of(' ') + 1) : line) + "\n";
  };
  const auto head = [&](size_t c) -> const Cell& { return t.columns[c].head; };
  const auto is_named = [&](const Column& column) { return column.width > 0 && !column.head.text.empty(); };
  if (t.fitted || std::ranges::any_of(t.columns, is_named)) add_line(t.fitted ? t.indent : 0, true, head);
  for (const Row& r : t.rows) {
    out += r.above;
    if (r.css != Row::kHead) add_line(t.indent, t.fitted, [&](size_t c) -> const Cell& { return r.cells.at(c); });
  }
  return out + t.below;
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

nlohmann::ordered_json to_json(const Table& t) {
  auto out = nlohmann::ordered_json::array();
  for (const Row& row : t.rows) {
    nlohmann::ordered_json& object = out.emplace_back();
    for (size_t c = 0; c < t.columns.size(); ++c)
      if (const Cell& cell = row.cells.at(c); !t.columns[c].key.empty())
        object[t.columns[c].key] = cell.in_json.is_null() ? nlohmann::ordered_json(cell.text) : cell.in_json;
  }
  return out;
}

}  // namespace tessera::report
