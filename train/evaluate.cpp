// Validation.
#include "train/evaluate.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "autograd/var.h"
#include "data/loader.h"
#include "tensor/error.h"
#include "train/step_report.h"

namespace tessera {

// In the last round a group may have no windows, and computes what nobody looks at, since a forward pass may need every
// rank.
std::optional<double> mean_loss(const Evaluation& e, Communicator& world, const TokenFile& split) {
  const NoGrad no_grad;
  const Windows windows(split, e.context);
  double sum = 0;
  for (int64_t round = 0; round < windows.count(); round += e.at_once * e.turns) {
    if (e.stop && world.max(e.stop() ? 1 : 0) > 0) return std::nullopt;
    const int64_t first = std::min(round + e.at_once * e.turn, windows.count());
    const int64_t found = std::min(e.at_once, windows.count() - first);
    const Shape shape{std::max<int64_t>(found, 1), e.context};
    const ArenaPtr host = e.arena->host();
    Tensor ids = Tensor::zeros(shape, DType::int32, host), targets = Tensor::empty(shape, DType::int32, host);
    targets.fill(Windows::kIgnored);
    if (found > 0) windows.load(first, found, ids.data<int32_t>(), targets.data<int32_t>());
    sum += e.forward(ids.to(e.arena), targets.to(e.arena));
  }
  const double loss = world.sum(sum) / static_cast<double>(windows.targets());
  if (!std::isfinite(loss))
    throw Error(fmt::format("the validation loss is {}; expected a finite number", number_text(loss)),
                Status::not_finite);
  return loss;
}

}  // namespace tessera
