// The work of one micro-batch, counted from the model's sizes.
#include "planner/layer.h"

#include <algorithm>
#include <array>

namespace tessera::planner {
namespace {

double real(int64_t x) { return static_cast<double>(x); }

// Arrays of 2-byte elements of one micro-batch on one rank.
struct Sizes {
  double tokens = 0, t = 1;             // here; ranks of tp
  double h = 0, q = 0, k = 0, f = 0;    // channels of the model; here: of q, of k, of a feed-forward layer
  double rows = 0;                      // that a feed-forward layer sees here: with experts, tokens that were sent here
  double between = 0;                   // bytes of an array between the blocks of a layer: with sp a part of it
  double query = 0, key = 0, wide = 0;  // bytes of q, of k, and of the feed-forward layer's inside
  double masks = 0;                     // bytes of a mask, in those of its array
};

Sizes sizes_of(const Case& c) {
  const ModelShape& m = c.model;
  const double t = real(c.layout.plan.tp), tokens = local_tokens(c);
  Sizes s{.tokens = tokens, .t = t, .h = real(m.channels)};
  s.q = real(m.query()) / t;
  s.k = real(m.key()) / std::min(t, real(m.key_heads()));  // more ranks than heads: some hold the same one
  s.f = real(m.hidden()) / t;
  s.rows = tokens * (m.experts > 0 ? real(m.experts_per_token) : 1);
  s.between = 2 * tokens * s.h / (c.layout.plan.sp ? t : 1);
  s.query = 2 * tokens * s.q;
  s.key = 2 * tokens * s.k;
  s.wide = 2 * s.rows * s.f;
  s.masks = c.software.dropout ? 0.5 : 0;
  return s;
}

// A product with a weight: forward (rows, in) x (in, out), then the gradients of its input and of its weight, which
// adds to what other micro-batches gave. In fp8 each operand is read and written in one byte before.
Passes linear(const Case& c, double rows, double in, double out, double count = 1) {
  const double speed = c.software.fp8 ? 2 : 1, cast = c.software.fp8 ? 3 * count : 0;
  const Product forward{.rows = rows, .columns = out, .inner = in, .count = count, .speed = speed},
      input{.rows = rows, .columns = in, .inner = out, .count = count, .speed = speed},
      weight{in, out, rows, count, 2 * c.software.gradient_bytes, speed};
  const auto seconds = [&](const Product& p) {
    return product_s(c.hardware, p) + bytes_s(c.hardware, cast * (p.rows + p.columns) * p.inner);
  };
  return {seconds(forward), seconds(input), seconds(weight)};
}

// The matrices of a layer; with experts each sees its share of the tokens.
Passes products(const Case& c, const Sizes& s) {
  const ModelShape& m = c.model;
  Passes out = linear(c, s.tokens, s.h, s.q + 2 * s.k);
  out += linear(c, s.tokens, s.q, s.h);
  const double here = m.experts > 0 ? std::max(1.0, real(m.experts) / real(c.layout.ep)) : 1, rows = s.rows / here;
  out += linear(c, rows, s.h, (m.gated ? 2 : 1) * s.f, here);
  out += linear(c, rows, s.f, s.h, here);
  if (m.experts > 0) out += linear(c, s.tokens, s.h, real(m.experts));
  return out;
}

// FLOPs of the forward pass, those of a causal half only.
double attention_flops(const Case& c, const Sizes& s) { return 2 * s.tokens * real(c.model.context) * s.q; }

// Flash: Dao et al. 2022, algorithm 4: five products backward, two forward. Unfused: batches of products over all
// pairs, and passes over the pairs between them (Korthikanti et al. 2022, section 4.1): softmax, and dropout with its
// mask.
Passes attention(const Case& c, const Sizes& s) {
  const Hardware& h = c.hardware;
  const auto d = real(c.model.head_size()), all = real(c.model.context);
  if (c.software.attention != "unfused") {
    const double once = attention_s(h, c.software.attention, attention_flops(c, s), all, d);
    return {once, 2.5 * once, 0};
  }
  const double heads = s.q / d, pairs = 2 * s.tokens * all * heads, drop = c.software.dropout ? 1 : 0;
  const double batch = heads * s.tokens / all;
  const double scores = product_s(h, {.rows = all, .columns = all, .inner = d, .count = batch});
  const double sums = product_s(h, {.rows = all, .columns = d, .inner = all, .count = batch});
  return {scores + sums + bytes_s(h, (2 + 2.5 * drop) * pairs) + 2 * h.launch_s,
          2 * scores + 2 * sums + bytes_s(h, (3 + 2.5 * drop) * pairs) + 2 * h.launch_s, 0};
}

// Bytes that passes between the products read and write; U is an array between blocks, F one inside the feed-forward
// layer.
struct Elementwise {
  double norms = 0, activation = 0, rest = 0;  // forward
  double backward = 0;
  double launches = 0;  // of kernels, forward; backward twice as many
};

Elementwise elementwise(const Case& c, const Sizes& s) {
  const bool fused = c.software.fused_elementwise, dropout = c.software.dropout, gated = c.model.gated;
  const double u = s.between, f = s.wide, pieces = gated ? 2 : 1;
  Elementwise e;
  // A norm reads and writes; backward it reads two, writes one and adds it to the residual's gradient.
  e.norms = 2 * (fused ? 2 : 5) * u;
  e.backward += 2 * (fused ? 5 : 11) * u;
  // GELU F to F, SwiGLU 2 F to F; backward the gradients of what was read.
  e.activation = (fused || !gated ? pieces + 1 : 5) * f;
  e.backward += (fused || !gated ? 2 * pieces + 1 : 8) * f;
  // The sum of block and residual, with dropout its mask.
  e.rest = 2 * (3 + (dropout ? (fused ? s.masks : 2 + s.masks) : 0)) * u;
  e.backward += dropout ? 2 * (2 + s.masks) * u : 0;
  // q, k and v are laid out for attention, its result for the next product; rotary positions turn q and k.
  e.rest += 2 * s.query;
  e.backward += 2 * s.query;
  if (c.model.positions == Positions::rope) {
    e.rest += (fused ? 2 : 6) * (s.query + s.key);
    e.backward += (fused ? 2 : 6) * (s.query + s.key);
  }
  // Biases: added in the products' epilogues or passes, their gradients a pass each.
  if (!gated) e.backward += s.query + 2 * s.key + 2 * u + f;
  // Experts: tokens are dealt out and collected.
  if (c.model.experts > 0) {
    e.rest += 4 * 2 * s.rows * s.h;
    e.backward += 4 * 2 * s.rows * s.h;
  }
  e.launches = fused ? 8 : 20;
  return e;
}

// Collectives of one pass, of which `beside` seconds of products can hide some: what is seen of them, and what the
// products beside it take longer (contention).
double exposed(const Hardware& h, double sent, double beside) {
  const double hidden = std::min(sent, beside);
  return sent - hidden + h.contention * hidden;
}

// Shoeybi et al. 2019: an all-reduce after each block, and one of its input's gradient. With sequence parallelism
// (Korthikanti et al. 2022, section 4.2.2) an all-gather and a reduce-scatter each; backward a block's input is
// gathered again beside a product, and nothing is there to be done beside the gathering of its output's gradient.
Passes tensor_parallel(const Case& c, const Sizes& s, const Passes& work) {
  const Hardware& h = c.hardware;
  const Link link = link_of(h, tp_axis(c));
  if (link.ranks == 1) return {};
  const double whole = 2 * s.tokens * s.h, gather = all_gather_s(link, whole);
  const bool sp = c.layout.plan.sp;
  const double forward = 2 * (sp ? 2 * gather : all_reduce_s(h, link, whole)),
               backward = forward + (sp ? 2 * gather : 0), alone = sp ? 2 * gather : 0;
  switch (c.software.tp_overlap) {
    case TensorOverlap::none:
      return {forward, backward, 0};
    case TensorOverlap::backward:
      return {forward, alone + exposed(h, backward - alone, work.backward()), 0};
    default:
      return {exposed(h, forward, work.forward), exposed(h, backward, work.backward()), 0};
  }
}

// Liu et al. 2023, ring attention: keys and values go around beside the attention of the blocks that are here; backward
// also their gradients.
Passes context_parallel(const Case& c, const Sizes& s, const Passes& attention) {
  const Hardware& h = c.hardware;
  const Link link = link_of(h, cp_axis(c));
  if (link.ranks == 1) return {};
  const double once = real(link.ranks - 1) * message_s(h, cp_axis(c), 2 * s.key);
  return {exposed(h, once, attention.forward), exposed(h, 2 * once, attention.input), 0};
}

// Lepikhin et al. 2020, GShard: tokens go to their experts and come back.
Passes expert_parallel(const Case& c, const Sizes& s) {
  if (c.layout.ep == 1) return {};
  const Link link = link_of(c.hardware, {c.layout.ep, c.layout.plan.tp});
  const double once = 2 * all_to_all_s(c.hardware, link, 2 * s.rows * s.h);
  return {once, once, 0};
}

}  // namespace

double local_tokens(const Case& c) { return real(c.layout.sequences) * real(c.model.context) / real(c.layout.plan.cp); }
Axis tp_axis(const Case& c) { return {c.layout.plan.tp, 1}; }
Axis cp_axis(const Case& c) { return {c.layout.plan.cp, c.layout.plan.tp}; }
Axis data_axis(const Case& c) { return {c.layout.plan.dp * c.layout.plan.cp, c.layout.plan.tp}; }
Axis pp_axis(const Case& c) {
  const Plan& p = c.layout.plan;
  return {p.pp, p.tp * p.cp * p.dp};
}

LayerTime layer_time(const Case& c) {
  const Sizes s = sizes_of(c);
  const Hardware& h = c.hardware;
  const Passes matrices = products(c, s), attended = attention(c, s);
  const Elementwise e = elementwise(c, s);
  LayerTime out;
  out.compute = matrices;
  out.compute += attended;
  out.compute += {bytes_s(h, e.norms + e.activation + e.rest) + e.launches * h.launch_s,
                  bytes_s(h, e.backward) + 2 * e.launches * h.launch_s, 0};
  out.tp = tensor_parallel(c, s, matrices);
  out.cp = context_parallel(c, s, attended);
  out.ep = expert_parallel(c, s);
  const double experts = c.model.experts > 0 ? real(c.model.experts) * s.h * s.tokens : 0;
  const double dense = s.tokens * s.h * (2 * s.q + 2 * s.k) + s.rows * s.h * s.f * (c.model.gated ? 3 : 2) + experts;
  out.flops = 2 * dense + attention_flops(c, s);
  switch (c.layout.plan.recompute) {  // Chen et al. 2016; Korthikanti et al. 2022, section 5
    case Recompute::none:
      break;
    case Recompute::activation:
      out.recompute = bytes_s(h, e.activation) + h.launch_s;
      break;
    case Recompute::activation_norm:
      out.recompute = bytes_s(h, e.activation + e.norms) + 3 * h.launch_s;
      break;
    case Recompute::attention:
      out.recompute = attended.forward;
      out.again = attention_flops(c, s);
      break;
    case Recompute::block:
      out.recompute = out.forward();
      out.again = out.flops;
      break;
  }
  return out;
}

// A row of the table for each token; backward its gradient is added there.
LayerTime embedding_time(const Case& c) {
  const Sizes s = sizes_of(c);
  const double array = 2 * s.tokens * s.h, passes = c.model.positions == Positions::learned ? 4 : 2;
  LayerTime out;
  out.compute = {bytes_s(c.hardware, (passes + (c.software.dropout ? 2 : 0)) * array), 0,
                 bytes_s(c.hardware, 2 * passes * array)};
  if (s.t > 1) out.tp.forward = all_reduce_s(c.hardware, link_of(c.hardware, tp_axis(c)), array);
  return out;
}

// Logits are written by the product, read for the loss, and their gradient is written and read by two products.
LayerTime head_time(const Case& c) {
  const Sizes s = sizes_of(c);
  const Hardware& h = c.hardware;
  const double vocab = real(c.model.vocab) / s.t, logits = s.tokens * vocab * std::max(2.0, c.software.logit_bytes);
  LayerTime out;
  Case plain = c;
  plain.software.fp8 = false;
  out.compute = linear(plain, s.tokens, s.h, vocab);
  out.compute += {bytes_s(h, 3 * logits + 2 * s.between), bytes_s(h, 2 * logits + 5 * s.between), 0};
  out.flops = 2 * s.tokens * s.h * vocab;
  if (s.t > 1) {
    const Link link = link_of(h, tp_axis(c));
    out.tp = {3 * all_reduce_s(h, link, 4 * s.tokens), all_reduce_s(h, link, 2 * s.tokens * s.h), 0};
  }
  return out;
}

}  // namespace tessera::planner
