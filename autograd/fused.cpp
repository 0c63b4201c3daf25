// Matmuls: forward passes and vjps.
#include <algorithm>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "autograd/fusion.h"
#include "autograd/ops.h"
#include "tensor/ops/embedding.h"
#include "tensor/ops/reduce.h"
#include "tensor/ops/softmax.h"

namespace tessera {

Var matmul(const Var& a, const Var& b) {
  return record_one("matmul", matmul(a.value(), b.value()), {a, b}, [a = a.saved(), b = b.saved()](Grads& g) {
    const Tensor dy = g.output(), x = a.get(), w = b.get();
    const bool one = w.ndim() == 2;
    if (g.needs(0)) g.give(0, one ? linear(dy, w, Tensor()) : matmul(dy, w.transpose(-2, -1)));
    if (!g.needs(1)) return;
    Tensor dw = one ? w.make(w.shape()) : matmul(x.transpose(-2, -1), dy);
    if (one) linear_weight_grad(dw, x, dy);
    g.give(1, std::move(dw));
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
void give_linear(Grads& g, int at, const Tensor& dy, const Saved& x, const BiasSums& bias) {
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
      : x(saved_for(l.w, input)), w(l.w.saved()), packs(l.packs), shared(l.shared) {}
  Saved x, w;
  PackedWeights* packs;
  std::shared_ptr<const SharedInput> shared;

  void give(Grads& g, const Tensor& dy, const BiasSums& bias) const {
    SharedInput::Arriving input, gradient;
    if (shared && shared->regather && g.needs(1)) input = shared->regather(x.get());
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

std::function<Tensor()> recompute_gelu(const Tensor& h, GeluForm form) {
  return [h, form] { return with_gelu(form, [&](auto op) { return unary<decltype(op)>(h); }); };
}

Tensor full_input(const Var& x, const std::shared_ptr<const SharedInput>& shared) {
  return shared ? shared->gather(x.value()) : x.value();
}

}  // namespace

Var linear(const Var& x, const Var& w, const Var& b, PackedWeights* packs, std::shared_ptr<const SharedInput> shared) {
  Tensor made = linear(full_input(x, shared), w.value(), value_or_none(b), packs);
  Var y = record_one("linear", std::move(made), {x, w, b},
                     [first = FirstLayer(x, {w, b, packs, std::move(shared)})](Grads& g) {
                       const Tensor dy = g.output();
                       first.give(g, dy, sums_of_output(g));
                     });
  if (b.requires_grad()) fusion::request_row_sums(y);
  return y;
}

// The backward pass frees each value after its last use: the hidden values are the largest of a block.
Var gelu_mlp(const Var& x, const LinearWeights& up, const LinearWeights& down, bool recompute, GeluForm form) {
  const bool tanh = form == GeluForm::tanh;  // GEMM epilogues support only this form
  const auto activate = [&](const Tensor& in) {
    const Tensor bias = value_or_none(up.b);
    return tanh ? linear_gelu(in, up.w.value(), bias, up.packs)
                : bias_gelu(linear(in, up.w.value(), Tensor(), up.packs), bias, form);
  };
  BiasGelu hidden = activate(full_input(x, up.shared));
  Tensor made = linear(hidden.y, down.w.value(), value_or_none(down.b), down.packs);
  Saved activated = recompute ? Saved(recompute_gelu(hidden.h, form)) : Saved(hidden.y);
  if (!down.w.requires_grad()) activated = Saved();
  Var y = record_one("gelu_mlp", std::move(made), {x, up.w, up.b, down.w, down.b},
                     [first = FirstLayer(x, up), w_down = down.w.saved(), down_packs = down.packs,
                      h = std::move(hidden.h), activated = std::move(activated), form](Grads& g) mutable {
                       const BiasSums sums = sums_of_output(g);
                       Tensor dy = g.take_output();
                       Tensor dbias = g.needs(2) ? h.make({h.dim(-1)}, accum_dtype(dy.dtype())) : Tensor();
                       Tensor* const sums_of_dh = g.needs(2) ? &dbias : nullptr;
                       const auto through = [&](const Tensor& w) {
                         if (form == GeluForm::tanh) return linear_input_grad_gelu(dy, w, h, sums_of_dh, down_packs);
                         return bias_gelu_backward(linear_input_grad(dy, w, down_packs), h, sums_of_dh, form);
                       };
                       const Tensor dh = through(w_down.get());
                       h = Tensor();
                       give_linear(g, 3, dy, activated, sums);
                       activated = Saved();
                       dy = Tensor();
                       const bool given = dbias.defined();  // otherwise computed with the weight gradient
                       if (given) g.give(2, std::move(dbias));
                       first.give(g, dh, {.wanted = !given});
                     });
  if (down.b.requires_grad()) fusion::request_row_sums(y);
  return y;
}

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
  if (g.needs(at)) g.give(at, std::move(sums.gamma.to));
  if (g.needs(at + 1)) g.give(at + 1, std::move(sums.beta.to));
  return dx;
}

// Whether to compute requested row sums of input i's gradient from partial sums: not with deferred work, which would
// retain these too long.
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
    if (g.needs(0)) g.give(0, dsum);
    if (g.needs(1)) fusion::give(g, 1, std::move(dsum), std::move(sums));
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
    if (g.needs(0)) fusion::give(g, 0, std::move(dx), end_of_sums(partials));
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
        if (g.has_output(1))
          dsum = norm_gradients(g, 2, g.output(1), r.sum, w.get(), r.normed, std::move(dsum),
                                wants_partials(g, 1) ? &partials : nullptr);
        if (g.needs(0)) g.give(0, dsum);
        if (g.needs(1)) fusion::give(g, 1, std::move(dsum), end_of_sums(partials));
      });
  if (recompute) return {vars[0], vars[1].with_recompute(recompute_norm(Saved(r.sum), gamma, beta, options))};
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

Var bias_gelu(Var x, const Var& bias, bool recompute, GeluForm form) {
  const Var x_edge = x.edge();
  BiasGelu r = bias_gelu(std::move(x).take(), value_or_none(bias), form);
  Var y = record_one("bias_gelu", std::move(r.y), {x_edge, bias}, [h = r.h, form](Grads& g) {
    Tensor dbias = g.needs(1) ? h.make({h.dim(-1)}, accum_dtype(h.dtype())) : Tensor();
    Tensor dh = bias_gelu_backward(g.take_output(0), h, dbias.defined() ? &dbias : nullptr, form);
    if (g.needs(1)) g.give(1, std::move(dbias));
    if (g.needs(0)) g.give(0, std::move(dh));
  });
  return recompute ? y.with_recompute(recompute_gelu(r.h, form)) : y;
}

Var embedding(const Tensor& ids_anywhere, const Var& table) {
  const Tensor ids = ids_on_device(table.value(), ids_anywhere);
  return record_one("embedding", embedding(ids, table.value()), {table}, [ids](Grads& g) {
    g.write_grad(0, [ids, dy = g.output()](Tensor& dtable) { embedding_backward(dtable, dy, ids); });
  });
}

Var dropout(Var x, double p, const DropoutTile& tile) {
  const Var x_edge = x.edge();
  Tensor y = dropout(std::move(x).take(), p, tile);
  const std::vector<int64_t> positions(tile.positions.begin(), tile.positions.end());
  return record_one("dropout", std::move(y), {x_edge}, [p, tile, positions](Grads& g) {
    DropoutTile saved_tile = tile;
    saved_tile.positions = positions;
    g.give(0, dropout(g.take_output(0), p, saved_tile));
  });
}

Var attention(const Var& q, const Var& k, const Var& v, const AttentionOptions& options) {
  const AttentionResult a = attention(q.value(), k.value(), v.value(), options);
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
  const Tensor q = packed_slice(packed, heads, 0);
  const AttentionResult a = attention(q, packed_slice(packed, heads, 1), packed_slice(packed, heads, 2), options);
  return record_one("attention", a.out.reshape({q.dim(0), q.dim(1), -1}), {qkv}, [=](Grads& g) {
    const Tensor gradient = packed.make(packed.shape());
    Tensor dq = packed_slice(gradient, heads, 0), dk = packed_slice(gradient, heads, 1),
           dv = packed_slice(gradient, heads, 2);
    attention_backward(g.output().contiguous().reshape(q.shape()), q, packed_slice(packed, heads, 1),
                       packed_slice(packed, heads, 2), a, options, dq, dk, dv);
    g.give(0, gradient);
  });
}

Var norm_heads(const Var& qkv, const Heads& heads, const Var& gamma_q, const Var& gamma_k, double eps) {
  const Tensor& packed = qkv.value();
  const NormOptions options{.eps = eps, .center = false};
  const Tensor y = packed.make(packed.shape());
  packed_slice(y, heads, 2).copy_from(packed_slice(packed, heads, 2));
  std::vector<Normed> normed;
  for (int i = 0; i < 2; ++i) {
    const Var& gamma = i == 0 ? gamma_q : gamma_k;
    normed.push_back(norm(packed_slice(packed, heads, i), gamma.value(), Tensor(), options));
    packed_slice(y, heads, i).copy_from(std::exchange(normed.back().y, Tensor()));
  }
  return record_one("norm_heads", y, {qkv, gamma_q, gamma_k},
                    [=, packed = qkv.saved(), gammas = std::vector{gamma_q.saved(), gamma_k.saved()}](Grads& g) {
                      const Tensor dy = g.take_output(0), x = packed.get();
                      const Tensor dx = dy.unique() ? dy : dy.make(dy.shape());
                      if (!dy.unique()) packed_slice(dx, heads, 2).copy_from(packed_slice(dy, heads, 2));
                      for (int i = 0; i < 2; ++i) {
                        const Normed& n = normed[static_cast<size_t>(i)];
                        const Tensor given = packed_slice(dy, heads, i).contiguous(),
                                     in = packed_slice(x, heads, i).contiguous();
                        NormSums sums;
                        if (g.needs(1 + i)) sums.gamma.to = in.make({in.dim(3)}, n.rstd.dtype());
                        packed_slice(dx, heads, i)
                            .copy_from(norm_backward(given, in, gammas[static_cast<size_t>(i)].get(), n, {}, sums));
                        if (g.needs(1 + i)) g.give(1 + i, std::move(sums.gamma.to));
                      }
                      if (g.needs(0)) g.give(0, dx);
                    });
}

Var rotate(Var x, const RopeArgs& rope) {
  const Var x_edge = x.edge();
  Tensor y = rotate(std::move(x).take(), rope);
  return record_one("rotate", std::move(y), {x_edge}, [rope](Grads& g) {
    RopeArgs inverse = rope;
    inverse.back = true;
    g.give(0, rotate(g.take_output(0), inverse));
  });
}

Var swiglu(const Var& x, bool recompute) {
  const Var y = record_one("swiglu", swiglu(x.value()), {x},
                           [x = x.saved()](Grads& g) { g.give(0, swiglu_backward(g.output(), x.get())); });
  return recompute ? y.with_recompute([x = x.saved()] { return swiglu(x.get()); }) : y;
}

Loss cross_entropy(Var logits, const Tensor& targets_anywhere, double scale) {
  const Var edge = logits.edge();
  const bool trains = grad_enabled() && logits.requires_grad();
  Tensor x = std::move(logits).take();
  const Tensor targets = targets_on_device(x, targets_anywhere, x.dim(-1));
  if (trains && x.device() == Device::cuda && x.unique() && x.is_contiguous()) {
    const CrossEntropy r = cross_entropy_in_place(x, targets, scale);  // before backward() provides its seed
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

// Small logits use a plain matmul and loss.

Var linear_by_rows(const Var& x, const Var& w, PackedWeights* packs, int64_t max_bytes) {
  const RowBlocks blocks = row_blocks(x.value(), w.value(), max_bytes);
  if (blocks.one()) return linear(x, w, Var(), packs);
  return record_one("linear", linear_by_rows(x.value(), w.value(), blocks, packs), {x, w},
                    [x = x.saved(), w = w.saved(), blocks, packs](Grads& g) {
                      const Tensor dy = g.output();
                      if (g.needs(0)) g.give(0, linear_input_grad_by_rows(dy, w.get(), blocks, packs));
                      if (g.needs(1))
                        g.write_grad(1, [dy, blocks, in = x.until(g.defer())](Tensor& dw) {
                          linear_weight_grad_by_rows(dw, dy, in.get(), blocks);
                        });
                    });
}

Loss linear_cross_entropy(const Var& x, const Var& w, const Tensor& targets, double scale, PackedWeights* packs,
                          int64_t max_bytes) {
  const RowBlocks blocks = row_blocks(x.value(), w.value(), max_bytes);
  if (blocks.one()) {
    Var logits = reshape(linear(x, w, Var(), packs), {blocks.rows, w.dim(0)});
    return cross_entropy(std::move(logits), targets, scale);
  }
  const Tensor rows = x.value().contiguous().flat_rows();
  const bool of_x = grad_enabled() && x.requires_grad(), of_w = grad_enabled() && w.requires_grad();
  Tensor dx = of_x ? rows.make(rows.shape()) : Tensor();
  auto dw = of_w ? fusion::precomputed_grad(w, accum_dtype(x.dtype())) : nullptr;
  const LinearCrossEntropy r = linear_cross_entropy(rows, w.value(), targets, scale, of_x ? &dx : nullptr,
                                                    of_w ? &dw->at : nullptr, blocks, packs);
  Tensor mean = r.sum;
  scale_(mean, scale);
  if (of_x) dx = dx.reshape(x.shape());
  Var root = record_one("linear_cross_entropy", std::move(mean), {x, w},
                        [dx = std::move(dx), dw = std::move(dw)](Grads& g) mutable {
                          const double seed = g.output().item<double>();
                          if (seed != 1 && dx.defined()) scale_(dx, seed);
                          if (seed != 1 && dw) scale_(dw->at, seed);
                          if (dx.defined()) g.give(0, std::move(dx));
                          if (dw) fusion::set_precomputed(g, 1, std::move(dw));
                        });
  return {std::move(root), r.loss_sum, r.count};
}

// The node's vjp runs a separate forward and backward pass.

namespace {

struct Block {
  std::function<Var(const std::vector<Var>&)> f;
  std::vector<Tensor> saved;
  std::vector<bool> wanted;
  std::vector<Var> leaves = {};
  Var recomputed = {};

  const Var& run() {
    if (recomputed.defined()) return recomputed;
    const GradMode recording(true);
    const Arena::Scope scope(*saved[0].arena(), Category::activations);
    leaves.clear();
    for (size_t i = 0; i < saved.size(); ++i) leaves.push_back(wanted[i] ? Var::input(saved[i]) : Var(saved[i]));
    return recomputed = f(leaves);
  }
};

}  // namespace

Var checkpoint(const std::function<Var(const std::vector<Var>&)>& f, const std::vector<Var>& inputs, bool drop_result) {
  if (!grad_enabled()) return f(inputs);
  const auto block = std::make_shared<Block>();
  block->f = f;
  bool any = false;
  for (const Var& in : inputs) {
    block->saved.push_back(in.value());
    block->wanted.push_back(in.requires_grad());
    any = any || in.requires_grad();
  }
  if (!any)
    throw Error(
        "[checkpoint] expected an input that requires a gradient; otherwise the block's parameters would receive no "
        "gradient");
  Tensor out;
  {
    const NoGrad no_grad;
    out = f(inputs).take();
  }
  const Var y = record_one("checkpoint", std::move(out), inputs, [block](Grads& g) {
    block->run();
    const Var recomputed = std::exchange(block->recomputed, Var()).edge();  // the value is unused
    backward(recomputed, {.seed = g.output(), .defer = g.defer()});
    const std::vector<Var> leaves = std::exchange(block->leaves, {});
    for (size_t i = 0; i < leaves.size(); ++i)
      if (g.needs(static_cast<int>(i)) && leaves[i].grad().defined()) g.give(static_cast<int>(i), leaves[i].grad());
  });
  return drop_result ? y.with_recompute([block] { return block->run().value(); }) : y;
}

}  // namespace tessera
