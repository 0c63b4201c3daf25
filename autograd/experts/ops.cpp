// Forward passes and vjps of expert ops.
#include "autograd/experts/ops.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <functional>
#include <numeric>
#include <span>
#include <string>
#include <vector>

#include "autograd/fusion.h"

namespace tessera {

RoutedVar route(const Var& logits, const RouteOptions& options, const std::function<void(Tensor&)>& count) {
  Routed routed = route(logits.value(), options);
  if (count) count(routed.of_sequences);
  Var weights = record_one("route", routed.weights, {logits}, [logits = logits.saved(), routed, options](Grads& g) {
    g.set(0, route_backward(g.output(), logits.get(), routed, options));
  });
  return {std::move(routed), std::move(weights)};
}

Var dispatch_rows(const Var& x, const Routed& routed) {
  return record_one("dispatch_rows", dispatch_rows(x.value(), routed), {x.edge()},
                    [routed](Grads& g) { g.set(0, dispatch_rows_backward(g.output(), routed)); });
}

Var combine_rows(const Var& rows, const Var& weights, const Routed& routed) {
  return record_one("combine_rows", combine_rows(rows.value(), weights.value(), routed), {rows, weights},
                    [rows = rows.saved(), weights = weights.saved(), routed](Grads& g) {
                      CombineGrads d = combine_rows_backward(g.output(), rows.get(), weights.get(), routed);
                      if (g.needs(0)) g.set(0, std::move(d.rows));
                      if (g.needs(1)) g.set(1, std::move(d.weights));
                    });
}

std::vector<Var> split_rows(const Var& x, const std::vector<int64_t>& sizes) {
  if (sizes.size() == 1 && sizes[0] == x.dim(0)) return {x};
  std::vector<Tensor> slices;
  int64_t at = 0;
  for (const int64_t size : sizes) {
    slices.push_back(x.value().narrow(0, at, size));
    at += size;
  }
  x.value().check_size(at * x.dim(1));
  return record("split_rows", std::move(slices), {x.edge()},
                [like = Tensor::meta(x.shape(), x.dtype()), sizes](Grads& g) {
                  Tensor dx;
                  int64_t first = 0;
                  for (size_t i = 0; i < sizes.size(); ++i) {
                    const Tensor& slice = g.output(static_cast<int>(i));
                    if (!dx.defined() && slice.defined()) {
                      dx = slice.make(like.shape(), like.dtype());
                      if (first > 0) dx.narrow(0, 0, first).fill(0);
                    }
                    if (dx.defined()) {
                      Tensor to = dx.narrow(0, first, sizes[i]);
                      if (slice.defined())
                        to.copy_from(slice);
                      else
                        to.fill(0);
                    }
                    first += sizes[i];
                  }
                  g.set(0, std::move(dx));
                });
}

Var join_rows(const std::vector<Var>& slices) {
  std::vector<int64_t> sizes;
  if (slices.size() == 1) return slices[0];
  std::vector<Var> edges;
  int64_t rows = 0;
  for (const Var& slice : slices) {
    sizes.push_back(slice.dim(0));
    edges.push_back(slice.edge());
    rows += sizes.back();
  }
  const Tensor& like = slices.at(0).value();
  const Tensor out = like.make({rows, like.dim(1)});
  int64_t at = 0;
  for (const Var& slice : slices) {
    out.narrow(0, at, slice.dim(0)).copy_from(slice.value());
    at += slice.dim(0);
  }
  return record_one("join_rows", out, edges, [sizes](Grads& g) {
    const Tensor dy = g.take_output(0).contiguous();
    int64_t first = 0;
    for (size_t i = 0; i < sizes.size(); ++i) {
      if (g.needs(static_cast<int>(i))) g.set(static_cast<int>(i), dy.narrow(0, first, sizes[i]));
      first += sizes[i];
    }
  });
}

namespace {

// Writes the weight gradients of one round; its first weight is input `first`.
void set_weight_grads(Grads& g, int first, const std::vector<int64_t>& counts, const Tensor& dy, const Tensor& x) {
  fusion::write_grads(g, first, static_cast<int>(counts.size()),
                      [counts, dy, x](std::span<const fusion::GradTarget> targets) {
                        std::vector<GemmGroup> groups;
                        for (size_t i = 0; i < counts.size(); ++i)
                          groups.push_back({targets[i].to, counts[i], targets[i].adds});
                        grouped_linear_weight_grads(groups, dy, x);
                      });
}

}  // namespace

Var grouped_linear(const Var& x, const std::vector<Var>& w, const std::vector<int64_t>& counts) {
  if (w.empty() || counts.empty() || counts.size() % w.size() != 0)
    throw Error("[grouped_linear] got " + std::to_string(counts.size()) + " row counts for " +
                std::to_string(w.size()) + " weights; expected a multiple of the number of weights");
  std::vector<Var> inputs{x};
  std::vector<Saved> saved;
  std::vector<GemmGroup> groups;
  bool trains = false;
  for (size_t i = 0; i < counts.size(); ++i) {
    const Var& weight = w[i % w.size()];
    inputs.push_back(weight);
    saved.push_back(weight.saved());
    groups.push_back({weight.value(), counts[i]});
    trains = trains || weight.requires_grad();
  }
  return record_one("grouped_linear", grouped_linear(x.value(), groups), inputs,
                    [in = trains ? x.saved() : Saved(), saved, counts, weights = std::ssize(w), trains](Grads& g) {
                      const Tensor dy = g.output();
                      if (g.needs(0)) {
                        std::vector<GemmGroup> grouped;
                        for (size_t i = 0; i < counts.size(); ++i) grouped.push_back({saved[i].get(), counts[i]});
                        g.set(0, grouped_linear_input_grad(dy, grouped));
                      }
                      if (!trains) return;
                      const Tensor rows_in = in.get();
                      int64_t at = 0;
                      for (auto i = counts.begin(); i != counts.end(); i += weights) {
                        const std::vector<int64_t> round(i, i + weights);
                        const int64_t rows = std::accumulate(round.begin(), round.end(), int64_t{0});
                        set_weight_grads(g, 1 + static_cast<int>(i - counts.begin()), round, dy.narrow(0, at, rows),
                                         rows_in.narrow(0, at, rows));
                        at += rows;
                      }
                    });
}

}  // namespace tessera
