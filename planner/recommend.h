// Which plan, and why: what its time and its memory are made of, what each other choice would cost, and which
// assumption of the model would have to be wrong for another plan to win.
#pragma once
#include <optional>
#include <string>
#include <vector>

#include "planner/search.h"

namespace tessera::planner {

// Ratios of two plans of one model on one machine are that right: closer ones are too close to call.
inline constexpr double kCloseCall = 0.04;

struct WhyNot {
  Layout layout = {};
  std::string because = {};
};

struct Recommendation {
  Candidate plan = {};
  std::vector<std::string> why = {};
  // The runner-up first, which divides the ranks in another way; then the same plan with one other choice each.
  std::vector<WhyNot> why_not = {};
  std::string weakest_assumption = {};
};

// Recommends from an answer with a plan that fits.
Recommendation recommend(const SearchRequest& question, const SearchResult& answer);

// "does not fit: 3.2 GB too much, most of it activations", "4.1% slower: 0.31 s more for tp".
std::string compared(const Candidate& other, const Candidate& best);

// The assumption that changes the winner among the plans of an answer when it is wrong by the smallest factor.
struct TippingPoint {
  std::string what;
  double factor = 1;
  bool larger = false;     // than it is assumed
  Hardware hardware = {};  // as it would be then
  size_t winner = 0;       // then, of the answer's best
};
// Each is varied alone, up to four times larger and smaller; nothing where none of these changes the winner.
std::optional<TippingPoint> nearest_turn(const SearchRequest& question, const SearchResult& answer);
// The nearest turn in words.
std::string weakest_assumption(const SearchRequest& question, const SearchResult& answer);

}  // namespace tessera::planner
