// Elementwise sums, shape ops and embeddings: forward passes and vjps.
#include "autograd/ops.h"

#include <algorithm>
#include <cstdint>
#include <functional>

#include "autograd/fusion.h"
#include "tensor/ops/embedding.h"
#include "tensor/ops/reduce.h"

namespace tessera {

Var add(const Var& a, Var b) {
  const Var b_edge = b.edge();
  const Shape sa = a.shape(), sb = b.shape();
  Tensor other = std::move(b).take(), out;
  if (broadcast(sa, sb, "add") == sb && other.dtype() == a.dtype() && other.unique() && other.is_contiguous()) {
    add_(other, a.value());  // b + a is bitwise identical to a + b
    out = std::move(other);
  } else {
    out = binary<Add>(a.value(), other);
  }
  return record_one("add", std::move(out), {a.edge(), b_edge}, [sa, sb](Grads& g) {
    if (g.needs(0)) g.set(0, sum_to(g.output(), sa));
    if (g.needs(1)) g.set(1, sum_to(g.output(), sb));
  });
}

Var scale(const Var& x, double factor) {
  return record_one("scale", scale(x.value(), factor), {x.edge()},
                    [factor](Grads& g) { g.set(0, scale(g.output(), factor)); });
}

Var reshape(const Var& x, const Shape& shape) {
  return record_one("reshape", x.value().contiguous().reshape(shape), {x.edge()},
                    [from = x.shape()](Grads& g) { g.set(0, g.output().contiguous().reshape(from)); });
}

Var transpose(const Var& x, int a, int b) {
  return record_one("transpose", x.value().transpose(a, b), {x.edge()},
                    [a, b](Grads& g) { g.set(0, g.output().transpose(a, b)); });
}

Var narrow(const Var& x, int dim, int64_t start, int64_t length) {
  return record_one("narrow", x.value().narrow(dim, start, length), {x.edge()},
                    [dim, start, length, shape = x.shape(), dtype = x.dtype()](Grads& g) {
                      Tensor dx = g.output().make(shape, dtype);
                      dx.fill(0);
                      dx.narrow(dim, start, length).copy_from(g.output());
                      g.set(0, std::move(dx));
                    });
}

Var sum(const Var& x) {
  return record_one("sum", sum(x.value()), {x.edge()},
                    [shape = x.shape()](Grads& g) { g.set(0, g.output().expand(shape).contiguous()); });
}

Var add_columns(Var y, int64_t first, const Var& t) {
  const Var y_edge = y.edge();
  Tensor out = std::move(y).take();
  if (!out.unique()) out = out.clone();
  const int64_t width = t.dim(-1);
  const auto slice = [=](const Tensor& full) { return full.narrow(full.ndim() - 1, first, width); };
  Tensor columns = slice(out);
  add_(columns, t.value());
  return record_one("add_columns", std::move(out), {y_edge, t.edge()}, [slice](Grads& g) {
    if (g.needs(1)) g.set(1, slice(g.output()).contiguous());
    if (g.needs(0)) g.set(0, g.take_output());
  });
}

Var embedding(const Tensor& ids_anywhere, const Var& table) {
  const Tensor ids = ids_on_device(table.value(), ids_anywhere);
  return record_one("embedding", embedding(ids, table.value()), {table}, [ids](Grads& g) {
    g.write_grad(0, [ids, dy = g.output()](Tensor& dtable) { embedding_backward(dtable, dy, ids); });
  });
}

Var on_backward(Var x, std::function<void()> f) {
  if (!f) throw Error("[on_backward] f: expected a callable, got an empty std::function");
  return fusion::pass_through("on_backward", std::move(x), [f = std::move(f)](const Grads&) { f(); });
}

}  // namespace tessera
