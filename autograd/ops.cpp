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
    const Tensor& dy = g.output();
    if (g.needs(0)) g.give(0, matmul(dy, b.get().transpose(-2, -1)));
    if (!g.needs(1)) return;
    const Tensor x = a.get();
    if (b.get().rank() == x.rank()) {
      g.give(1, matmul(x.transpose(-2, -1), dy));
    } else {  // b (K, N) was shared by all leading dims
      g.give(1, matmul(x.contiguous().flat_rows().transpose(0, 1), dy.contiguous().flat_rows()));
    }
  });
}

namespace {

// Gives w (input `at`) and b (the next one) of x w^T + b their gradients; the one may bring the other along, or whoever
// made dy did (`row_sums`).
void give_linear(Grads& g, int at, const Tensor& dy, const Saved& x, const RowSums& row_sums) {
  const auto sums = std::make_shared<Tensor>();
  const bool both = g.needs(at) && g.needs(at + 1) && !row_sums;
  if (g.needs(at))
    g.give_into(at, [dy, sums, both, in = x.until(g.defer())](Tensor& dw) {
      if (both)
        *sums = linear_weight_grad_and_sums(dw, dy, in.get());
      else
        linear_weight_grad(dw, dy, in.get());
    });
  if (g.needs(at + 1))
    g.give_into(at + 1, [dy, sums, row_sums](Tensor& db) {
      if (row_sums)
        row_sums(db);
      else if (sums->defined())
        db.copy_from(*sums);
      else
        sum_rows(db, dy);
    });
}

}  // namespace

Var linear(const Var& x, const Var& w, const Var& b, WeightPacks* packs) {
  const Var y = record_one("linear", linear(x.value(), w.value(), value_or_none(b), packs), {x, w, b},
                           [x = saved_for(w, x), w = w.saved(), packs](Grads& g) {
                             const Tensor dy = g.output();
                             if (g.needs(0)) g.give(0, linear_input_grad(dy, w.get(), packs));
                             give_linear(g, 1, dy, x, g.row_sums());
                           });
  if (b.requires_grad()) y.want_row_sums();
  return y;
}

// The backward pass frees each value when it is done with it: the hidden values are the largest of a block.
Var gelu_mlp(const Var& x, const LinearWeights& up, const LinearWeights& down, bool recompute) {
  BiasGelu hidden = linear_gelu(x.value(), up.w.value(), value_or_none(up.b), up.packs);
  Tensor y = linear(hidden.y, down.w.value(), value_or_none(down.b), down.packs);
  Saved activated = recompute ? Saved([h = hidden.h] { return unary<Gelu>(h); }) : Saved(hidden.y);
  if (!down.w.requires_grad()) activated = Saved();
  return record_one(
      "gelu_mlp", std::move(y), {x, up.w, up.b, down.w, down.b},
      [in = saved_for(up.w, x), w_up = up.w.saved(), w_down = down.w.saved(), up_packs = up.packs,
       down_packs = down.packs, h = std::move(hidden.h), activated = std::move(activated)](Grads& g) mutable {
        const RowSums row_sums = g.row_sums();
        Tensor dy = g.take_output();
        Tensor dbias = g.needs(2) ? h.make({h.dim(-1)}, wide_of(dy.dtype())) : Tensor();
        const Tensor dh = linear_input_grad_gelu(dy, w_down.get(), h, dbias.defined() ? &dbias : nullptr, down_packs);
        h = Tensor();
        give_linear(g, 3, dy, activated, row_sums);
        activated = Saved();
        dy = Tensor();
        if (g.needs(2)) g.give(2, std::move(dbias));
        if (g.needs(0)) g.give(0, linear_input_grad(dh, w_up.get(), up_packs));
        if (g.needs(1))
          g.give_into(1, [dh, x = in.until(g.defer())](Tensor& dw) { linear_weight_grad(dw, dh, x.get()); });
      });
}

}  // namespace tessera
