// Building blocks of reports, plan pages and `explore`: numbers, SVG figures, and parts rendered as HTML, text or an
// SVG file.
#pragma once
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/embedded_file.h"

namespace tessera::report {

inline constexpr double kWidth = 1180;       // figure on a page, in pixels
inline constexpr double kFigureWidth = 860;  // SVG file
inline constexpr double kGutter = 150;       // for names
inline constexpr double kValueMargin = 96;   // for text after a bar

inline constexpr double kMaxBarRatio = 1000;  // longest to shortest visible bar

using NumberFormat = std::function<std::string(double)>;

// For HTML content and attributes.
std::string escaped(std::string_view text);
// 1,234,567
std::string grouped(int64_t n);
// "12.3 KB", "1.20 MB"
std::string short_bytes(double bytes);
// "431 µs", "1.23 ms", "2.10 s"
std::string short_time(double milliseconds);
// "37.5%"
std::string percent(double fraction);
// "12.5 ms", for axis labels.
std::string tick_of_ms(double time);

struct LegendEntry {
  std::string css, text;
};
// A figure without a frame; if untitled, labelled by the surrounding page.
struct Picture {
  std::string title;
  double width = kWidth, height = 0;
  std::string body = {};
};
// Renders a legend inside a figure, wrapped at `width`, and moves y below it.
std::string legend_svg(const std::vector<LegendEntry>& entries, double left, double width, double& y);
std::string text_at(double x, double y, std::string_view css, std::string_view text);
// Converts tooltips to <title> elements, which browsers show without a script.
std::string with_titles(const std::string& body);

// Shows the first of `labels` that fits, and a tooltip.
struct Box {
  double x = 0, y = 0, width = 0, height = 0;
  std::string css, tip = {};
  std::vector<std::string> labels = {};
  std::string attributes = {};
};
std::string render_svg(const Box& box);

// Lanes of boxes on a common scale: bars of bytes, or ranks over time.
struct Mark {
  double begin = 0, end = 0;
  std::string css, tip = {};
  std::vector<std::string> labels = {};
  std::string attributes = {};
  bool thin = false;  // at the bottom of the lane
};
struct Lane {
  std::string name;
  std::vector<Mark> marks = {};
  std::string suffix = {};  // after the last mark
  std::string suffix_css = "start";
};
// Appends a mark at the end of the previous one; skips zero values.
void stack(Lane& lane, double value, const std::string& css, const std::string& tip, const std::string& label = "");
struct Lanes {
  std::string title;
  std::vector<Lane> lanes = {};
  double max = 1;
  double width = kWidth, left = kGutter, right = 0, tall = 24, gap = 5;
  size_t named = 1;  // label every n-th lane
  NumberFormat axis = {};
  double ticks = 0;                  // approximate number of axis labels with grid lines
  std::optional<double> limit = {};  // a vertical line with a label below, or above if there is an axis
  std::string limit_label = {};
};
Picture render_lanes(const Lanes& lanes);
double left_edge(const std::vector<Lane>& lanes);

struct Chart {
  double width = 1, height = 1, left = 0, right = 0, top = 0, bottom = 0;
  double first = 0, last = 1, low = 0, high = 1;
  double x(double at) const { return left + (width - left - right) * (at - first) / (last - first); }
  double y(double value) const { return top + (height - top - bottom) * (high - value) / (high - low); }
  std::string grid(const NumberFormat& format) const;
  // Labels at height `foot`, as distances from `first`; with `count`, about that many labels, with vertical grid lines.
  std::string axis(double foot, const NumberFormat& format, double count = 0) const;
};
// About `count` round numbers.
std::vector<double> ticks(double low, double high, double count);
// Has separate texts for page and text output.
struct Cell {
  Cell(const char* both) : page(both), text(both) {}
  Cell(const std::string& both) : page(both), text(both) {}
  Cell(const std::string& on_page, const std::string& in_text, const std::string& style = "")
      : page(on_page), text(in_text), css(style) {}
  std::string page, text, css = {};
  std::string html = {};  // after the text
};
Cell count_cell(int64_t n);
Cell ms_cell(double ms);
Cell bar_cell(double fraction, const std::string& css, const std::string& tip);  // fraction of the column width
struct Column {
  Cell head;
  bool number = false;
  size_t width = 0;  // in text output; 0: only on a page
  bool on_page = true;
};
struct Row {
  static constexpr const char* kHead = "head";
  std::vector<Cell> cells;
  std::string css = {};
  std::string above = {};  // text output: above the row, or in place of the cells of a kHead row
};
struct Table {
  std::string id;
  std::vector<Column> columns;
  std::vector<Row> rows = {};
  std::string above = {};  // text output: lines above and below
  std::string below = {};
  size_t indent = 0;  // in text output
  std::string title = {};
  std::string note = {};
};

// Text output consists of `text` and tables; a page contains everything else, in this order.
struct Part {
  std::string id, title = {};
  std::vector<std::string> about = {};  // below the page heading
  std::string caption = {};
  std::vector<LegendEntry> legend = {};
  std::vector<std::string> hints = {};
  std::vector<Picture> pictures = {};  // narrow figures are placed side by side
  std::vector<std::string> notes = {};
  std::string warning = {};
  std::vector<std::pair<std::string, std::string>> facts = {};
  std::vector<Table> tables = {};
  std::string more = {};
  std::string text = {};
};
std::string as_html(const Table& table);
std::string fitted_text(const Table& table);  // fits columns to contents, ignoring Column::width
std::string as_html(const std::vector<std::pair<std::string, std::string>>& facts);
std::string list_html(const std::vector<std::string>& lines);
std::string as_html(const Part& part, int level = 2);
std::string as_text(const std::vector<Part>& parts);
// Only figures, with `caption` as alternative text.
std::string as_svg_file(const Part& part);
const std::vector<EmbeddedFile>& page_files();  // app/report/page/
// Self-contained; `values` is embedded as JSON for programs.
std::string html_page(const std::string& title, const std::vector<Part>& parts, const std::string& values = "");

}  // namespace tessera::report
