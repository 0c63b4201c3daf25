// Ring attention and Ulysses on ranks that share a GPU, beside one rank in float64 on the CPU: with our own kernels,
// whose parts are not rounded, and with parts of bfloat16, which are those of cuDNN's kernels.

#include "autograd/ops.h"
#include "parallel/comm/launch.h"
#include "parallel/context_parallel.h"
#include "tensor/kernels.h"
#include "tests/support/gpu.h"

namespace tessera {
namespace {

using ContextParallelGpu = test::OnGpu;

constexpr int64_t kBatch = 2, kHead = 64;

struct Problem {
  int64_t tokens = 0;
  Heads heads;
  ContextMode mode = ContextMode::ring;
  AttentionKernels kernels = AttentionKernels::own;
  AttentionOptions options = {};
};

Tensor normal(const Shape& shape, uint64_t name) {
  const Tensor t = Tensor::empty(shape, DType::float64, make_arena());
  const Philox random = Philox::named(name, "context on a GPU");
  for (int64_t i = 0; i < t.numel(); ++i) t.data<double>()[i] = random.normal(static_cast<uint64_t>(i));
  return t.to(DType::bfloat16);
}
Tensor whole_qkv(const Problem& p) { return normal({kBatch, p.tokens, p.heads.packed() * kHead}, 1); }
Tensor whole_seed(const Problem& p) { return normal({kBatch, p.tokens, p.heads.query * kHead}, 2); }

// The tokens at these positions of (B, T, C), in float64.
Tensor tokens_at(const Tensor& x, const std::vector<int64_t>& positions) {
  const Tensor y = x.make({x.dim(0), static_cast<int64_t>(positions.size()), x.dim(2)});
  for (size_t i = 0; i < positions.size(); ++i)
    y.narrow(1, static_cast<int64_t>(i), 1).copy_from(x.narrow(1, positions[i], 1));
  return y;
}

struct Result {
  Tensor out, gradient;
};

Result alone(const Problem& p, const ArenaPtr& arena, DType dtype) {
  const Var qkv(whole_qkv(p).to(arena).to(dtype), true);
  const Var y = packed_attention(qkv, p.heads, p.options);
  backward(y, {.seed = whole_seed(p).to(arena).to(dtype)});
  return {y.value().on_host().to(DType::float64), qkv.grad().on_host().to(DType::float64)};
}

Result together(const Problem& p, Communicator& cp, const ArenaPtr& arena) {
  const std::vector<int64_t> mine = context_positions(p.tokens, cp.size(), cp.rank(), balance_of(p.mode));
  const Var qkv(tokens_at(whole_qkv(p), mine).to(arena), true);
  const Var y = p.mode == ContextMode::ring ? ring_attention(qkv, p.heads, p.options, cp)
                                            : ulysses_attention(qkv, p.heads, p.options, cp);
  backward(y, {.seed = tokens_at(whole_seed(p), mine).to(arena)});
  return {y.value().on_host().to(DType::float64), qkv.grad().on_host().to(DType::float64)};
}

double squared_error(const Tensor& x, const Tensor& exact) {
  EXPECT_EQ(x.shape(), exact.shape());
  const std::vector<double> a = x.to_vector<double>(), b = exact.to_vector<double>();
  double sum = 0;
  for (size_t i = 0; i < a.size(); ++i) sum += (a[i] - b[i]) * (a[i] - b[i]);
  return sum;
}

// The squared errors of all ranks, as shares of those of one rank's bfloat16, are at most `bound`.
void expect_error(const Problem& p, int ranks, double bound) {
  launch({.ranks = ranks, .threads_per_rank = 1, .timeout_s = 300}, [&](Communicator& cp) {
    const ArenaPtr gpu = make_arena(Device::cuda);
    gpu->local<KernelChoice>().attention = p.kernels;
    const std::vector<int64_t> mine = context_positions(p.tokens, cp.size(), cp.rank(), balance_of(p.mode));
    const Result exact = alone(p, make_arena(), DType::float64), one = alone(p, gpu, DType::bfloat16),
                 got = together(p, cp, gpu);
    const auto share = [&](const Tensor& x, const Tensor& whole, const Tensor& of_one) {
      return cp.sum(squared_error(x, tokens_at(whole, mine))) / squared_error(of_one, whole);
    };
    const std::string what = std::to_string(ranks) + " ranks, " + std::to_string(p.heads.key) + " heads of keys";
    EXPECT_LE(share(got.out, exact.out, one.out), bound) << what;
    EXPECT_LE(share(got.gradient, exact.gradient, one.gradient), bound) << what;
    EXPECT_EQ(gpu->local<KernelLog>().forward.plain, 0);
    cp.barrier();
  });
}

TEST_F(ContextParallelGpu, ARingOfOurKernelsIsRoundedOnce) {
  for (const int ranks : {2, 3})
    for (const Heads& heads : {Heads{2}, Heads{2, 1}}) {
      expect_error({.tokens = 64 * ranks, .heads = heads}, ranks, 1.05);
      expect_error({.tokens = 20 * ranks, .heads = heads, .options = {.causal = false}}, ranks, 1.05);
    }
}

// Our kernels write here as cuDNN's do: every part is rounded to bfloat16.
TEST_F(ContextParallelGpu, ARingOfRoundedPartsIsRoundedTwice) {
  for (const int ranks : {2, 3})
    for (const Heads& heads : {Heads{2}, Heads{2, 1}}) {
      const Problem p{.tokens = 64 * ranks, .heads = heads, .kernels = AttentionKernels::automatic};
      expect_error(p, ranks, 2.2);
    }
}

TEST_F(ContextParallelGpu, UlyssesIsOneRanksAttention) {
  expect_error({.tokens = 64, .heads = {4, 2}, .mode = ContextMode::ulysses}, 2, 1.05);
  expect_error({.tokens = 96, .heads = {3}, .mode = ContextMode::ulysses}, 3, 1.05);
}

// Two calls on two ranks, where pairs of chunks take five; dropout counts positions, which pairs have.
TEST_F(ContextParallelGpu, ARingCallsAttentionOncePerHop) {
  for (const double dropout : {0.0, 0.5})
    launch({.ranks = 2, .threads_per_rank = 1, .timeout_s = 300}, [&](Communicator& cp) {
      const ArenaPtr gpu = make_arena(Device::cuda);
      const Problem p{.tokens = 64, .heads = {1}, .options = {.dropout = dropout, .random = Philox(3)}};
      together(p, cp, gpu);
      const KernelLog& log = gpu->local<KernelLog>();
      EXPECT_EQ(log.forward.tensor_cores, dropout == 0 ? 2 : 5);
      EXPECT_EQ(log.backward.tensor_cores, dropout == 0 ? 2 : 5);
      cp.barrier();
    });
}

}  // namespace
}  // namespace tessera
