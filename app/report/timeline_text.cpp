// Every rank in one step, as two lines of text: what it computes, and what it communicates meanwhile.
#include <fmt/format.h>

#include <algorithm>
#include <cctype>
#include <cstddef>
#include <iterator>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "app/report/parts.h"

namespace tessera::report {
namespace {

constexpr size_t kColumns = 80, kMostRanks = 16;
constexpr double kSeen = 0.1;  // of a column's time: what takes less is not shown

// A picture of characters, each of which stands for a part of a span of time.
class Line {
 public:
  Line(double begin, double end) : begin_(begin), column_((end - begin) / kColumns), taken_(kColumns) {}

  void add(char letter, double begin, double end) {
    if (!(column_ > 0)) return;
    const double from = std::clamp((begin - begin_) / column_, 0.0, static_cast<double>(kColumns)),
                 to = std::clamp((end - begin_) / column_, 0.0, static_cast<double>(kColumns));
    for (auto c = static_cast<size_t>(from); c < kColumns && static_cast<double>(c) < to; ++c)
      taken_[c][letter] += std::min(to, static_cast<double>(c + 1)) - std::max(from, static_cast<double>(c));
  }
  // What takes most of a column: a capital where that is more than half of it.
  std::string str() const {
    std::string out(kColumns, '.');
    for (size_t c = 0; c < kColumns; ++c) {
      double most = kSeen;
      for (const auto& [letter, share] : taken_[c]) {
        if (share < most) continue;
        most = share;
        out[c] = share > 0.5 ? letter : static_cast<char>(std::tolower(static_cast<unsigned char>(letter)));
      }
    }
    return out;
  }

 private:
  double begin_, column_;
  std::vector<std::map<char, double>> taken_;
};

struct Kind {
  char letter;
  const char* words;
};
constexpr Kind kComputing[] = {{'F', "forward"},
                               {'B', "backward"},
                               {'I', "gradient of the input"},
                               {'W', "of the weights"},
                               {'G', "finishing gradients"},
                               {'U', "update"}};
constexpr Kind kAxes[] = {{'P', "pp"}, {'D', "dp"},  {'C', "cp"},   {'T', "tp"},
                          {'X', "ep"}, {'Y', "edp"}, {'E', "tied"}, {'O', "world"}};

char letter_of(const Event& e) {
  if (e.track == "update") return e.name == "optimizer" ? 'U' : 'G';
  for (const auto& [letter, words] : kAxes)
    if (!e.operation.empty() && e.axis.starts_with(words)) return letter;
  for (const auto& [track, letter] : {std::pair("forward", 'F'), std::pair("backward", 'B'),
                                      std::pair("input gradient", 'I'), std::pair("weight gradient", 'W')})
    if (e.track == track) return letter;
  return '?';
}

}  // namespace

std::string timeline_text(const Record& r, const StepSpan& step) {
  std::string out = "\nEach rank in this step, to scale: what it computes, and below it what it communicates.\n";
  std::set<char> seen;
  for (size_t i = 0; i < std::min(kMostRanks, r.ranks.size()); ++i) {
    Line computes(step.begin, step.end), communicates(step.begin, step.end);
    for (const Event& e : r.ranks[i].events) {
      if (e.step != step.step || e.track == "step" || e.track == "waiting") continue;
      const char letter = letter_of(e);
      seen.insert(letter);
      (e.operation.empty() ? computes : communicates).add(letter, e.begin, e.end);
    }
    out += fmt::format("{:<34} |{}|\n{:<34} |{}|\n", r.ranks[i].name, computes.str(), "", communicates.str());
  }
  std::string key;
  for (const auto& kinds : {std::vector<Kind>(std::begin(kComputing), std::end(kComputing)),
                            std::vector<Kind>(std::begin(kAxes), std::end(kAxes))})
    for (const auto& [letter, words] : kinds)
      if (seen.contains(letter)) key += fmt::format("{}{} {}", key.empty() ? "" : ", ", letter, words);
  out += key + ".\nSmall letters: less than half of a character's time.\n";
  if (r.ranks.size() > kMostRanks)
    out += fmt::format("The first {} of {} ranks are drawn.\n", kMostRanks, r.ranks.size());
  return out;
}

}  // namespace tessera::report
