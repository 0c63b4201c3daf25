// Checks of every page of HTML, and of `tessera report --format text` against report.json and trace.json.
#pragma once
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

namespace tessera::test {

// Tags open and close in order, quotes are even within each, and text has none of their characters; what stands in
// styles and scripts is no text.
inline void expect_balanced(const std::string& html) {
  std::vector<std::string> open;
  for (size_t at = html.find('<'); at != std::string::npos; at = html.find('<', at + 1)) {
    const size_t end = html.find('>', at);
    ASSERT_NE(end, std::string::npos);
    const std::string tag = html.substr(at + 1, end - at - 1), name = tag.substr(0, tag.find_first_of(" /", 1));
    EXPECT_EQ(tag.find('<'), std::string::npos) << tag;
    EXPECT_EQ(std::count(tag.begin(), tag.end(), '"') % 2, 0) << tag;
    if (tag.starts_with("!") || tag.ends_with("/")) continue;
    if (tag.starts_with("/")) {
      ASSERT_FALSE(open.empty()) << tag;
      ASSERT_EQ("/" + open.back(), tag);
      open.pop_back();
    } else {
      open.push_back(name);
      if (name == "style" || name == "script") at = html.find("</", end) - 1;
    }
  }
  EXPECT_TRUE(open.empty());
}

inline void expect_page(const std::string& html) {
  expect_balanced(html);
  for (const char* none : {"http", "url(", "@import", " src=", "\"nan", ",nan", ">nan", " nan", "inf "})
    EXPECT_EQ(html.find(none), std::string::npos) << none;
}

// The run may have threads of ranks on cores of their own, or not.
inline void expect_text(const std::string& text, const nlohmann::json& report, const nlohmann::json& trace) {
  const auto has = [&](const std::string& part) { return text.find(part) != std::string::npos; };
  const bool shared = report["processors"]["shared"], pipeline = report["plan"]["axes"]["pp"] > 1;
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) {
    EXPECT_LE(line.size(), 120U) << line;
    EXPECT_EQ(line.find(" nan"), std::string::npos) << line;
  }
  EXPECT_EQ(has("\nplanned: "), pipeline);
  EXPECT_EQ(has("\nreplayed: "), pipeline);
  EXPECT_EQ(has("as it happened"), pipeline && !shared);
  EXPECT_EQ(has("measured: not drawn"), pipeline && shared);
  EXPECT_EQ(has("measured     null"), pipeline && shared);
  EXPECT_EQ(has("Each rank in this step"), report["ranks"].size() > report["plan"]["axes"]["pp"].get<size_t>());
  const auto step = std::stoll(text.substr(text.find("\nstep ") + 6));  // that is shown
  std::map<std::pair<std::string, std::string>, std::pair<int64_t, int64_t>> sent;
  for (const nlohmann::json& e : trace["traceEvents"]) {
    if (e["ph"] != "X" || !e["args"].contains("operation") || e["args"]["step"] != step) continue;
    auto& [calls, bytes] = sent[{e["args"]["axis"], e["args"]["operation"]}];
    ++calls;
    bytes += e["args"]["sent"].get<int64_t>();
  }
  for (const auto& [name, counted] : sent)
    EXPECT_TRUE(
        has(fmt::format("\n{:<6} {:<15} {:>8} {:>15} ", name.first, name.second, counted.first, counted.second)))
        << name.first << " " << name.second;
  for (size_t r = 0; r < report["ranks"].size(); ++r) {
    std::string row = fmt::format("\n{:<6}", r);
    for (const char* category : {"parameters", "gradients", "optimizer", "activations", "workspace", "communication"})
      row += fmt::format(" {:>13}", report["ranks"][r]["peaks"][category].get<int64_t>());
    const auto peak = report["ranks"][r]["peak_bytes"].get<int64_t>();
    EXPECT_TRUE(has(row + fmt::format(" {:>13} {:>9.2f}\n", peak, static_cast<double>(peak) / 1e6))) << row;
  }
}

}  // namespace tessera::test
