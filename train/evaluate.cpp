// Validation.
#include "train/evaluate.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "autograd/var.h"
#include "tensor/error.h"
#include "train/step_report.h"

namespace tessera {

// In the last round a group may have no windows, and computes what nobody looks at, since a forward pass may need every
// rank.
std::optional<double> mean_loss(const Evaluation& e, Communicator& world, const Rows& split) {
  const NoGrad no_grad;
  double sum = 0;
  for (int64_t round = 0; round < split.count(); round += e.at_once * e.turns) {
    if (e.stop && world.max(e.stop() ? 1 : 0) > 0) return std::nullopt;
    const int64_t first = std::min(round + e.at_once * e.turn, split.count());
    const int64_t found = std::min(e.at_once, split.count() - first);
    const Shape shape{std::max<int64_t>(found, 1), split.context()};
    const ArenaPtr host = e.arena->host();
    Tensor ids = Tensor::zeros(shape, DType::int32, host), targets = Tensor::empty(shape, DType::int32, host);
    targets.fill(Rows::kIgnored);
    if (found > 0) split.load(first, found, ids.data<int32_t>(), targets.data<int32_t>());
    Tensor starts;
    if (split.has_starts()) {
      starts = Tensor::zeros(shape, DType::int32, host);
      if (found > 0) split.starts(first, found, starts.data<int32_t>());
    }
    sum += e.forward(ids, targets, starts);
  }
  const double loss = world.sum(sum) / static_cast<double>(split.targets());
  if (!std::isfinite(loss))
    throw Error(fmt::format("the validation loss is {}; expected a finite number", number_text(loss)),
                Status::not_finite);
  return loss;
}

}  // namespace tessera
