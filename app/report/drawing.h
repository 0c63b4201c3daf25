// Reports, the page of a plan and `explore` are made of these: words for numbers, a few kinds of pictures in SVG, and
// parts, each of which is written as HTML, as text or as one SVG file.
#pragma once
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace tessera::report {

inline constexpr double kWidth = 1180;       // pixels of a picture, in a page of that width
inline constexpr double kFigureWidth = 860;  // the same in a file
inline constexpr double kGutter = 150;       // at the left of a picture, for names
inline constexpr double kRoomForBytes = 96;  // at its right, for words behind a bar

inline constexpr double kSeenBytes = 1000;  // the longest bar of a picture by the shortest that is drawn

using Wording = std::function<std::string(double)>;  // for a number

// Text that may stand between tags and in attributes.
std::string escaped(std::string_view text);
// 1,234,567
std::string grouped(int64_t n);
// "12.3 KB", "1.20 MB"
std::string short_bytes(double bytes);
// "431 µs", "1.23 ms", "2.10 s"
std::string short_time(double milliseconds);
// "37.5%"
std::string percent(double share);
// "12.5 ms", for the numbers below a picture
std::string tick_of_ms(double time);

struct LegendEntry {
  std::string css, words;
};
// A picture is drawn without a frame. One without a title is named by what stands around it.
struct Picture {
  std::string title;
  double width = kWidth, height = 0;
  std::string body = {};  // elements of SVG
};
// The legend within a picture: it flows from `left` and breaks where a line is full; moves y to below itself.
std::string legend_svg(const std::vector<LegendEntry>& entries, double left, double width, double& y);
std::string text_at(double x, double y, std::string_view css, std::string_view text);
// Makes a <title> of what a box says when it is pointed at: browsers show it without a script.
std::string with_titles(const std::string& body);

// A coloured box that says `tip` when it is pointed at; of `labels` the first for which there is room is written on it,
// in lines.
struct Box {
  double x = 0, y = 0, width = 0, height = 0;
  std::string css, tip = {};
  std::vector<std::string> labels = {};
  std::string attributes = {};  // added as they are
};
std::string render_svg(const Box& box);

// Lanes below each other on one scale, with boxes in them: bars of bytes, ranks in time.
struct Mark {
  double begin = 0, end = 0;
  std::string css, tip = {};
  std::vector<std::string> labels = {};
  std::string attributes = {};
  bool thin = false;  // a line at the foot of the lane
};
struct Lane {
  std::string name;
  std::vector<Mark> marks = {};
  std::string behind = {};  // words behind the last mark
  std::string behind_css = "start";
};
// Adds a mark that begins where the last one ends; nothing is not shown.
void stack(Lane& lane, double value, const std::string& css, const std::string& tip, const std::string& label = "");
struct Lanes {
  std::string title;
  std::vector<Lane> lanes = {};
  double most = 1;  // that the whole width shows
  double width = kWidth, left = kGutter, right = 0, tall = 24, gap = 5;
  size_t named = 1;                  // each how manieth lane has its words
  Wording axis = {};                 // the words of a number below the lanes
  double ticks = 0;                  // about so many numbers, with lines up from them
  std::optional<double> limit = {};  // a line across, with its words: below, or above where the axis is below
  std::string limit_words = {};
};
Picture drawn(const Lanes& lanes);
// The room that names of lanes need.
double left_edge(const std::vector<Lane>& lanes);

// Curves over an axis of steps or times.
struct Chart {
  double width = 1, height = 1, left = 0, right = 0, top = 0, bottom = 0;  // the picture, and margins in it
  double first = 0, last = 1, low = 0, high = 1;                           // values that it shows
  double x(double at) const { return left + (width - left - right) * (at - first) / (last - first); }
  double y(double value) const { return top + (height - top - bottom) * (high - value) / (high - low); }
  // Lines across with the words of their values.
  std::string grid(const Wording& words) const;
  // Words along `foot` for the distance from `first`; where about `count` are asked for, lines go up from them.
  std::string axis(double foot, const Wording& words, double count = 0) const;
};
// Round numbers from `low` to `high`, about `count` of them.
std::vector<double> ticks(double low, double high, double count);
// A cell of a table: what a page shows and what a text says, which often are the same words.
struct Cell {
  Cell(const char* both) : page(both), text(both) {}
  Cell(const std::string& both) : page(both), text(both) {}
  Cell(const std::string& on_page, const std::string& in_text, const std::string& style = "")
      : page(on_page), text(in_text), css(style) {}
  std::string page, text, css = {};
  std::string html = {};  // behind the words, on a page
};
Cell count_cell(int64_t n);                                                   // 1,234 and 1234
Cell ms_cell(double ms);                                                      // "1.23 ms" and 1.234
Cell bar_cell(double share, const std::string& css, const std::string& tip);  // a share of its column
struct Column {
  Cell head;
  bool number = false;  // at the right
  size_t width = 0;     // in a text; 0: it is on a page only
  bool on_page = true;
};
struct Row {
  static constexpr const char* kHead = "head";  // css of a row above others
  std::vector<Cell> cells;
  std::string css = {};
  std::string above = {};  // a line of a text; of a row of css kHead instead of its cells
};
struct Table {
  std::string id;
  std::vector<Column> columns;
  std::vector<Row> rows = {};
  std::string above = {};  // lines of a text
  std::string below = {};
  size_t indent = 0;       // before rows in a text
  std::string title = {};  // above it, on a page
  std::string note = {};   // below it, on a page
};

// A part of a report. In a text it is its `text` and its tables; on a page it is everything else, in this order.
struct Part {
  std::string id, title = {};
  std::vector<std::string> about = {};  // lines below the heading of the whole page
  std::string words = {};               // how to read it
  std::vector<LegendEntry> legend = {};
  std::vector<std::string> hints = {};
  std::vector<Picture> pictures = {};  // narrow ones stand beside each other
  std::vector<std::string> notes = {};
  std::string warning = {};
  std::vector<std::pair<std::string, std::string>> facts = {};
  std::vector<Table> tables = {};
  std::string more = {};  // HTML
  std::string text = {};
};
std::string as_html(const Table& table);
std::string fitted(const Table& table);  // its columns as wide as what stands in them, whatever widths it has
std::string as_html(const std::vector<std::pair<std::string, std::string>>& facts);
std::string list_html(const std::vector<std::string>& lines);
std::string as_html(const Part& part, int level = 2);
std::string as_text(const std::vector<Part>& parts);
// The pictures alone, with `words` for those who cannot see them.
std::string as_svg_file(const Part& part);
// The file of these parts. It loads nothing: style and script stand in it, and behind it `numbers`, JSON for programs.
std::string whole_page(const std::string& title, const std::vector<Part>& parts, const std::string& numbers = "");

}  // namespace tessera::report
