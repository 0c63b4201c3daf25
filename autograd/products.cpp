// Matrix products, forward beside vjp.
#include <memory>
#include <utility>

#include "autograd/ops.h"
#include "tensor/ops/reduce.h"

namespace tessera {

Var matmul(const Var& a, const Var& b) {
  return record_one("matmul", matmul(a.value(), b.value()), {a, b}, [a = a.saved(), b = b.saved()](Grads& g) {
    const Tensor dy = g.output(), x = a.get(), w = b.get();
    const bool one = w.rank() == 2;  // b (K, N) for all leading dims
    if (g.needs(0)) g.give(0, one ? linear(dy, w, Tensor()) : matmul(dy, w.transpose(-2, -1)));
    if (!g.needs(1)) return;
    Tensor dw = one ? w.make(w.shape()) : matmul(x.transpose(-2, -1), dy);
    if (one) linear_weight_grad(dw, x, dy);
    g.give(1, std::move(dw));
  });
}

namespace {

// The sums over the rows of a gradient dy, the gradient of the bias that was added where dy arrives.
struct BiasSums {
  bool wanted = true;
  RowSums end = {};           // of whoever made dy, or none
  bool in_our_order = false;  // then not of a product, which adds in an order of its own
};
BiasSums sums_of_output(const Grads& g) { return {.end = g.row_sums(), .in_our_order = g.expects_row_sums()}; }

// Gives w (input `at`) and b (the next one) of x w^T + b their gradients; the one may bring the other along.
void give_linear(Grads& g, int at, const Tensor& dy, const Saved& x, const BiasSums& bias) {
  const auto sums = std::make_shared<Tensor>();
  const bool biased = bias.wanted && g.needs(at + 1), both = g.needs(at) && biased && !bias.end && !bias.in_our_order;
  if (g.needs(at))
    g.give_into(at, [dy, sums, both, in = x.until(g.defer())](Tensor& dw) {
      if (both)
        *sums = linear_weight_grad_and_sums(dw, dy, in.get());
      else
        linear_weight_grad(dw, dy, in.get());
    });
  if (biased)
    g.give_into(at + 1, [dy, sums, end = bias.end](Tensor& db) {
      if (end)
        end(db);
      else if (sums->defined())
        db.copy_from(*sums);
      else
        sum_rows(db, dy);
    });
}

// The first layer of an op: its x, w and b are the inputs 0, 1 and 2.
struct FirstLayer {
  FirstLayer(const Var& input, const LinearWeights& l)
      : x(saved_for(l.w, input)), w(l.w.saved()), packs(l.packs), shared(l.shared) {}
  Saved x, w;
  WeightPacks* packs;
  std::shared_ptr<const SharedInput> shared;

  void give(Grads& g, const Tensor& dy, const BiasSums& bias) const {
    SharedInput::Arriving input, gradient;
    if (shared && shared->gather_again && g.needs(1)) input = shared->gather_again(x.get());
    if (g.needs(0)) {
      Tensor dx = linear_input_grad(dy, w.get(), packs);
      if (shared)
        gradient = shared->reduce(std::move(dx));
      else
        g.give(0, std::move(dx));
    }
    give_linear(g, 1, dy, input ? Saved(input()) : x, bias);
    if (gradient) g.give(0, gradient());
  }
};

Tensor whole_input(const Var& x, const std::shared_ptr<const SharedInput>& shared) {
  return shared ? shared->gather(x.value()) : x.value();
}

}  // namespace

Var linear(const Var& x, const Var& w, const Var& b, WeightPacks* packs, std::shared_ptr<const SharedInput> shared) {
  Tensor made = linear(whole_input(x, shared), w.value(), value_or_none(b), packs);
  Var y = record_one("linear", std::move(made), {x, w, b},
                     [first = FirstLayer(x, {w, b, packs, std::move(shared)})](Grads& g) {
                       const Tensor dy = g.output();
                       first.give(g, dy, sums_of_output(g));
                     });
  if (b.requires_grad()) y.want_row_sums();
  return y;
}

// The backward pass frees each value when it is done with it: the hidden values are the largest of a block.
Var gelu_mlp(const Var& x, const LinearWeights& up, const LinearWeights& down, bool recompute) {
  BiasGelu hidden = linear_gelu(whole_input(x, up.shared), up.w.value(), value_or_none(up.b), up.packs);
  Tensor made = linear(hidden.y, down.w.value(), value_or_none(down.b), down.packs);
  Saved activated = recompute ? Saved([h = hidden.h] { return unary<Gelu>(h); }) : Saved(hidden.y);
  if (!down.w.requires_grad()) activated = Saved();
  Var y = record_one("gelu_mlp", std::move(made), {x, up.w, up.b, down.w, down.b},
                     [first = FirstLayer(x, up), w_down = down.w.saved(), down_packs = down.packs,
                      h = std::move(hidden.h), activated = std::move(activated)](Grads& g) mutable {
                       const BiasSums sums = sums_of_output(g);
                       Tensor dy = g.take_output();
                       Tensor dbias = g.needs(2) ? h.make({h.dim(-1)}, wide_of(dy.dtype())) : Tensor();
                       const Tensor dh =
                           linear_input_grad_gelu(dy, w_down.get(), h, g.needs(2) ? &dbias : nullptr, down_packs);
                       h = Tensor();
                       give_linear(g, 3, dy, activated, sums);
                       activated = Saved();
                       dy = Tensor();
                       const bool given = dbias.defined();  // else the gradient of the weight brings it along
                       if (given) g.give(2, std::move(dbias));
                       first.give(g, dh, {.wanted = !given});
                     });
  if (down.b.requires_grad()) y.want_row_sums();
  return y;
}

}  // namespace tessera
