// Validation.
#include "app/evaluate.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "autograd/var.h"
#include "data/loader.h"
#include "tensor/error.h"

namespace tessera {

// Ranks take turns. In the last round one may have no windows, and computes what nobody looks at, since a forward pass
// may need every rank.
double mean_loss(Gpt& model, Communicator& axis, const TokenFile& split, int64_t at_once, const ArenaPtr& arena) {
  const NoGrad no_grad;
  model.set_step({});
  const int64_t context = model.config.context;
  const Windows windows(split, context);
  double sum = 0;
  for (int64_t round = 0; round < windows.count(); round += at_once * axis.size()) {
    const int64_t first = std::min(round + at_once * axis.rank(), windows.count());
    const int64_t found = std::min(at_once, windows.count() - first);
    const Shape shape{std::max<int64_t>(found, 1), context};
    Tensor ids = Tensor::zeros(shape, DType::int32, arena), targets = Tensor::empty(shape, DType::int32, arena);
    targets.fill(Windows::kIgnored);
    if (found > 0) windows.load(first, found, ids.data<int32_t>(), targets.data<int32_t>());
    sum += model.loss(ids, targets, 1).loss_sum;
  }
  const double loss = axis.sum(sum) / static_cast<double>(windows.targets());
  if (!std::isfinite(loss))
    throw Error(fmt::format("the validation loss is {}; expected a finite number", loss), Status::not_finite);
  return loss;
}

}  // namespace tessera
