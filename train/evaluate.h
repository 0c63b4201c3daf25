// The loss over a whole split.
#pragma once
#include <functional>
#include <optional>

#include "data/rows.h"
#include "parallel/comm/communicator.h"

namespace tessera {

struct Evaluation {
  // The sum of losses of int32 (B, T) tokens that this rank is to add: 0 where another rank adds it. `starts`: of their
  // documents, where the rows know them.
  std::function<double(const Tensor& ids, const Tensor& targets, const Tensor& starts)> forward;
  int64_t at_once = 1;      // sequences of one forward pass
  int turn = 0, turns = 1;  // groups of ranks take turns
  ArenaPtr arena = {};
  std::function<bool()> stop = {};  // asked before each round; what one rank says all do
};

// The mean loss over the targets of `split`; the same on every rank of `world`, each of
// which calls it; nothing where it was stopped. Throws Error (not_finite) when it is not a number.
std::optional<double> mean_loss(const Evaluation& evaluation, Communicator& world, const Rows& split);

}  // namespace tessera
