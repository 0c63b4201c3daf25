// Attention: argument checks and device dispatch.
#include "tensor/ops/attention/attention.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <string>

#include "tensor/cpu/loops.h"
#include "tensor/kernels.h"

namespace tessera {
namespace {

void check_starts(const AttentionProblem& p) {
  const Tensor& starts = p.options.starts;
  if (!starts.defined() || (starts.shape() == Shape{p.batch, p.tq} && starts.dtype() == DType::int32 &&
                            starts.device() == p.q.device() && (p.tq == 1 || starts.strides()[1] == 1)))
    return;
  throw Error("[attention] starts is " + starts.describe() + "; expected int32 (B, Tq) with contiguous rows, for q " +
              p.q.describe());
}

AttentionProblem check(const Tensor& q, const Tensor& k, const Tensor& v, const AttentionOptions& options) {
  if (q.ndim() != 4 || !(k.shape() == v.shape()) || k.ndim() != 4 || q.dim(0) != k.dim(0) || k.dim(2) < 1 ||
      q.dim(2) % k.dim(2) != 0 || q.dim(3) != k.dim(3))
    throw Error("[attention] q " + q.shape().str() + ", k " + k.shape().str() + ", v " + v.shape().str() +
                "; expected (B, Tq, H, D), (B, Tk, K, D), (B, Tk, K, D), where K divides H");
  if (options.causal && q.dim(1) > k.dim(1))
    throw Error("[attention] " + std::to_string(q.dim(1)) + " queries, but only " + std::to_string(k.dim(1)) + " keys");
  if (q.dtype() != k.dtype() || q.dtype() != v.dtype())
    throw Error("[attention] dtypes differ: q " + q.describe() + ", k " + k.describe() + ", v " + v.describe());
  for (const Tensor* t : {&q, &k, &v})
    if (t->strides()[3] != 1 && t->dim(3) != 1)
      throw Error("[attention] expected a contiguous last dim; strides are " + t->strides().str());
  if (options.window < 0) reject("attention", "a `window` of at least 0", std::to_string(options.window));
  AttentionProblem p{q, k, v, options};
  if (p.options.scale == 0) p.options.scale = 1 / std::sqrt(static_cast<double>(p.d));
  if (p.options.heads_total == 0) p.options.heads_total = p.heads;
  if (p.options.tokens_total == 0) p.options.tokens_total = p.tk;
  if (p.options.first_query < 0) p.options.first_query = std::max<int64_t>(p.options.first_key + p.offset(), 0);
  const int64_t end = std::max(p.options.first_query + p.tq, p.options.first_key + p.tk);
  if (p.options.dropout > 0 && end > p.options.tokens_total)
    throw Error("[attention] the tile extends to token " + std::to_string(end - 1) + " of " +
                std::to_string(p.options.tokens_total) + "; set tokens_total to the number of tokens");
  check_starts(p);
  return p;
}

// A result must have the shape of the operand `like` and its dtype or accumulation dtype.
void check_result(const char* name, const Tensor& t, const Tensor& like) {
  if (t.shape() == like.shape() && (t.dtype() == like.dtype() || t.dtype() == accum_dtype(like.dtype())) &&
      (t.strides()[3] == 1 || t.dim(3) == 1))
    return;
  throw Error(std::string("[attention] ") + name + " is " + t.describe() + "; expected " + like.describe() +
              ", or its accumulation dtype, with a contiguous last dim");
}

void check_lse(const AttentionProblem& p, const Tensor& lse) {
  if (!(lse.shape() == Shape{p.batch, p.heads, p.tq}) || lse.dtype() != accum_dtype(p.q.dtype()) ||
      !lse.is_contiguous())
    throw Error("[attention] lse is " + lse.describe() + "; expected contiguous (B, H, Tq) for q " + p.q.describe());
}

}  // namespace

QueryStarts query_starts(const AttentionProblem& p) {
  const AttentionOptions& o = p.options;
  QueryStarts out{.first = o.starts.data_on<int32_t>(p.q.device()),
                  .row = o.starts.defined() ? o.starts.strides()[0] : 0,
                  .offset = static_cast<int>(o.first_key),
                  .queries = static_cast<int>(p.tq)};
  const int64_t begin = o.first_query - o.first_key - o.window + 1;
  if (o.window > 0) out.begin = static_cast<int>(std::max<int64_t>(begin, QueryStarts::kNone));
  return out;
}

AttentionDropout attention_dropout(const AttentionOptions& o) {
  return {.random = o.random,
          .step = o.step,
          .step_on_gpu = o.step_on_gpu,
          .tokens = static_cast<uint64_t>(o.tokens_total),
          .first_plane = static_cast<uint64_t>(o.first_sequence * o.heads_total + o.first_head),
          .heads_total = static_cast<uint64_t>(o.heads_total),
          .first_query = static_cast<uint64_t>(o.first_query),
          .first_key = static_cast<uint64_t>(o.first_key),
          .probability = static_cast<float>(o.dropout),
          .up = 1 / (1 - o.dropout),
          .any = o.dropout > 0};
}

Tensor packed_slice(const Tensor& packed, const Heads& heads, int i) {
  const int64_t d = packed.ndim() == 3 && heads.packed() > 0 ? packed.dim(2) / heads.packed() : 0;
  if (heads.query < 1 || heads.key < 1 || d < 1 || d * heads.packed() != packed.dim(2))
    throw Error("[attention] packed qkv is " + packed.describe() + "; expected (B, T, (H + 2 K) D) with " +
                std::to_string(heads.query) + " query heads and " + std::to_string(heads.key) + " key-value heads");
  const Shape by_head{packed.dim(0), packed.dim(1), heads.count(i), d};
  return packed.narrow(2, heads.begin(i) * d, heads.count(i) * d).reshape(by_head);
}

AttentionResult attention(const Tensor& q, const Tensor& k, const Tensor& v, const AttentionOptions& options) {
  const AttentionProblem p = check(q, k, v, options);
  AttentionResult result{q.make(q.shape()), q.make({p.batch, p.heads, p.tq}, accum_dtype(q.dtype()))};
  attention_into(q, k, v, options, result);
  return result;
}

void attention_into(const Tensor& q, const Tensor& k, const Tensor& v, const AttentionOptions& options,
                    const AttentionResult& result) {
  const AttentionProblem p = check(q, k, v, options);
  check_result("out", result.out, q);
  check_lse(p, result.lse);
  if (dry_run_on_gpu(q)) return;
  on_device(
      q.device(), [&] { cpu::attention(p, result); }, [&] { cuda::attention(p, result); });
}

void attention_backward(const Tensor& dout_any, const Tensor& q, const Tensor& k, const Tensor& v,
                        const AttentionResult& forward, const AttentionOptions& options, Tensor& dq, Tensor& dk,
                        Tensor& dv) {
  const AttentionProblem p = check(q, k, v, options);
  const Tensor dout = dout_any.strides()[3] == 1 ? dout_any : dout_any.contiguous();
  check_result("dq", dq, q);
  check_result("dk", dk, k);
  check_result("dv", dv, v);
  check_lse(p, forward.lse);
  if (dry_run_on_gpu(q)) return;
  const AttentionGradients gradients{dq, dk, dv};
  on_device(
      q.device(), [&] { cpu::attention_backward(p, dout, forward, gradients); },
      [&] { cuda::attention_backward(p, dout, forward, gradients); });
}

bool asks_cudnn(const Tensor& q, const AttentionOptions& options) {
  return q.device() == Device::cuda && q.dtype() == DType::bfloat16 && options.dropout == 0 &&
         (!options.starts.defined() || options.starts_may_be_ignored) && options.window == 0 &&
         q.arena()->local<KernelChoice>().attention != AttentionKernels::own;
}

DType partial_dtype(const Tensor& q, const AttentionOptions& options) {
  return asks_cudnn(q, options) ? q.dtype() : accum_dtype(q.dtype());
}

void merge_attention(const AttentionResult& into, const AttentionResult& tile) {
  const DType wide = into.lse.dtype();
  const auto runs_on = [](const Tensor& t) { return t.dim(-1) == 1 || t.strides()[t.ndim() - 1] == 1; };
  if (!(into.out.shape() == tile.out.shape()) || !(into.lse.shape() == tile.lse.shape()) ||
      accum_dtype(into.out.dtype()) != wide || accum_dtype(tile.out.dtype()) != wide || tile.lse.dtype() != wide ||
      !runs_on(into.out) || !runs_on(tile.out) || !runs_on(into.lse) || !tile.lse.is_contiguous())
    throw Error("[merge_attention] into is " + into.out.describe() + " with lse " + into.lse.describe() + ", tile " +
                tile.out.describe() + " with lse " + tile.lse.describe() +
                "; expected equal shapes, contiguous rows, one accumulation dtype, and a contiguous lse in the tile");
  on_device(
      into.out.device(), [&] { cpu::merge_attention(into, tile); }, [&] { cuda::merge_attention(into, tile); });
}

}  // namespace tessera
