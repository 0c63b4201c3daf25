// Softmax, activations and dropout: forward passes and vjps.
#include <cstdint>
#include <utility>
#include <vector>

#include "autograd/ops.h"
#include "base/error.h"
#include "tensor/ops/softmax.h"

namespace tessera {

Var softmax(const Var& x) {
  const Tensor y = softmax(x.value());
  return record_one("softmax", y, {x.edge()}, [y](Grads& g) { g.set(0, softmax_backward(g.output(), y)); });
}

Var log_softmax(const Var& x) {
  const Tensor y = log_softmax(x.value());
  return record_one("log_softmax", y, {x.edge()}, [y](Grads& g) { g.set(0, log_softmax_backward(g.output(), y)); });
}

static Var activate_gated(const Var& x, const ActivationOptions& options) {
  const Var y = record_one("swiglu", gated_activation(x.value(), options.kind), {x},
                           [x = x.saved(), kind = options.kind](Grads& g) {
                             g.set(0, gated_activation_backward(g.output(), x.get(), kind));
                           });
  return options.recompute
             ? y.with_recompute([x = x.saved(), kind = options.kind] { return gated_activation(x.get(), kind); })
             : y;
}

Var activate(Var x, const ActivationOptions& options, const Var& bias) {
  const Activation kind = options.kind;
  if (options.gated && bias.defined()) reject("activate", "no bias with a gate", "a bias");
  if (options.gated) return activate_gated(x, options);
  const Var x_edge = x.edge();
  Activated r = bias_activation(std::move(x).take(), value_or_none(bias), kind);
  Var y = record_one("bias_gelu", std::move(r.y), {x_edge, bias}, [h = r.h, kind](Grads& g) {
    Tensor dbias = g.needs(1) ? h.make({h.dim(-1)}, accum_dtype(h.dtype())) : Tensor();
    Tensor dh = bias_activation_backward(g.take_output(0), h, dbias.defined() ? &dbias : nullptr, kind);
    if (g.needs(1)) g.set(1, std::move(dbias));
    if (g.needs(0)) g.set(0, std::move(dh));
  });
  return options.recompute ? y.with_recompute([h = r.h, kind] { return activation(h, kind); }) : y;
}

Var dropout(Var x, double p, const DropoutTile& tile) {
  const Var x_edge = x.edge();
  Tensor y = dropout(std::move(x).take(), p, tile);
  const std::vector<int64_t> positions(tile.positions.begin(), tile.positions.end());
  return record_one("dropout", std::move(y), {x_edge}, [p, tile, positions](Grads& g) {
    DropoutTile saved_tile = tile;
    saved_tile.positions = positions;
    g.set(0, dropout(g.take_output(0), p, saved_tile));
  });
}

}  // namespace tessera
