// Questions to the observations that the rules of a diagnosis ask.
#pragma once
#include <functional>
#include <string>
#include <vector>

#include "verify/observations.h"

namespace tessera {

class Symptoms {
 public:
  explicit Symptoms(const Observations& seen);
  const Observations& seen() const { return seen_; }

  // Of the first step in which anything differs: after it both sides differ anyway. 0: none does.
  int64_t step() const { return step_; }
  bool wrong_loss() const { return wrong("loss"); }
  bool wrong_norm() const { return wrong("gradient norm"); }
  const std::vector<const TensorDifference*>& gradients() const { return gradients_; }
  const std::vector<const TensorDifference*>& parameters() const { return parameters_; }
  const std::vector<const TensorDifference*>& state() const { return state_; }
  bool right_gradients() const { return !wrong_loss() && gradients_.empty(); }
  bool right_numbers() const { return step_ == 0 && seen_.copies.empty() && seen_.stopped.empty(); }
  // No gradient or loss differs by more than another rounding does.
  bool only_rounding() const;
  // The factor by which all wrong gradients are wrong, where there is one and all are; 0: there is none.
  double common_factor() const;
  // The factor of most of the wrong moments of the optimizer.
  double moment_factor() const;

  // Fewer or more bytes than the formula on an axis ("data": dp, and cp with it), in operations that `is` picks.
  using Which = std::function<bool(const SentDifference&)>;
  const SentDifference* fewer(const std::string& axis, const Which& is = {}) const;
  const SentDifference* more(const std::string& axis, const Which& is = {}) const;
  const Probe* passing() const;  // the first change of the run that makes it right

  // For people.
  std::string bytes_text(const SentDifference& sent) const;
  std::string gradients_text() const;  // "2 of 28 gradients are wrong (blocks.0.norm1.weight, ...)"
  std::string blocks_text() const;     // " of blocks 0 to 1"
  std::string numbers_text() const;    // the loss and the norm of that step
  std::string ranks_text() const;      // those that wrong parameters and state were taken from

 private:
  bool wrong(const std::string& what) const;
  const SentDifference* sent(const std::string& axis, const Which& is, bool fewer) const;
  const Observations& seen_;
  int64_t step_ = 0;
  std::vector<const TensorDifference*> gradients_, parameters_, state_;
};

bool is_sum(const SentDifference& sent);     // of values over ranks
bool is_gather(const SentDifference& sent);  // of parts to all ranks

}  // namespace tessera
