// Softmax, SwiGLU and dropout: forward passes and vjps.
#include <cstdint>
#include <utility>
#include <vector>

#include "autograd/ops.h"
#include "tensor/ops/softmax.h"

namespace tessera {

Var softmax(const Var& x) {
  const Tensor y = softmax(x.value());
  return record_one("softmax", y, {x.edge()}, [y](Grads& g) { g.give(0, softmax_backward(g.output(), y)); });
}

Var log_softmax(const Var& x) {
  const Tensor y = log_softmax(x.value());
  return record_one("log_softmax", y, {x.edge()}, [y](Grads& g) { g.give(0, log_softmax_backward(g.output(), y)); });
}

Var swiglu(const Var& x, bool recompute) {
  const Var y = record_one("swiglu", swiglu(x.value()), {x},
                           [x = x.saved()](Grads& g) { g.give(0, swiglu_backward(g.output(), x.get())); });
  return recompute ? y.with_recompute([x = x.saved()] { return swiglu(x.get()); }) : y;
}

Var dropout(Var x, double p, const DropoutTile& tile) {
  const Var x_edge = x.edge();
  Tensor y = dropout(std::move(x).take(), p, tile);
  const std::vector<int64_t> positions(tile.positions.begin(), tile.positions.end());
  return record_one("dropout", std::move(y), {x_edge}, [p, tile, positions](Grads& g) {
    DropoutTile saved_tile = tile;
    saved_tile.positions = positions;
    g.give(0, dropout(g.take_output(0), p, saved_tile));
  });
}

}  // namespace tessera
