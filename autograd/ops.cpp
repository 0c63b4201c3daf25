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

Var on_backward(Var x, std::function<void()> f) {
  const Var x_edge = x.edge();
  return record_one("on_backward", std::move(x).take(), {x_edge}, [f = std::move(f)](Grads& g) {
    f();
    g.give(0, g.take_output());
  });
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

Var linear(const Var& x, const Var& w, const Var& b, WeightPacks* packs) {
  return record_one("linear", linear(x.value(), w.value(), b.defined() ? b.value() : Tensor(), packs), {x, w, b},
                    [x = x.saved(), w = w.saved(), packs](Grads& g) {
                      const Tensor dy = g.output();
                      if (g.needs(0)) g.give(0, linear_input_grad(dy, w.get(), packs));
                      if (g.needs(1))
                        g.give_into(
                            1, [dy, in = x.until(g.defer())](Tensor& dw) { linear_weight_grad(dw, dy, in.get()); });
                      if (g.needs(2)) g.give_into(2, [dy](Tensor& db) { sum_rows(db, dy); });
                    });
}

}  // namespace tessera
