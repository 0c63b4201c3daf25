// Elementwise sums, shapes and products, forward beside vjp.
#include "autograd/ops.h"

#include "tensor/ops/reduce.h"

namespace tessera {

Var add(const Var& a, Var b) {
  const Var b_edge = b.edge();
  const Shape sa = a.shape(), sb = b.shape();
  Tensor other = std::move(b).take(), out;
  if (broadcast(sa, sb, "add") == sb && other.dtype() == a.dtype() && other.unique() && other.is_contiguous()) {
    add_(other, a.value());  // b + a has the bits of a + b
    out = std::move(other);
  } else {
    out = binary<Add>(a.value(), other);
  }
  return record_one("add", std::move(out), {a.edge(), b_edge}, [sa, sb](Grads& g) {
    if (g.needs(0)) g.give(0, sum_to(g.output(), sa));
    if (g.needs(1)) g.give(1, sum_to(g.output(), sb));
  });
}

Var scale(const Var& x, double factor) {
  return record_one("scale", scale(x.value(), factor), {x.edge()},
                    [factor](Grads& g) { g.give(0, scale(g.output(), factor)); });
}

Var reshape(const Var& x, const Shape& shape) {
  return record_one("reshape", x.value().contiguous().reshape(shape), {x.edge()},
                    [from = x.shape()](Grads& g) { g.give(0, g.output().contiguous().reshape(from)); });
}

Var transpose(const Var& x, int a, int b) {
  return record_one("transpose", x.value().transpose(a, b), {x.edge()},
                    [a, b](Grads& g) { g.give(0, g.output().transpose(a, b)); });
}

Var narrow(const Var& x, int dim, int64_t start, int64_t length) {
  return record_one("narrow", x.value().narrow(dim, start, length), {x.edge()},
                    [dim, start, length, shape = x.shape(), dtype = x.dtype()](Grads& g) {
                      Tensor dx = g.output().make(shape, dtype);
                      dx.fill(0);
                      dx.narrow(dim, start, length).copy_from(g.output());
                      g.give(0, std::move(dx));
                    });
}

Var sum(const Var& x) {
  return record_one("sum", sum(x.value()), {x.edge()},
                    [shape = x.shape()](Grads& g) { g.give(0, g.output().expand(shape).contiguous()); });
}

Var add_columns(Var y, int64_t first, const Var& t) {
  const Var y_edge = y.edge();
  Tensor out = std::move(y).take();
  if (!out.unique()) out = out.clone();
  const int64_t width = t.dim(-1);
  const auto part = [=](const Tensor& whole) { return whole.narrow(whole.rank() - 1, first, width); };
  Tensor columns = part(out);
  add_(columns, t.value());
  return record_one("add_columns", std::move(out), {y_edge, t.edge()}, [part](Grads& g) {
    if (g.needs(1)) g.give(1, part(g.output()).contiguous());
    if (g.needs(0)) g.give(0, g.take_output());
  });
}

Var on_backward(Var x, std::function<void()> f) {
  const Var x_edge = x.edge(), late = x.is_late() ? x : Var();
  Tensor value = late.defined() ? late.like() : std::move(x).take();
  const Var same = record_one("on_backward", std::move(value), {x_edge}, [f = std::move(f)](Grads& g) {
    f();
    const RowSums row_sums = g.row_sums();
    g.give(0, g.take_output(), row_sums);
  });
  if (late.defined()) same.share_value(late);
  if (x_edge.wants_row_sums()) same.want_row_sums();
  return same;
}

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

// Gives w (input `at`) and, with_bias, b (the next one) of x w^T + b their gradients; the one may bring the other
// along, or whoever made dy did (`row_sums`).
void give_linear(Grads& g, int at, const Tensor& dy, const Saved& x, const RowSums& row_sums, bool with_bias = true) {
  const auto sums = std::make_shared<Tensor>();
  const bool biased = with_bias && g.needs(at + 1), both = g.needs(at) && biased && !row_sums;
  if (g.needs(at))
    g.give_into(at, [dy, sums, both, in = x.until(g.defer())](Tensor& dw) {
      if (both)
        *sums = linear_weight_grad_and_sums(dw, dy, in.get());
      else
        linear_weight_grad(dw, dy, in.get());
    });
  if (biased)
    g.give_into(at + 1, [dy, sums, row_sums](Tensor& db) {
      if (row_sums)
        row_sums(db);
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

  void give(Grads& g, const Tensor& dy, const RowSums& row_sums, bool with_bias) const {
    SharedInput::Arriving input, gradient;
    if (shared && shared->gather_again && g.needs(1)) input = shared->gather_again(x.get());
    if (g.needs(0)) {
      Tensor dx = linear_input_grad(dy, w.get(), packs);
      if (shared)
        gradient = shared->reduce(std::move(dx));
      else
        g.give(0, std::move(dx));
    }
    give_linear(g, 1, dy, input ? Saved(input()) : x, row_sums, with_bias);
    if (gradient) g.give(0, gradient());
  }
};

Tensor whole_input(const Var& x, const std::shared_ptr<const SharedInput>& shared) {
  return shared ? shared->gather(x.value()) : x.value();
}

}  // namespace

Var linear(const Var& x, const Var& w, const Var& b, WeightPacks* packs, std::shared_ptr<const SharedInput> shared) {
  Tensor made = linear(whole_input(x, shared), w.value(), value_or_none(b), packs);
  const Var y = record_one("linear", std::move(made), {x, w, b},
                           [first = FirstLayer(x, {w, b, packs, std::move(shared)})](Grads& g) {
                             const Tensor dy = g.output();
                             first.give(g, dy, g.row_sums(), true);
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
  const Var y = record_one("gelu_mlp", std::move(made), {x, up.w, up.b, down.w, down.b},
                           [first = FirstLayer(x, up), w_down = down.w.saved(), down_packs = down.packs,
                            h = std::move(hidden.h), activated = std::move(activated)](Grads& g) mutable {
                             const RowSums row_sums = g.row_sums();
                             Tensor dy = g.take_output();
                             Tensor dbias = g.needs(2) ? h.make({h.dim(-1)}, wide_of(dy.dtype())) : Tensor();
                             const Tensor dh =
                                 linear_input_grad_gelu(dy, w_down.get(), h, g.needs(2) ? &dbias : nullptr, down_packs);
                             h = Tensor();
                             give_linear(g, 3, dy, activated, row_sums);
                             activated = Saved();
                             dy = Tensor();
                             const bool given = dbias.defined();  // else the gradient of the weight brings it along
                             if (given) g.give(2, std::move(dbias));
                             first.give(g, dh, {}, !given);
                           });
  if (down.b.requires_grad()) y.want_row_sums();
  return y;
}

}  // namespace tessera
