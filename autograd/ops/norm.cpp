// Norms and residual sums: forward passes and vjps.
#include <functional>
#include <span>
#include <utility>

#include "autograd/fusion.h"
#include "autograd/ops.h"
#include "tensor/ops/reduce.h"

namespace tessera {

namespace {

// Gradient of a norm's input x, added to `residual`. The same pass writes the gradients of gamma (input `at`) and beta
// (the next one), into their buffers if possible. `partials` as in NormSums.
Tensor norm_gradients(Grads& g, int at, const Tensor& dy, const Tensor& x, const Tensor& gamma, const Normed& forward,
                      Tensor residual, Tensor* partials) {
  NormSums sums{.partials = partials};
  if (residual.defined()) residual = residual.to(x.dtype());
  Tensor dx;
  const auto run = [&] { dx = norm_backward(dy, x, gamma, forward, std::move(residual), sums); };
  if (fusion::writes_at_once(g, at, 2)) {
    fusion::write_grads(g, at, 2, [&](std::span<const fusion::GradTarget> to) {
      sums.gamma = {to[0].to, to[0].adds};
      sums.beta = {to[1].to, to[1].adds};
      run();
    });
    return dx;
  }
  const auto made_for = [&](int input) {
    return g.needs(input) ? x.make({x.dim(-1)}, accum_dtype(x.dtype())) : Tensor();
  };
  sums.gamma.to = made_for(at);
  sums.beta.to = made_for(at + 1);
  run();
  if (g.needs(at)) g.set(at, std::move(sums.gamma.to));
  if (g.needs(at + 1)) g.set(at + 1, std::move(sums.beta.to));
  return dx;
}

// Whether to compute requested row sums of input i's gradient from partial sums: not with deferred work, which would
// retain the partial sums too long.
bool wants_partials(const Grads& g, int i) { return fusion::row_sums_requested(g, i) && !g.defer(); }
fusion::RowSums end_of_sums(const Tensor& partials) {
  if (!partials.defined()) return {};
  return [partials](Tensor& out) { sum_partials(out, partials); };
}

// Recomputes norm(x). Saved values outlive the Vars, so the closure captures tensors.
std::function<Tensor()> recompute_norm(Saved x, const Var& gamma, const Var& beta, const NormOptions& options) {
  return [x = std::move(x), w = gamma.saved(), b = saved_or_none(beta), options] {
    return norm(x.get(), w.get(), b.get(), options).y;
  };
}

}  // namespace

Var add_residual(const Var& x, Var y) {
  if (!(x.shape() == y.shape()) || x.dtype() != y.dtype()) return add(x, std::move(y));
  const Var y_edge = y.edge();
  fusion::require_row_sums(y_edge);
  Var sum = record_one("add", x.value(), {x.edge(), y_edge}, [](Grads& g) {
    fusion::RowSums sums = fusion::row_sums(g);
    Tensor dsum = g.take_output();
    if (g.needs(0)) g.set(0, dsum);
    if (g.needs(1)) fusion::set(g, 1, std::move(dsum), std::move(sums));
  });
  fusion::defer_add(sum, std::move(y).take());
  if (fusion::row_sums_requested(y_edge)) fusion::request_row_sums(sum);
  return sum;
}

Var norm(const Var& x, const Var& gamma, const Var& beta, const NormOptions& options, bool recompute) {
  fusion::Addends terms = fusion::take_addends(x);
  Normed n;
  if (terms.addend.defined()) {
    AddNormed r = add_norm(terms.value, std::move(terms.addend), gamma.value(), value_or_none(beta), options);
    fusion::set_sum(x, std::move(r.sum));
    n = std::move(r.normed);
  } else {
    n = norm(terms.value, gamma.value(), value_or_none(beta), options);
  }
  Tensor y = std::exchange(n.y, {});
  const Var out = record_one("norm", std::move(y), {x, gamma, beta}, [x = x.saved(), w = gamma.saved(), n](Grads& g) {
    Tensor partials, dx = norm_gradients(g, 1, g.output(), x.get(), w.get(), n, fusion::take_accumulated(g, 0),
                                         wants_partials(g, 0) ? &partials : nullptr);
    if (g.needs(0)) fusion::set(g, 0, std::move(dx), end_of_sums(partials));
  });
  return recompute ? out.with_recompute(recompute_norm(x.saved(), gamma, beta, options)) : out;
}

std::pair<Var, Var> add_norm(const Var& x, Var y, const Var& gamma, const Var& beta, const NormOptions& options,
                             bool recompute) {
  const Var y_edge = y.edge();
  fusion::require_row_sums(y_edge);
  AddNormed r = add_norm(x.value(), std::move(y).take(), gamma.value(), value_or_none(beta), options);
  Tensor out = std::move(r.normed.y);
  r.normed.y = Tensor();
  auto vars =
      record("add_norm", {r.sum, std::move(out)}, {x.edge(), y_edge, gamma, beta}, [r, w = gamma.saved()](Grads& g) {
        Tensor dsum = g.take_output(0), partials;
        if (g.output(1).defined())
          dsum = norm_gradients(g, 2, g.output(1), r.sum, w.get(), r.normed, std::move(dsum),
                                wants_partials(g, 1) ? &partials : nullptr);
        if (g.needs(0)) g.set(0, dsum);
        if (g.needs(1)) fusion::set(g, 1, std::move(dsum), end_of_sums(partials));
      });
  if (recompute) return {vars[0], vars[1].with_recompute(recompute_norm(Saved(r.sum), gamma, beta, options))};
  return {vars[0], vars[1]};
}

}  // namespace tessera
