// Checks, the walk over blocks, and who writes what.
#include "tensor/ops/attention.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "tensor/cpu/amx_attention.h"
#include "tensor/cpu/attention_problem.h"
#include "tensor/cpu/attention_tiles.h"
#include "tensor/cuda/attention.h"

namespace tessera {
namespace {

using cpu::Buffer;
using cpu::kBlock;
using cpu::kLanes;
using cpu::lanes_up;
using cpu::rows_of;
using Problem = cpu::AttentionProblem;

Problem check(const Tensor& q, const Tensor& k, const Tensor& v, const AttentionOptions& options) {
  if (q.rank() != 4 || !(k.shape() == v.shape()) || k.rank() != 4 || q.dim(0) != k.dim(0) || q.dim(2) != k.dim(2) ||
      q.dim(3) != k.dim(3))
    throw Error("[attention] q " + q.shape().str() + ", k " + k.shape().str() + ", v " + v.shape().str() +
                "; expected (B, Tq, H, D), (B, Tk, H, D), (B, Tk, H, D)");
  if (q.dim(1) > k.dim(1))
    throw Error("[attention] " + std::to_string(q.dim(1)) + " queries but only " + std::to_string(k.dim(1)) + " keys");
  if (q.dtype() != k.dtype() || q.dtype() != v.dtype())
    throw Error("[attention] dtypes differ: q " + q.describe() + ", k " + k.describe() + ", v " + v.describe());
  for (const Tensor* t : {&q, &k, &v})
    if (t->strides()[3] != 1 && t->dim(3) != 1)
      throw Error("[attention] the last dim must run on; strides are " + t->strides().str());
  Problem p{q.dim(0), q.dim(1), k.dim(1), q.dim(2), q.dim(3), options, options.scale};
  if (p.scale == 0) p.scale = 1 / std::sqrt(static_cast<double>(p.d));
  if (p.options.heads_total == 0) p.options.heads_total = p.heads;
  if (p.options.tokens_total == 0) p.options.tokens_total = p.tk;
  if (p.options.first_query < 0) p.options.first_query = p.options.first_key + p.offset();
  const int64_t end = std::max(p.options.first_query + p.tq, p.options.first_key + p.tk);
  if (p.options.dropout > 0 && end > p.options.tokens_total)
    throw Error("[attention] the tile reaches token " + std::to_string(end - 1) + " of " +
                std::to_string(p.options.tokens_total) + "; say how many there are in tokens_total");
  return p;
}

// The options with all that they left open.
AttentionOptions complete(const Problem& p) {
  AttentionOptions options = p.options;
  options.scale = p.scale;
  return options;
}

DType wide_of(const Tensor& t) { return t.dtype() == DType::float64 ? DType::float64 : DType::float32; }

// Where a result goes: the shape and the dtype of the operand `like`, or the type of its sums.
void check_result(const char* name, const Tensor& t, const Tensor& like) {
  if (t.shape() == like.shape() && (t.dtype() == like.dtype() || t.dtype() == wide_of(like)) &&
      (t.strides()[3] == 1 || t.dim(3) == 1))
    return;
  throw Error(std::string("[attention] ") + name + " is " + t.describe() + "; expected " + like.describe() +
              ", or that in the type of its sums, the last dim running on");
}

void check_lse(const Problem& p, const Tensor& lse, const Tensor& like) {
  if (!(lse.shape() == Shape{p.batch, p.heads, p.tq}) || lse.dtype() != wide_of(like) || !lse.is_contiguous())
    throw Error("[attention] lse is " + lse.describe() + "; expected contiguous (B, H, Tq) for q " + like.describe());
}

template <class T>
class Forward {
 public:
  using A = Accumulate<T>;
  Forward(const Problem& problem, const Tensor& q, const Tensor& k, const Tensor& v, const Attended& result)
      : p_(problem),
        q_(q),
        k_(k),
        v_(v),
        result_(result),
        width_(p_.tq <= kLanes<A> ? kLanes<A> : kBlock),
        ld_(lanes_up(p_.d, kLanes<A>)) {}

  void run() const {
    const int64_t blocks = (p_.tq + width_ - 1) / width_, tasks = p_.batch * p_.heads * blocks;
    const int64_t size = width_ * (3 * ld_ + 2 * kBlock + 3) + 2 * kBlock * ld_ + 16 * kLanes<A>;
    cpu::split(tasks, 1, [&](int64_t begin, int64_t end) {
      Buffer<A> memory(q_, size);
      for (int64_t task = begin; task < end; ++task) {
        Buffer<A> fresh = memory;
        block(fresh, task / blocks / p_.heads, task / blocks % p_.heads, task % blocks * width_);
      }
    });
  }

 private:
  void block(Buffer<A>& m, int64_t b, int64_t h, int64_t query0) const {
    const int64_t w = width_, queries = std::min(w, p_.tq - query0);
    A *const query = m.take(w * ld_), *const query_t = m.take(w * ld_), *const out = m.take(w * ld_);
    A *const key = m.take(kBlock * ld_), *const value = m.take(kBlock * ld_), *const scores = m.take(kBlock * w);
    A *const keep = m.take(kBlock * w), *const max = m.take(w), *const sum = m.take(w), *const shrink = m.take(w);
    cpu::load_tile<A, T>(query, w, ld_, rows_of<const T>(q_, b, h, query0), queries, p_.d, static_cast<A>(p_.scale));
    cpu::transpose_tile(query_t, query, w, ld_, p_.d);
    std::fill(max, max + w, -std::numeric_limits<A>::infinity());
    std::fill(sum, sum + w, A(0));
    std::fill(out, out + w * ld_, A(0));
    const int64_t seen = cpu::keys_seen(p_, query0, queries);
    for (int64_t key0 = 0; key0 < seen; key0 += kBlock) {
      const int64_t keys = std::min(kBlock, p_.tk - key0);
      cpu::load_tile<A, T>(key, kBlock, ld_, rows_of<const T>(k_, b, h, key0), keys, p_.d, A(1));
      cpu::load_tile<A, T>(value, kBlock, ld_, rows_of<const T>(v_, b, h, key0), keys, p_.d, A(1));
      cpu::tile_gemm<A>(kBlock, w, p_.d, {key, ld_, 1}, query_t, w, scores, w, false);
      cpu::mask_tile(scores, w, cpu::mask_at(p_, key0, query0));
      cpu::softmax_tile(scores, w, max, sum, shrink);
      if (key0 > 0)
        for (int64_t i = 0; i < w; ++i)
          for (int64_t c = 0; c < ld_; ++c) out[i * ld_ + c] *= shrink[i];
      if (p_.options.dropout > 0) {
        cpu::dropout_tile(keep, w, p_, b, h, key0, query0);
        cpu::multiply_tile(scores, scores, keep, kBlock * w);
      }
      cpu::round_tile<T>(scores, kBlock * w);
      cpu::tile_gemm<A>(w, ld_, kBlock, {scores, 1, w}, value, ld_, out, ld_, true);
    }
    A* const lse = result_.lse.template data<A>() + (b * p_.heads + h) * p_.tq + query0;
    for (int64_t i = 0; i < queries; ++i) {
      const A inverse = A(1) / sum[i];
      for (int64_t c = 0; c < ld_; ++c) out[i * ld_ + c] *= inverse;
      lse[i] = max[i] + math::log(sum[i]);
    }
    cpu::store_head<T>(result_.out, {b, h, query0}, out, ld_, queries);
  }

  const Problem& p_;
  const Tensor &q_, &k_, &v_;
  const Attended& result_;
  const int64_t width_, ld_;
};

using Gradients = cpu::AttentionGradients;

template <class T>
class Backward {
 public:
  using A = Accumulate<T>;
  Backward(const Problem& problem, const Tensor& dout, const Tensor& q, const Tensor& k, const Tensor& v,
           const Attended& forward, const Gradients& grads)
      : p_(problem),
        dout_(dout),
        q_(q),
        k_(k),
        v_(v),
        forward_(forward),
        grads_(grads),
        ld_(lanes_up(p_.d, kLanes<A>)),
        padded_(lanes_up(p_.tq, kBlock)) {}

  void run() const {
    const int64_t size = 5 * padded_ * ld_ + 2 * padded_ + 4 * kBlock * ld_ + 4 * kBlock * kBlock + 32 * kLanes<A>;
    cpu::split(p_.batch * p_.heads, 1, [&](int64_t begin, int64_t end) {
      Buffer<A> memory(q_, size);
      for (int64_t task = begin; task < end; ++task) {
        Buffer<A> fresh = memory;
        head(fresh, task / p_.heads, task % p_.heads);
      }
    });
  }

 private:
  // What all key blocks of one (b, h) share: queries and output gradients in both layouts, and two numbers per query.
  struct Shared {
    A *query, *query_t, *dout, *dout_t, *dquery, *lse, *delta;
  };

  void head(Buffer<A>& m, int64_t b, int64_t h) const {
    const int64_t n = padded_ * ld_;
    const Shared s{m.take(n), m.take(n), m.take(n), m.take(n), m.take(n), m.take(padded_), m.take(padded_)};
    prepare(s, b, h);
    A *const key = m.take(kBlock * ld_), *const value = m.take(kBlock * ld_), *const dkey = m.take(kBlock * ld_),
             *const dvalue = m.take(kBlock * ld_);
    A* const tiles = m.take(4 * kBlock * kBlock);
    for (int64_t key0 = 0; key0 < p_.tk; key0 += kBlock) {
      const int64_t keys = std::min(kBlock, p_.tk - key0);
      cpu::load_tile<A, T>(key, kBlock, ld_, rows_of<const T>(k_, b, h, key0), keys, p_.d, A(1));
      cpu::load_tile<A, T>(value, kBlock, ld_, rows_of<const T>(v_, b, h, key0), keys, p_.d, A(1));
      std::fill(dkey, dkey + kBlock * ld_, A(0));
      std::fill(dvalue, dvalue + kBlock * ld_, A(0));
      for (int64_t query0 = 0; query0 < p_.tq; query0 += kBlock)
        if (cpu::keys_seen(p_, query0, kBlock) > key0) pair(s, key, value, dkey, dvalue, tiles, {b, h, key0, query0});
      cpu::store_head<T>(grads_.dk, {b, h, key0}, dkey, ld_, keys);
      cpu::store_head<T>(grads_.dv, {b, h, key0}, dvalue, ld_, keys);
    }
    const A scale = static_cast<A>(p_.scale);
    cpu::load_tile<A, A>(s.dquery, p_.tq, ld_, {s.dquery, ld_}, p_.tq, ld_, scale);
    cpu::store_head<T>(grads_.dq, {b, h, 0}, s.dquery, ld_, p_.tq);
  }

  void prepare(const Shared& s, int64_t b, int64_t h) const {
    cpu::load_tile<A, T>(s.query, padded_, ld_, rows_of<const T>(q_, b, h, 0), p_.tq, p_.d, static_cast<A>(p_.scale));
    cpu::load_tile<A, T>(s.dout, padded_, ld_, rows_of<const T>(dout_, b, h, 0), p_.tq, p_.d, A(1));
    std::fill(s.dquery, s.dquery + padded_ * ld_, A(0));
    for (int64_t i = 0; i < padded_; i += kBlock) {
      cpu::transpose_tile(s.query_t + i * ld_, s.query + i * ld_, kBlock, ld_, p_.d);
      cpu::transpose_tile(s.dout_t + i * ld_, s.dout + i * ld_, kBlock, ld_, p_.d);
    }
    const A* const lse = forward_.lse.template data<A>() + (b * p_.heads + h) * p_.tq;
    cpu::output_dots(s.delta, rows_of<const T>(dout_, b, h, 0), rows_of<const T>(forward_.out, b, h, 0), p_.tq, p_.d);
    for (int64_t i = 0; i < padded_; ++i) {
      s.lse[i] = i < p_.tq ? lse[i] : std::numeric_limits<A>::infinity();  // padding gets probability 0
      if (i >= p_.tq) s.delta[i] = 0;
    }
  }

  struct At {
    int64_t b, h, key0, query0;
  };

  void pair(const Shared& s, const A* key, const A* value, A* dkey, A* dvalue, A* tiles, const At& at) const {
    constexpr int64_t n = kBlock * kBlock;
    A *const p = tiles, *const dp = tiles + n, *const keep = tiles + 2 * n, *const kept = tiles + 3 * n;
    const int64_t from = at.query0 * ld_;
    cpu::tile_gemm<A>(kBlock, kBlock, p_.d, {key, ld_, 1}, s.query_t + from, kBlock, p, kBlock, false);
    cpu::mask_tile(p, kBlock, cpu::mask_at(p_, at.key0, at.query0));
    cpu::probability_tile(p, kBlock, s.lse + at.query0);
    cpu::tile_gemm<A>(kBlock, kBlock, p_.d, {value, ld_, 1}, s.dout_t + from, kBlock, dp, kBlock, false);
    const A* weight = p;  // what multiplied the values
    if (p_.options.dropout > 0) {
      cpu::dropout_tile(keep, kBlock, p_, at.b, at.h, at.key0, at.query0);
      cpu::multiply_tile(dp, dp, keep, n);
      cpu::multiply_tile(kept, p, keep, n);
      weight = kept;
    }
    if constexpr (!std::is_same_v<T, A>) {
      if (weight == p) std::copy(p, p + n, kept);
      cpu::round_tile<T>(kept, n);
      weight = kept;
    }
    cpu::tile_gemm<A>(kBlock, ld_, kBlock, {weight, kBlock, 1}, s.dout + from, ld_, dvalue, ld_, true);
    cpu::score_gradient_tile(dp, p, kBlock, s.delta + at.query0);
    cpu::round_tile<T>(dp, n);
    cpu::tile_gemm<A>(kBlock, ld_, kBlock, {dp, kBlock, 1}, s.query + from, ld_, dkey, ld_, true);
    cpu::tile_gemm<A>(kBlock, ld_, kBlock, {dp, 1, kBlock}, key, ld_, s.dquery + from, ld_, true);
  }

  const Problem& p_;
  const Tensor &dout_, &q_, &k_, &v_;
  const Attended& forward_;
  Gradients grads_;
  const int64_t ld_, padded_;
};

}  // namespace

Attended attention(const Tensor& q, const Tensor& k, const Tensor& v, const AttentionOptions& options) {
  const Problem p = check(q, k, v, options);
  Attended result{q.make(q.shape()), q.make({p.batch, p.heads, p.tq}, wide_of(q))};
  attention_into(q, k, v, options, result);
  return result;
}

void attention_into(const Tensor& q, const Tensor& k, const Tensor& v, const AttentionOptions& options,
                    const Attended& result) {
  const Problem p = check(q, k, v, options);
  check_result("out", result.out, q);
  check_lse(p, result.lse, q);
  const auto on_cpu = [&] {
    if (cpu::amx_takes_attention(p, q.dtype())) return cpu::amx_attention(p, q, k, v, result);
    with_floating(q.dtype(), "attention", [&](auto t) { Forward<decltype(t)>(p, q, k, v, result).run(); });
  };
  on_device(q.device(), on_cpu, [&] { cuda::attention(q, k, v, complete(p), result); });
}

void attention_backward(const Tensor& dout_any, const Tensor& q, const Tensor& k, const Tensor& v,
                        const Attended& forward, const AttentionOptions& options, Tensor& dq, Tensor& dk, Tensor& dv) {
  const Problem p = check(q, k, v, options);
  const Tensor dout = dout_any.strides()[3] == 1 ? dout_any : dout_any.contiguous();
  check_result("dq", dq, q);
  check_result("dk", dk, k);
  check_result("dv", dv, v);
  check_lse(p, forward.lse, q);
  const auto on_cpu = [&] {
    if (cpu::amx_takes_attention(p, q.dtype()))
      return cpu::amx_attention_backward(p, dout, q, k, v, forward, {dq, dk, dv});
    with_floating(q.dtype(), "attention_backward", [&](auto t) {
      Backward<decltype(t)>(p, dout, q, k, v, forward, {dq, dk, dv}).run();
    });
  };
  const auto on_gpu = [&] { cuda::attention_backward(dout, q, k, v, forward, complete(p), {dq, dk, dv}); };
  on_device(q.device(), on_cpu, on_gpu);
}

}  // namespace tessera
