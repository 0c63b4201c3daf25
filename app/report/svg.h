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
// A coloured box that says `tip` when it is pointed at; `label` is written on it where there is room.
// `attributes`, if any, are added to it as they are.
std::string box(const Box& at, std::string_view css, std::string_view tip, std::string_view label = "",
                std::string_view attributes = "");
std::string text_at(double x, double y, std::string_view css, std::string_view text);
// Opens a picture of kWidth unless told; it shrinks with the page.
std::string open_svg(double height, std::string_view name, double width = kWidth);

// Round numbers from `low` to `high`, about `count` of them.
std::vector<double> ticks(double low, double high, int count);

struct LegendEntry {
  std::string css, words;
};
std::string legend(const std::vector<LegendEntry>& entries);

}  // namespace tessera::report
