// Fused and structured ops, forward beside vjp.
#include "autograd/ops.h"
#include "tensor/ops/bias_gelu.h"
#include "tensor/ops/cross_entropy/cross_entropy.h"
#include "tensor/ops/embedding.h"
#include "tensor/ops/reduce.h"
#include "tensor/ops/softmax.h"
#include "tensor/ops/swiglu.h"

namespace tessera {
namespace {

// The gradient of a norm's x, `residual` in it. Gives gamma (input `at`) and beta (the next one) theirs, made in the
// same pass: straight into their buffers where it can be. `parts` as in NormSums.
Tensor norm_gradients(Grads& g, int at, const Tensor& dy, const Tensor& x, const Tensor& gamma, const Normed& forward,
                      Tensor residual, Tensor* parts) {
  NormSums sums{.parts = parts};
  if (residual.defined()) residual = residual.to(x.dtype());
  Tensor dx;
  const auto run = [&] { dx = norm_backward(dy, x, gamma, forward, std::move(residual), sums); };
  if (g.writes_at_once(at, 2)) {
    g.give_into(at, 2, [&](std::span<const GradTarget> to) {
      sums.gamma = {to[0].to, to[0].adds};
      sums.beta = {to[1].to, to[1].adds};
      run();
    });
    return dx;
  }
  const auto made_for = [&](int input) { return g.needs(input) ? x.make({x.dim(-1)}, wide_of(x.dtype())) : Tensor(); };
  sums.gamma.to = made_for(at);
  sums.beta.to = made_for(at + 1);
  run();
  if (g.needs(at)) g.give(at, std::move(sums.gamma.to));
  if (g.needs(at + 1)) g.give(at + 1, std::move(sums.beta.to));
  return dx;
}

// Room for the first pass of the sums over rows of input i's gradient, if they are wanted; and the second pass. Put-off
// work would keep them long.
bool wants_parts(const Grads& g, int i) { return g.wants_row_sums(i) && !g.defer(); }
RowSums end_of_sums(const Tensor& parts) {
  if (!parts.defined()) return {};
  return [parts](Tensor& out) { sum_parts(out, parts); };
}

// How to make norm(x) again. Saved values outlive the Vars, so the recipe holds tensors.
std::function<Tensor()> norm_recipe(Saved x, const Var& gamma, const Var& beta, const NormOptions& options) {
  return [x = std::move(x), w = gamma.saved(), b = saved_or_none(beta), options] {
    return norm(x.get(), w.get(), b.get(), options).y;
  };
}

}  // namespace

Var add_residual(const Var& x, Var y) {
  if (!(x.shape() == y.shape()) || x.dtype() != y.dtype()) return add(x, std::move(y));
  const Var y_edge = y.edge();
  y_edge.expect_row_sums();
  Var sum = record_one("add", x.value(), {x.edge(), y_edge}, [](Grads& g) {
    const RowSums row_sums = g.row_sums();
    Tensor dsum = g.take_output();
    if (g.needs(0)) g.give(0, dsum);
    if (g.needs(1)) g.give(1, std::move(dsum), row_sums);
  });
  sum.add_later(std::move(y).take());
  if (y_edge.wants_row_sums()) sum.want_row_sums();
  return sum;
}

Var norm(const Var& x, const Var& gamma, const Var& beta, const NormOptions& options, bool recompute) {
  Var::Terms terms = x.take_terms();
  Normed n;
  if (terms.addend.defined()) {
    AddNormed r = add_norm(terms.value, std::move(terms.addend), gamma.value(), value_or_none(beta), options);
    x.set_sum(std::move(r.sum));
    n = std::move(r.normed);
  } else {
    n = norm(terms.value, gamma.value(), value_or_none(beta), options);
  }
  Tensor y = std::exchange(n.y, {});
  const Var out = record_one("norm", std::move(y), {x, gamma, beta}, [x = x.saved(), w = gamma.saved(), n](Grads& g) {
    Tensor parts, dx = norm_gradients(g, 1, g.output(), x.get(), w.get(), n, g.take_given(0),
                                      wants_parts(g, 0) ? &parts : nullptr);
    if (g.needs(0)) g.give(0, std::move(dx), end_of_sums(parts));
  });
  return recompute ? out.with_recipe(norm_recipe(x.saved(), gamma, beta, options)) : out;
}

std::pair<Var, Var> add_norm(const Var& x, Var y, const Var& gamma, const Var& beta, const NormOptions& options,
                             bool recompute) {
  const Var y_edge = y.edge();
  y_edge.expect_row_sums();
  AddNormed r = add_norm(x.value(), std::move(y).take(), gamma.value(), value_or_none(beta), options);
  Tensor out = std::move(r.normed.y);
  r.normed.y = Tensor();
  auto vars =
      record("add_norm", {r.sum, std::move(out)}, {x.edge(), y_edge, gamma, beta}, [r, w = gamma.saved()](Grads& g) {
        Tensor dsum = g.take_output(0), parts;
        if (g.has_output(1))
          dsum = norm_gradients(g, 2, g.output(1), r.sum, w.get(), r.normed, std::move(dsum),
                                wants_parts(g, 1) ? &parts : nullptr);
        if (g.needs(0)) g.give(0, dsum);
        if (g.needs(1)) g.give(1, std::move(dsum), end_of_sums(parts));
      });
  if (recompute) return {vars[0], vars[1].with_recipe(norm_recipe(Saved(r.sum), gamma, beta, options))};
  return {vars[0], vars[1]};
}

Var softmax(const Var& x) {
  const Tensor y = softmax(x.value());
  return record_one("softmax", y, {x.edge()}, [y](Grads& g) { g.give(0, softmax_backward(g.output(), y)); });
}

Var log_softmax(const Var& x) {
  const Tensor y = log_softmax(x.value());
  return record_one("log_softmax", y, {x.edge()}, [y](Grads& g) { g.give(0, log_softmax_backward(g.output(), y)); });
}

Var bias_gelu(Var x, const Var& bias, bool recompute) {
  const Var x_edge = x.edge();
  BiasGelu r = bias_gelu(std::move(x).take(), value_or_none(bias));
  Var y = record_one("bias_gelu", std::move(r.y), {x_edge, bias}, [h = r.h](Grads& g) {
    Tensor dbias = g.needs(1) ? h.make({h.dim(-1)}, wide_of(h.dtype())) : Tensor();
    Tensor dh = bias_gelu_backward(g.take_output(0), h, dbias.defined() ? &dbias : nullptr);
    if (g.needs(1)) g.give(1, std::move(dbias));
    if (g.needs(0)) g.give(0, std::move(dh));
  });
  return recompute ? y.with_recipe([h = r.h] { return unary<Gelu>(h); }) : y;
}

Var embedding(const Tensor& ids_anywhere, const Var& table) {
  const Tensor ids = ids_beside(table.value(), ids_anywhere);
  return record_one("embedding", embedding(ids, table.value()), {table}, [ids](Grads& g) {
    g.give_into(0, [ids, dy = g.output()](Tensor& dtable) { embedding_backward(dtable, dy, ids); });
  });
}

Var dropout(Var x, double p, const DropoutTile& tile) {
  const Var x_edge = x.edge();
  Tensor y = dropout(std::move(x).take(), p, tile);
  const std::vector<int64_t> positions(tile.positions.begin(), tile.positions.end());
  return record_one("dropout", std::move(y), {x_edge}, [p, tile, positions](Grads& g) {
    DropoutTile again = tile;
    again.positions = positions;
    g.give(0, dropout(g.take_output(0), p, again));
  });
}

Var attention(const Var& q, const Var& k, const Var& v, const AttentionOptions& options) {
  const Attended a = attention(q.value(), k.value(), v.value(), options);
  return record_one("attention", a.out, {q, k, v}, [q = q.saved(), k = k.saved(), v = v.saved(), a, options](Grads& g) {
    const Tensor qt = q.get(), kt = k.get(), vt = v.get();
    Tensor dq = qt.make(qt.shape()), dk = kt.make(kt.shape()), dv = vt.make(vt.shape());
    attention_backward(g.output(), qt, kt, vt, a, options, dq, dk, dv);
    if (g.needs(0)) g.give(0, std::move(dq));
    if (g.needs(1)) g.give(1, std::move(dk));
    if (g.needs(2)) g.give(2, std::move(dv));
  });
}

Var packed_attention(const Var& qkv, const Heads& heads, const AttentionOptions& options) {
  const Tensor& packed = qkv.value();
  const Tensor q = packed_part(packed, heads, 0);
  const Attended a = attention(q, packed_part(packed, heads, 1), packed_part(packed, heads, 2), options);
  return record_one("attention", a.out.reshape({q.dim(0), q.dim(1), -1}), {qkv}, [=](Grads& g) {
    const Tensor gradient = packed.make(packed.shape());
    Tensor dq = packed_part(gradient, heads, 0), dk = packed_part(gradient, heads, 1),
           dv = packed_part(gradient, heads, 2);
    attention_backward(g.output().contiguous().reshape(q.shape()), q, packed_part(packed, heads, 1),
                       packed_part(packed, heads, 2), a, options, dq, dk, dv);
    g.give(0, gradient);
  });
}

Var norm_heads(const Var& qkv, const Heads& heads, const Var& gamma_q, const Var& gamma_k, double eps) {
  const Tensor& packed = qkv.value();
  const NormOptions options{.eps = eps, .center = false};
  const Tensor y = packed.make(packed.shape());
  packed_part(y, heads, 2).copy_from(packed_part(packed, heads, 2));
  std::vector<Normed> normed;
  for (int i = 0; i < 2; ++i) {
    const Var& gamma = i == 0 ? gamma_q : gamma_k;
    normed.push_back(norm(packed_part(packed, heads, i), gamma.value(), Tensor(), options));
    packed_part(y, heads, i).copy_from(std::exchange(normed.back().y, Tensor()));
  }
  return record_one("norm_heads", y, {qkv, gamma_q, gamma_k},
                    [=, packed = qkv.saved(), gammas = std::vector{gamma_q.saved(), gamma_k.saved()}](Grads& g) {
                      const Tensor dy = g.take_output(0), x = packed.get();
                      const Tensor dx = dy.unique() ? dy : dy.make(dy.shape());
                      if (!dy.unique()) packed_part(dx, heads, 2).copy_from(packed_part(dy, heads, 2));
                      for (int i = 0; i < 2; ++i) {
                        const Normed& n = normed[static_cast<size_t>(i)];
                        const Tensor given = packed_part(dy, heads, i).contiguous(),
                                     in = packed_part(x, heads, i).contiguous();
                        NormSums sums;
                        if (g.needs(1 + i)) sums.gamma.to = in.make({in.dim(3)}, n.rstd.dtype());
                        packed_part(dx, heads, i)
                            .copy_from(norm_backward(given, in, gammas[static_cast<size_t>(i)].get(), n, {}, sums));
                        if (g.needs(1 + i)) g.give(1 + i, std::move(sums.gamma.to));
                      }
                      if (g.needs(0)) g.give(0, dx);
                    });
}

Var rotate(Var x, const Turn& turn) {
  const Var x_edge = x.edge();
  Tensor y = rotate(std::move(x).take(), turn);
  return record_one("rotate", std::move(y), {x_edge}, [turn](Grads& g) {
    Turn again = turn;
    again.back = true;
    g.give(0, rotate(g.take_output(0), again));
  });
}

Var swiglu(const Var& x, bool recompute) {
  const Var y = record_one("swiglu", swiglu(x.value()), {x},
                           [x = x.saved()](Grads& g) { g.give(0, swiglu_backward(g.output(), x.get())); });
  return recompute ? y.with_recipe([x = x.saved()] { return swiglu(x.get()); }) : y;
}

Loss cross_entropy(Var logits, const Tensor& targets_anywhere, double scale) {
  const Var edge = logits.edge();
  const bool trains = grad_enabled() && logits.requires_grad();
  Tensor x = std::move(logits).take();
  const Tensor targets = targets_beside(x, targets_anywhere, x.dim(-1));
  if (trains && x.device() == Device::cuda && x.unique() && x.is_contiguous()) {
    const CrossEntropy r = cross_entropy_in_place(x, targets, scale);  // one pass, before the factor of backward()
    Var root = record_one("cross_entropy", tessera::scale(r.sum, scale), {edge}, [x = std::move(x)](Grads& g) mutable {
      scale_rows_(x, g.output());
      g.give(0, std::move(x));
    });
    return {std::move(root), r.loss_sum, r.count};
  }
  const CrossEntropy r = cross_entropy(x, targets);
  Var root = record_one("cross_entropy", tessera::scale(r.sum, scale), {edge},
                        [x = std::move(x), targets, lse = r.lse, scale](Grads& g) mutable {
                          const GradientScale by(scale, g.output());
                          g.give(0, cross_entropy_backward(std::move(x), targets, lse, by));
                        });
  return {std::move(root), r.loss_sum, r.count};
}

}  // namespace tessera
