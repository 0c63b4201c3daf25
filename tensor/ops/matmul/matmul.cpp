// Matmuls: argument checks, shapes, and on the CPU the choice of an implementation.
#include "tensor/ops/matmul/matmul.h"

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "tensor/cpu/loops.h"
#include "tensor/ops/elementwise.h"
#include "tensor/ops/matmul/cpu/gemm.h"
#include "tensor/ops/matmul/cpu/leaf_gemm.h"

namespace tessera {
namespace {

// Fewer rows do not amortize packing a weight.
constexpr int64_t kPackFromRows = 32;

bool has_unit_stride(const Tensor& t) {
  return t.strides()[0] == 1 || t.strides()[1] == 1 || t.dim(0) == 1 || t.dim(1) == 1;
}
Tensor with_unit_stride(const Tensor& t) { return has_unit_stride(t) ? t : t.contiguous(); }
// cuBLASLt selects algorithms by layout; contiguous operands make results independent of strides.
Tensor packed_on_gpu(const Tensor& t) { return t.device() == Device::cuda ? t.contiguous() : t; }

void matmul_on_cpu(Tensor& out, const Tensor& a_any, const Tensor& b_any, const Tensor& bias, cpu::Packed* packed) {
  if (out.numel() == 0 || dry_run_on_gpu(out)) return;
  if (a_any.dtype() == DType::float64) {
    const auto strided = [](const Tensor& t) {
      return cpu::Strided<double>{t.data<double>(), t.strides()[0], t.strides()[1]};
    };
    cpu::gemm<double>(a_any.dim(0), b_any.dim(1), a_any.dim(1), strided(a_any), strided(b_any), out.data<double>(),
                      out.strides()[0]);
    if (bias.defined()) add_(out, bias);
    return;
  }
  if (a_any.dtype() != DType::float32 && a_any.dtype() != DType::bfloat16)
    throw Error("[matmul] dtype is " + std::string(to_string(a_any.dtype())) + "; expected a floating-point dtype");
  const Tensor a = with_unit_stride(a_any), b = with_unit_stride(b_any);
  if (cpu::few_rows_supports(a, b)) return cpu::few_rows_matmul(out, a, b, bias);
  if (cpu::amx_supports(a, b)) return cpu::amx_matmul(out, a, b, bias, packed);
  if (packed)
    cpu::dnnl_matmul(out, a, b, bias, *packed);
  else
    cpu::dnnl_matmul(out, a, b, bias);
}

// In leaves; the bias is added to the rounded sum.
void matmul_by(const LeafOrder& order, Tensor& out, const Tensor& a, const Tensor& b, const Tensor& bias) {
  if (out.numel() == 0 || cpu::DryRun::here()) return;
  cpu::leaf_matmul(out, a, b, order);
  if (bias.defined()) add_(out, bias);
}
// Leaves of a dim of this rank's shard of a weight.
int64_t leaves_of_shard(int64_t ranks) {
  if (ranks < 1 || kLeaves % ranks != 0)
    throw Error("[matmul] a dim sharded over " + std::to_string(ranks) + " ranks has no equal shares of " +
                std::to_string(kLeaves) + " leaves");
  return kLeaves / ranks;
}
LeafOrder input_leaves(int64_t inputs, const PackedWeights* packs) {
  return channel_leaves(inputs, leaves_of_shard(packs ? packs->shards.inputs : 1));
}
LeafOrder output_leaves(int64_t outputs, const PackedWeights* packs) {
  if (!packs) return channel_leaves(outputs, kLeaves);
  std::vector<int64_t> here = packs->shards.segments;
  for (int64_t& segment : here) segment /= packs->shards.outputs;
  return channel_leaves(outputs, leaves_of_shard(packs->shards.outputs), here);
}

// Dtype of a result that other ranks' partial sums are added to.
DType partial_dtype(const Tensor& x, int64_t ranks) {
  return ranks > 1 && adds_by_leaves(x) ? accum_dtype(x.dtype()) : x.dtype();
}

// 2-D operands. `packed`, if not null, belongs to b.
void matmul_2d(Tensor& out, const Tensor& a, const Tensor& b, const Tensor& bias, cpu::Packed* packed) {
  on_device(
      out.device(), [&] { matmul_on_cpu(out, a, b, bias, packed); }, [&] { cuda::matmul(out, a, b, bias); });
}

Tensor stacked(const Tensor& t) { return t.contiguous().reshape({-1, t.dim(-2), t.dim(-1)}); }  // as (L, M, N)

void batched_matmul(const Tensor& outs, const Tensor& as, const Tensor& bs) {
  const auto on_cpu = [&] {
    for (int64_t i = 0; i < outs.dim(0); ++i) {
      Tensor one = outs.select(0, i);
      matmul_into(one, as.select(0, i), bs.select(0, i));
    }
  };
  on_device(outs.device(), on_cpu, [&] { cuda::matmul(outs, as, bs, {}); });
}

void check_matmul(const char* op, const Tensor& a, const Tensor& b) {
  if (a.dtype() != b.dtype())
    throw Error(std::string("[") + op + "] dtypes differ: " + a.describe() + " x " + b.describe());
  if (a.dim(-1) != b.dim(-2))
    throw Error(std::string("[") + op + "] inner dims differ: a " + a.shape().str() + " x b " + b.shape().str() +
                "; b must have " + std::to_string(a.dim(-1)) + " rows");
}

// Null if packing is not profitable. oneDNN's layout may depend on the rows of a.
cpu::Packed* pack_for(PackedWeights* packs, const Tensor& a, const Tensor& b, bool transposed) {
  if (!packs || !packs->caches || a.device() == Device::cuda || a.dim(0) < kPackFromRows || a.dtype() == DType::float64)
    return nullptr;
  const int64_t rows = cpu::amx_supports(a, b) ? 0 : a.dim(0);
  for (cpu::Packed& p : packs->packs)
    if (p.rows == rows && p.transposed == transposed) return &p;
  // Two row counts (training and evaluation) times two directions; beyond that, evict the oldest.
  if (packs->packs.size() == 4) packs->packs.erase(packs->packs.begin());
  packs->packs.reserve(4);
  cpu::Packed& p = packs->packs.emplace_back();
  p.rows = rows;
  p.transposed = transposed;
  return &p;
}

// Whether a temporary packed copy of the weight speeds up input gradients: measured with AVX-512 without AMX, in
// float32, from kFromRows on. Copies of larger weights would raise peak memory.
bool packs_temporarily(const Tensor& dy, const Tensor& w) {
  constexpr int64_t kFromRows = 1024, kMaxBytes = int64_t{16} << 20;
  return dy.device() == Device::cpu && dy.dtype() == DType::float32 && dy.dim(0) >= kFromRows &&
         w.nbytes() <= kMaxBytes && cpu::has_bfloat16_matmul() && !cpu::packing_is_profitable();
}

}  // namespace

void matmul_into(Tensor& out, const Tensor& a, const Tensor& b) {
  check_matmul("matmul", a, b);
  if (!(out.shape() == Shape{a.dim(0), b.dim(1)}))
    throw Error("[matmul] out is " + out.describe() + "; expected shape (" + std::to_string(a.dim(0)) + ", " +
                std::to_string(b.dim(1)) + ")");
  if (adds_by_leaves(out)) return matmul_by(input_leaves(a.dim(1), nullptr), out, a, b, {});
  matmul_2d(out, a, b, {}, nullptr);
}

Tensor matmul(const Tensor& a, const Tensor& b) {
  if (a.ndim() < 2 || b.ndim() < 2)
    throw Error("[matmul] operands must have 2 dims or more: a " + a.shape().str() + " x b " + b.shape().str());
  check_matmul("matmul", a, b);
  if (b.ndim() == 2) {
    const Tensor rows = a.ndim() == 2 ? packed_on_gpu(a) : a.contiguous().flat_rows();
    Tensor out = a.make({rows.dim(0), b.dim(1)});
    matmul_into(out, rows, packed_on_gpu(b));
    return out.reshape(a.shape().with_last(b.dim(1)));
  }
  const Shape lead = a.shape().first(a.ndim() - 2);
  if (!(lead == b.shape().first(b.ndim() - 2)))
    throw Error("[matmul] leading dims differ: a " + a.shape().str() + " x b " + b.shape().str());
  Tensor out = a.make(a.shape().with_last(b.dim(-1)));
  batched_matmul(stacked(out), stacked(a), stacked(b));
  return out;
}

void linear_into(Tensor& y, const Tensor& x, const Tensor& w, const Tensor& b, PackedWeights* packs) {
  const Tensor wt = packed_on_gpu(w).transpose(0, 1);
  check_matmul("linear", x, wt);
  if (b.defined()) b.check_size(w.dim(0));
  y.check_size(x.dim(0) * w.dim(0));
  if (adds_by_leaves(y)) return matmul_by(input_leaves(x.dim(1), packs), y, x, wt, b);
  matmul_2d(y, packed_on_gpu(x), wt, b.defined() ? b.contiguous() : b, pack_for(packs, x, wt, true));
}

Tensor linear(const Tensor& x, const Tensor& w, const Tensor& b, PackedWeights* packs) {
  if (w.ndim() != 2 || x.ndim() < 1 || x.dim(-1) != w.dim(1))
    throw Error("[linear] x " + x.shape().str() + " does not match weight " + w.shape().str() + "; x must end in " +
                (w.ndim() == 2 ? std::to_string(w.dim(1)) : "K"));
  const Tensor rows = x.contiguous().flat_rows();
  Tensor y = x.make({rows.dim(0), w.dim(0)}, partial_dtype(x, packs ? packs->shards.inputs : 1));
  linear_into(y, rows, w, b, packs);
  return y.reshape(x.shape().with_last(w.dim(0)));
}

void linear_input_grad_into(Tensor& dx, const Tensor& dy, const Tensor& w, PackedWeights* packs) {
  check_matmul("linear_input_grad", dy, w);
  dx.check_size(dy.dim(0) * w.dim(1));
  if (adds_by_leaves(dx)) return matmul_by(output_leaves(w.dim(0), packs), dx, dy, w, {});
  cpu::Packed once;
  cpu::Packed* const pack = pack_for(packs, dy, w, false);
  matmul_2d(dx, packed_on_gpu(dy), packed_on_gpu(w), {}, pack || !packs_temporarily(dy, w) ? pack : &once);
}

Tensor linear_input_grad(const Tensor& dy, const Tensor& w, PackedWeights* packs) {
  const Tensor rows = dy.contiguous().flat_rows();
  check_matmul("linear_input_grad", rows, w);
  Tensor dx = dy.make({rows.dim(0), w.dim(1)}, partial_dtype(dy, packs ? packs->shards.outputs : 1));
  linear_input_grad_into(dx, rows, w, packs);
  return dx.reshape(dy.shape().with_last(w.dim(1)));
}

void linear_weight_grad(Tensor& dw, const Tensor& dy, const Tensor& x) {
  if (adds_by_leaves(dw)) {
    const int64_t tokens = dy.ndim() > 1 ? dy.dim(-2) : 1;
    const Tensor rows = dy.contiguous().flat_rows(), in = x.contiguous().flat_rows();
    check_matmul("linear_weight_grad", rows.transpose(0, 1), in);
    dw.check_size(rows.dim(1) * in.dim(1));
    return matmul_by(token_leaves(rows.dim(0) / std::max<int64_t>(tokens, 1), tokens, kLeaves), dw,
                     rows.transpose(0, 1), in, {});
  }
  const Tensor dyt = dy.contiguous().flat_rows().transpose(0, 1), rows = x.contiguous().flat_rows();
  matmul_into(dw, dyt, rows);
}

}  // namespace tessera
