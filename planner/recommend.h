// Explains a search result: time and memory of the best plan, cost of alternative choices, and sensitivity of the
// ranking to the cost model's assumptions.
#pragma once
#include <optional>
#include <string>
#include <vector>

#include "planner/search.h"

namespace tessera::planner {

// Relative error of the predicted time ratio of two plans of one model on one machine.
inline constexpr double kCloseCall = 0.04;

struct WhyNot {
  Layout layout = {};
  std::string because = {};
};

struct Recommendation {
  Candidate plan = {};
  std::vector<std::string> why = {};
  // The best plan with another mesh (runner-up), then variants of the recommended plan with one choice changed.
  std::vector<WhyNot> why_not = {};
  std::string weakest_assumption = {};
};

// Requires a non-empty answer.best.
Recommendation recommend(const SearchRequest& question, const SearchResult& answer);

// "does not fit: 3.2 GB over capacity, mostly activations", "4.1% slower: +0.31 s tp".
std::string compared(const Candidate& other, const Candidate& best);

// The assumption whose smallest change makes another plan the fastest.
struct TippingPoint {
  std::string what;
  double factor = 1;
  bool larger = false;
  Hardware hardware = {};  // with the change
  size_t winner = 0;       // index of SearchResult::best
};
// Varies one assumption at a time by up to a factor of 4; nullopt if the fastest plan never changes.
std::optional<TippingPoint> nearest_tipping_point(const SearchRequest& question, const SearchResult& answer);
std::string weakest_assumption(const SearchRequest& question, const SearchResult& answer);

}  // namespace tessera::planner
