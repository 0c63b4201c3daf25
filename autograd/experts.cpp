// Forward beside vjp.
#include "autograd/experts.h"

#include <utility>

#include "tensor/ops/experts/rows.h"

namespace tessera {

RoutedVar route(const Var& logits, const RouteOptions& options, const std::function<void(Tensor&)>& count) {
  Routed routed = route(logits.value(), options);
  if (count) count(routed.of_sequences);
  Var weights = record_one("route", routed.weights, {logits}, [logits = logits.saved(), routed, options](Grads& g) {
    g.give(0, route_backward(g.output(), logits.get(), routed, options));
  });
  return {std::move(routed), std::move(weights)};
}

Var dispatch_rows(const Var& x, const Routed& routed) {
  return record_one("dispatch_rows", dispatch_rows(x.value(), routed), {x.edge()},
                    [routed](Grads& g) { g.give(0, dispatch_rows_backward(g.output(), routed)); });
}

Var combine_rows(const Var& rows, const Var& weights, const Routed& routed) {
  return record_one("combine_rows", combine_rows(rows.value(), weights.value(), routed), {rows, weights},
                    [rows = rows.saved(), weights = weights.saved(), routed](Grads& g) {
                      CombineGrads d = combine_rows_backward(g.output(), rows.get(), weights.get(), routed);
                      if (g.needs(0)) g.give(0, std::move(d.rows));
                      if (g.needs(1)) g.give(1, std::move(d.weights));
                    });
}

std::vector<Var> split_rows(const Var& x, const std::vector<int64_t>& sizes) {
  std::vector<Tensor> parts;
  int64_t at = 0;
  for (const int64_t size : sizes) {
    parts.push_back(x.value().narrow(0, at, size));
    at += size;
  }
  x.value().check_size(at * x.dim(1));
  return record("split_rows", std::move(parts), {x.edge()},
                [like = Tensor::meta(x.shape(), x.dtype()), sizes](Grads& g) {
                  Tensor dx;
                  int64_t first = 0;
                  for (size_t i = 0; i < sizes.size(); ++i) {
                    const Tensor& part = g.output(static_cast<int>(i));
                    if (!dx.defined() && part.defined()) {
                      dx = part.make(like.shape(), like.dtype());
                      if (first > 0) dx.narrow(0, 0, first).fill(0);
                    }
                    if (dx.defined()) {
                      Tensor to = dx.narrow(0, first, sizes[i]);
                      if (part.defined())
                        to.copy_from(part);
                      else
                        to.fill(0);
                    }
                    first += sizes[i];
                  }
                  g.give(0, std::move(dx));
                });
}

Var join_rows(const std::vector<Var>& parts) {
  std::vector<int64_t> sizes;
  std::vector<Var> edges;
  int64_t rows = 0;
  for (const Var& part : parts) {
    sizes.push_back(part.dim(0));
    edges.push_back(part.edge());
    rows += sizes.back();
  }
  const Tensor& like = parts.at(0).value();
  const Tensor out = like.make({rows, like.dim(1)});
  int64_t at = 0;
  for (const Var& part : parts) {
    out.narrow(0, at, part.dim(0)).copy_from(part.value());
    at += part.dim(0);
  }
  return record_one("join_rows", out, edges, [sizes](Grads& g) {
    const Tensor dy = g.take_output(0).contiguous();
    int64_t first = 0;
    for (size_t i = 0; i < sizes.size(); ++i) {
      if (g.needs(static_cast<int>(i))) g.give(static_cast<int>(i), dy.narrow(0, first, sizes[i]));
      first += sizes[i];
    }
  });
}

Var linear_rows(const Var& x, const Var& w) {
  return record_one(
      "linear_rows", linear_rows(x.value(), w.value()), {x, w}, [x = saved_for(w, x), w = w.saved()](Grads& g) {
        const Tensor dy = g.output();
        if (g.needs(0)) g.give(0, linear_rows_input_grad(dy, w.get()));
        if (g.needs(1))
          g.give_into(1, [dy, in = x.until(g.defer())](Tensor& dw) { linear_rows_weight_grad(dw, dy, in.get()); });
      });
}

}  // namespace tessera
