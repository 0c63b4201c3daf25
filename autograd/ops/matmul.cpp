// Matmuls, and activations fused with them: forward passes and vjps.
#include <cstdint>
#include <memory>
#include <utility>

#include "autograd/fusion.h"
#include "autograd/ops.h"
#include "base/error.h"
#include "tensor/ops/reduce.h"

namespace tessera {

Var matmul(const Var& a, const Var& b) {
  return record_one("matmul", matmul(a.value(), b.value()), {a, b}, [a = a.saved(), b = b.saved()](Grads& g) {
    const Tensor dy = g.output(), x = a.get(), w = b.get();
    const bool one = w.ndim() == 2;
    if (g.needs(0)) g.set(0, one ? linear(dy, w, Tensor()) : matmul(dy, w.transpose(-2, -1)));
    if (!g.needs(1)) return;
    Tensor dw = one ? w.make(w.shape()) : matmul(x.transpose(-2, -1), dy);
    if (one) linear_weight_grad(dw, x, dy);
    g.set(1, std::move(dw));
  });
}

namespace {

// Row sums of a gradient dy: the gradient of a bias added to the value.
struct BiasSums {
  bool wanted = true;
  fusion::RowSums end = {};   // computed by the op that produced dy, or empty
  bool in_our_order = false;  // summed in Tessera's order, not a GEMM library's
};
BiasSums sums_of_output(const Grads& g) {
  return {.end = fusion::row_sums(g), .in_our_order = fusion::row_sums_required(g)};
}

// Writes the gradients of w (input `at`) and b (the next one) of x w^T + b, possibly fused.
void set_linear_grads(Grads& g, int at, const Tensor& dy, const Saved& x, const BiasSums& bias) {
  const auto sums = std::make_shared<Tensor>();
  const bool biased = bias.wanted && g.needs(at + 1), both = g.needs(at) && biased && !bias.end && !bias.in_our_order;
  if (g.needs(at))
    g.write_grad(at, [dy, sums, both, in = x.until(g.defer())](Tensor& dw) {
      if (both)
        *sums = linear_weight_grad_and_sums(dw, dy, in.get());
      else
        linear_weight_grad(dw, dy, in.get());
    });
  if (biased)
    g.write_grad(at + 1, [dy, sums, end = bias.end](Tensor& db) {
      if (end)
        end(db);
      else if (sums->defined())
        db.copy_from(*sums);
      else
        sum_rows(db, dy);
    });
}

// x, w and b are inputs 0, 1 and 2 of the op.
struct FirstLayer {
  FirstLayer(const Var& input, const LinearWeights& l)
      : x(l.w.requires_grad() ? input.saved() : Saved()), w(l.w.saved()), packs(l.packs), shared(l.shared) {}
  Saved x, w;
  PackedWeights* packs;
  std::shared_ptr<const SharedInput> shared;

  void set_grads(Grads& g, const Tensor& dy, const BiasSums& bias) const {
    SharedInput::Arriving input, gradient;
    if (shared && shared->regather && g.needs(1)) input = shared->regather(x.get());
    if (g.needs(0)) {
      Tensor dx = linear_input_grad(dy, w.get(), packs);
      if (shared)
        gradient = shared->reduce(std::move(dx));
      else
        g.set(0, std::move(dx));
    }
    set_linear_grads(g, 1, dy, input ? Saved(input()) : x, bias);
    if (gradient) g.set(0, gradient().to(dy.dtype()));  // partial sums may have the accumulation dtype
  }
};

Tensor full_input(const Var& x, const std::shared_ptr<const SharedInput>& shared) {
  return shared ? shared->gather(x.value()) : x.value();
}

}  // namespace

Var linear(const Var& x, const Var& w, const Var& b, PackedWeights* packs, std::shared_ptr<const SharedInput> shared) {
  Tensor made = linear(full_input(x, shared), w.value(), value_or_none(b), packs);
  Var y = record_one("linear", std::move(made), {x, w, b},
                     [first = FirstLayer(x, {w, b, packs, std::move(shared)})](Grads& g) {
                       const Tensor dy = g.output();
                       first.set_grads(g, dy, sums_of_output(g));
                     });
  if (b.requires_grad()) fusion::request_row_sums(y);
  return y;
}

// The backward pass frees each value after its last use: the hidden values are the largest of a block.
Var mlp(const Var& x, const LinearWeights& up, const LinearWeights& down, const ActivationOptions& options) {
  const Activation kind = options.kind;
  if (options.gated) reject("mlp", "an activation without a gate", "a gated one");
  const auto activate = [&](const Tensor& in) {
    const Tensor bias = value_or_none(up.b);
    if (kind == Activation::gelu)
      return linear_gelu(in, up.w.value(), bias, up.packs);  // cuBLASLt has epilogues for it
    return bias_activation(linear(in, up.w.value(), Tensor(), up.packs), bias, kind);
  };
  Activated hidden = activate(full_input(x, up.shared));
  Tensor made = linear(hidden.y, down.w.value(), value_or_none(down.b), down.packs);
  Saved activated = options.recompute ? Saved([h = hidden.h, kind] { return activation(h, kind); }) : Saved(hidden.y);
  if (!down.w.requires_grad()) activated = Saved();
  Var y = record_one("gelu_mlp", std::move(made), {x, up.w, up.b, down.w, down.b},
                     [first = FirstLayer(x, up), w_down = down.w.saved(), down_packs = down.packs,
                      h = std::move(hidden.h), activated = std::move(activated), kind](Grads& g) mutable {
                       const BiasSums sums = sums_of_output(g);
                       Tensor dy = g.take_output();
                       Tensor dbias = g.needs(2) ? h.make({h.dim(-1)}, accum_dtype(dy.dtype())) : Tensor();
                       Tensor* const sums_of_dh = g.needs(2) ? &dbias : nullptr;
                       const auto through = [&](const Tensor& w) {
                         if (kind == Activation::gelu) return linear_input_grad_gelu(dy, w, h, sums_of_dh, down_packs);
                         return bias_activation_backward(linear_input_grad(dy, w, down_packs), h, sums_of_dh, kind);
                       };
                       const Tensor dh = through(w_down.get());
                       h = Tensor();
                       set_linear_grads(g, 3, dy, activated, sums);
                       activated = Saved();
                       dy = Tensor();
                       const bool given = dbias.defined();  // otherwise computed with the weight gradient
                       if (given) g.set(2, std::move(dbias));
                       first.set_grads(g, dh, {.wanted = !given});
                     });
  if (down.b.requires_grad()) fusion::request_row_sums(y);
  return y;
}

}  // namespace tessera
