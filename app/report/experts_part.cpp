// How the routers shared out the tokens, over the whole run.
#include <fmt/format.h>

#include <algorithm>
#include <numeric>
#include <string>

#include "app/report/exposure.h"
#include "app/report/parts.h"
#include "app/report/svg.h"

namespace tessera::report {
namespace {

constexpr double kEven = 24, kMost = 3 * kEven;  // heights of an even share, and of the tallest box

// By how much the experts from `first` on, so many of them, are above their even share.
double times(const std::vector<int64_t>& layer, size_t first, size_t count) {
  const auto begin = layer.begin() + static_cast<std::ptrdiff_t>(first);
  const auto all = static_cast<double>(std::accumulate(layer.begin(), layer.end(), int64_t{0})),
             own = static_cast<double>(std::accumulate(begin, begin + static_cast<std::ptrdiff_t>(count), int64_t{0}));
  return all > 0 ? own / all * static_cast<double>(layer.size()) / static_cast<double>(count) : 0;
}

std::string dropped_words(const ExpertsOfRun& e) {
  int64_t all = e.load.dropped;
  for (const std::vector<int64_t>& layer : e.load.rows) all += std::accumulate(layer.begin(), layer.end(), int64_t{0});
  return fmt::format("{} of {} choices found no place", grouped(e.load.dropped), grouped(all));
}

// Of the step's time.
std::string travel_words(const Record& r, const StepSpan& step) {
  const Overlap travel = overlap_of(r, step, "ep", "all_to_all");
  if (travel.all == 0 || step.step == 0) return "";
  const std::string words = fmt::format("; a rank was in the all-to-alls for {} of step {}",
                                        percent(travel.all / (step.end - step.begin)), step.step);
  if (!r.waits_noted) return words;
  return words + fmt::format(", and computed meanwhile in {} of that time", percent(1 - travel.exposed / travel.all));
}

Picture layer_picture(const std::vector<int64_t>& layer, size_t here) {
  Picture out{.title = "", .height = kMost + 18};
  const double each = kWidth / static_cast<double>(layer.size());
  for (size_t e = 0; e < layer.size(); ++e) {
    const double share = times(layer, e, 1), height = std::min(kMost, share * kEven);
    const std::string tip = fmt::format("expert {} on rank {} of ep | {} choices, {:.2f} times an even share", e,
                                        e / here, grouped(layer[e]), share);
    out.body += box({static_cast<double>(e) * each, kMost - height, std::max(each - 2, 1.0), height}, "m0", tip,
                    {fmt::format("{:.2f}", share)});
  }
  return out;
}

}  // namespace

std::string experts_part(const Record& r, const StepSpan& step) {
  const ExpertsOfRun& e = r.experts;
  if (e.load.empty()) return "";
  std::string out = fmt::format(
      "<section id=\"experts\">\n<h2>Experts</h2>\n<p>Each box is an expert, and its height the choices of tokens that "
      "it took in the whole run; 1.00 is an even share. A tall box makes its rank wait for its tokens, and all others "
      "for it. {}{}.</p>\n",
      dropped_words(e), travel_words(r, step));
  for (size_t layer = 0; layer < e.load.rows.size(); ++layer)
    out += fmt::format("<h3>layer {}</h3>\n", layer) +
           inline_svg(layer_picture(e.load.rows[layer], e.load.rows[layer].size() / static_cast<size_t>(e.ranks)));
  return out + "</section>\n";
}

std::string experts_text(const Record& r, const StepSpan& step) {
  const ExpertsOfRun& e = r.experts;
  if (e.load.empty()) return "";
  std::string out = fmt::format("\nexperts: choices of tokens in the whole run, by an even share\n{}{}\n",
                                dropped_words(e), travel_words(r, step));
  const auto row = [&](const std::vector<int64_t>& layer, size_t together) {
    for (size_t first = 0; first < layer.size(); first += together) {
      if (first > 0 && first / together % 16 == 0) out += fmt::format("\n{:<10}", "");
      out += fmt::format(" {:>6.2f}", times(layer, first, together));
    }
  };
  for (size_t layer = 0; layer < e.load.rows.size(); ++layer) {
    const std::vector<int64_t>& rows = e.load.rows[layer];
    out += fmt::format("{:<10}", fmt::format("layer {}", layer));
    row(rows, 1);
    if (e.ranks > 1) {
      out += fmt::format("\n{:<10}", "  by rank");
      row(rows, rows.size() / static_cast<size_t>(e.ranks));
    }
    out += "\n";
  }
  return out;
}

}  // namespace tessera::report
