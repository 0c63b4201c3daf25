// Small pieces of HTML and SVG that the pictures are made of.
#pragma once
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace tessera::report {

inline constexpr double kWidth = 1180;  // of a picture, in pixels of a page of that width
inline constexpr double kGutter = 150;  // at its left, for names

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

struct Box {
  double x = 0, y = 0, width = 0, height = 0;
};
// About how wide a text is, in pixels.
double width_of(std::string_view text);
// A coloured box that says `tip` when it is pointed at; of `labels` the first for which there is room is written on it.
// `attributes`, if any, are added to it as they are.
std::string box(const Box& at, std::string_view css, std::string_view tip, const std::vector<std::string>& labels = {},
                std::string_view attributes = "");
std::string text_at(double x, double y, std::string_view css, std::string_view text);
// An axis of times below a picture that has `span` of them between `left` and `width`.
struct TimeAxis {
  double left = kGutter, width = kWidth, y = 0, span = 1;
  bool in_ms = true;
};
std::string time_axis(const TimeAxis& axis);

// Round numbers from `low` to `high`, about `count` of them.
std::vector<double> ticks(double low, double high, int count);

struct LegendEntry {
  std::string css, words;
};
std::string legend(const std::vector<LegendEntry>& entries);

// What is drawn, without a frame.
struct Picture {
  std::string title;
  double width = kWidth, height = 0;
  std::string body = {};  // elements of SVG
};
// In a page; it shrinks with it.
std::string inline_svg(const Picture& picture);

// Pictures that stand alone as a file, with `words` for those who cannot see them.
struct Figure {
  std::string title, words;
  std::vector<LegendEntry> legend = {};
  std::vector<Picture> pictures = {};  // beside each other as far as they fit into kFigureWidth, and then below
};
inline constexpr double kFigureWidth = 860;
std::string svg_file(const Figure& figure);

}  // namespace tessera::report
