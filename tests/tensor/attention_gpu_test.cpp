// GPU attention compared with the CPU: plain kernels, tensor cores, and cuDNN, whose support checks need no GPU and
// whose results are also compared with Tessera's kernels.
#include <dlfcn.h>
#include <fmt/format.h>

#include <array>
#include <cstdint>
#include <functional>
#include <map>
#include <string>

#include "tensor/ops/attention/cuda/cudnn_attention.h"
#include "tensor/ops/elementwise.h"
#include "tests/support/errors.h"
#include "tests/support/gpu.h"
#include "tests/support/tensors.h"

namespace tessera {
namespace {

using namespace test;

using AttentionGpu = test::OnGpu;

double error_bound(DType dtype) { return dtype == DType::float64 ? 1e-13 : dtype == DType::float32 ? 1e-5 : 0x1p-7; }

std::string kernels(const Tensor& q, const Tensor& k, const Tensor& v) {
  if constexpr (kWithCuda)
    return cuda::attention_kernels(q, k, v);
  else
    return "";
}

Tensor normal(const Shape& shape, DType dtype, uint64_t name) {
  return test::normal(shape, dtype, name, "attention on a GPU");
}

// Queries, keys and values as slices of one packed tensor (B, Tk, H + 2 K, D); the queries are the last Tq.
struct Operands {
  Tensor packed, dout;
  int64_t tq;
  Heads heads;
  Tensor part(int which) const {
    const Tensor full = packed.narrow(2, heads.begin(which), heads.count(which));
    return which == 0 ? full.narrow(1, full.dim(1) - tq, tq) : full;
  }
  Operands to(const ArenaPtr& arena) const { return {packed.to(arena), dout.to(arena), tq, heads}; }
};

Operands operands(int64_t batch, int64_t tq, int64_t tk, const Heads& heads, int64_t d, DType dtype, uint64_t name) {
  return {normal({batch, tk, heads.packed(), d}, dtype, name), normal({batch, tq, heads.query, d}, dtype, name + 1), tq,
          heads};
}

struct Results {
  AttentionResult forward;
  Tensor gradients;  // packed as well
  Operands parts;    // views of the gradients of q, k and v
};

bool bitwise_equal(const Results& a, const Results& b) {
  return test::bitwise_equal({a.forward.out, a.gradients}, {b.forward.out, b.gradients});
}

Results run(const Operands& x, const AttentionOptions& given, bool wide = false) {
  AttentionOptions options = given;
  if (given.starts.defined()) options.starts = given.starts.to(x.packed.arena());
  const DType dtype = wide ? accum_dtype(x.packed.dtype()) : x.packed.dtype();
  const Tensor q = x.part(0), k = x.part(1), v = x.part(2);
  Results r{attention(q, k, v, options), x.packed.make(x.packed.shape(), dtype), {}};
  r.gradients.fill(0);
  r.parts = {r.gradients, {}, x.tq, x.heads};
  Tensor dq = r.parts.part(0), dk = r.parts.part(1), dv = r.parts.part(2);
  attention_backward(x.dout, q, k, v, r.forward, options, dq, dk, dv);
  if (wide) {
    const AttentionResult summed{q.make(q.shape(), dtype), r.forward.lse.clone()};
    attention_into(q, k, v, options, summed);
    r.forward.out = summed.out;
  }
  return r;
}

struct Case {
  DType dtype;
  int64_t d, pad = 0;  // padding elements per token, which shift the rows' alignment
};

// Document starts that increase as in a ring attention tile whose queries are later than its keys (some queries then
// have no keys), or random ones.
void random_starts(const Philox& random, int64_t b, int64_t tq, int64_t tk, AttentionOptions& o) {
  o.starts = Tensor::empty({b, tq}, DType::int32, make_arena());
  o.first_key = 2;
  o.tokens_total += 2;
  const bool any = random.below(3, 0, 50) == 0;
  int64_t start = 0;
  for (int64_t i = 0; i < b * tq; ++i) {
    const int64_t own = tk - tq + i % tq;  // the key of the query's own token
    if (i % tq == 0) start = 0;
    if (any) start = static_cast<int64_t>(random.below(static_cast<uint64_t>(tk) + 3, static_cast<uint64_t>(i), 51));
    if (!any && random.below(30, static_cast<uint64_t>(i), 52) == 0) start = own + (o.causal ? 0 : tk / 3);
    o.starts.data<int32_t>()[i] = static_cast<int32_t>(o.first_key + start);
  }
}

void check(const Case& c, uint64_t trial, const ArenaPtr& arena, const std::string& expected_kernels) {
  const Philox random = Philox::named(trial, "shapes");
  const auto below = [&](uint64_t n, uint64_t i) { return static_cast<int64_t>(random.below(n, i)); };
  constexpr std::array<int64_t, 8> kTokens{1, 5, 31, 64, 65, 128, 150, 200};
  const Heads heads{(1 + below(2, 1)) * (1 + below(3, 13)), 1 + below(2, 1)};
  const int64_t b = 1 + below(2, 0), tk = kTokens[static_cast<size_t>(below(8, 2))];
  const int64_t tq = below(2, 3) ? tk : 1 + below(static_cast<uint64_t>(tk), 4);
  AttentionOptions o;
  o.causal = below(3, 5) != 0;
  o.dropout = below(3, 6) == 0 ? 0.3 : 0;
  o.random = Philox(trial);
  o.step = trial;
  o.scale = below(4, 12) == 0 ? 0.3 : 0;
  o.first_sequence = below(4, 7);
  o.first_head = below(3, 8);
  o.heads_total = o.first_head + heads.query + below(2, 9);
  o.tokens_total = tk + below(2, 10) * 7;
  const Operands x = operands(b, tq, tk, heads, c.d, c.dtype, 2 * trial);
  o.window = std::array<int64_t, 5>{0, 0, 1, 20, 90}[static_cast<size_t>(below(5, 15))];
  if (below(2, 14) == 0) random_starts(random, b, tq, tk, o);
  const bool wide = below(3, 11) == 0;
  Operands there = x.to(arena);
  if (c.pad > 0) {
    const Shape s = x.packed.shape();
    Tensor padded = Tensor::zeros(s.with_last(c.d + c.pad), c.dtype, arena);
    padded.narrow(3, 0, c.d).copy_from(there.packed);
    there.packed = padded.narrow(3, 0, c.d);
  }
  ASSERT_EQ(kernels(there.part(0), there.part(1), there.part(2)), expected_kernels);
  const Results here = run(x, o, wide), got = run(there, o, wide);
  const std::string what = fmt::format("{} d {} trial {} {}{}", to_string(c.dtype), c.d, trial,
                                       there.part(0).shape().str(), there.part(1).shape().str());
  const double bound = error_bound(c.dtype);
  EXPECT_EQ(got.forward.out.dtype(), here.forward.out.dtype());
  EXPECT_LE(apart(got.forward.out, here.forward.out), bound) << what;
  EXPECT_LE(apart(got.forward.lse, here.forward.lse), error_bound(accum_dtype(c.dtype))) << what;
  // Relative to the largest of the three gradients: if queries see one key, score gradients are only rounding errors.
  EXPECT_LE(apart(got.gradients, here.gradients), bound) << what;
  if (trial % 4 != 0) return;
  EXPECT_TRUE(bitwise_equal(run(there, o, wide), got)) << what;
}

TEST_F(AttentionGpu, PlainKernelsSupportEveryHeadDim) {
  for (const DType dtype : test::floating(arena))
    for (const int64_t d : {1, 20, 33, 130})
      for (uint64_t trial = 0; trial < 4; ++trial)
        check({dtype, d}, 10 * static_cast<uint64_t>(d) + trial, arena, "plain");
}

TEST_F(AttentionGpu, PlainKernelsSupportUnalignedRows) {
  for (uint64_t trial = 0; trial < 6; ++trial) check({DType::bfloat16, 64, 3}, trial, arena, "plain");
}

TEST_F(AttentionGpu, TensorCoresSupportHeadDim64) {
  for (uint64_t trial = 0; trial < 10; ++trial)
    check({DType::bfloat16, 64, trial % 3 == 0 ? 8 : 0}, 100 + trial, arena, "tensor cores");
}

TEST_F(AttentionGpu, TensorCoresSupportHeadDim128) {
  for (uint64_t trial = 0; trial < 10; ++trial) check({DType::bfloat16, 128}, 200 + trial, arena, "tensor cores");
}

// Key and value gradients of a group are the sums of those of its heads, computed separately; log-sum-exp and query
// gradients are bitwise identical to the separate ones.
TEST_F(AttentionGpu, KeyValueGradientsAreSumsOverHeadsOfGroup) {
  for (const Case& c : {Case{DType::float64, 20}, Case{DType::bfloat16, 64}, Case{DType::bfloat16, 128}}) {
    if (!test::has_kernels(c.dtype, Device::cuda)) continue;
    constexpr int64_t kGroup = 3;
    const AttentionOptions o{.dropout = 0.2, .random = Philox(8), .heads_total = 2 * kGroup, .tokens_total = 150};
    const Operands x = operands(1, 150, 150, {2 * kGroup, 2}, c.d, c.dtype, 5).to(arena);
    const Results full = run(x, o, true);
    for (int64_t head = 0; head < 2; ++head) {
      Tensor dk = Tensor::zeros({1, 150, 1, c.d}, accum_dtype(c.dtype), arena), dv = dk.clone();
      for (int64_t h = head * kGroup; h < (head + 1) * kGroup; ++h) {
        AttentionOptions one = o;
        one.first_head = h;
        const Tensor q = x.part(0).narrow(2, h, 1), k = x.part(1).narrow(2, head, 1), v = x.part(2).narrow(2, head, 1);
        const Tensor dout = x.dout.narrow(2, h, 1);
        const AttentionResult alone = attention(q, k, v, one);
        Tensor dq = q.make(q.shape(), accum_dtype(c.dtype)), dk_one = dq.make(dq.shape()), dv_one = dq.make(dq.shape());
        attention_backward(dout, q, k, v, alone, one, dq, dk_one, dv_one);
        EXPECT_TRUE(test::bitwise_equal({alone.lse, dq},
                                        {full.forward.lse.narrow(1, h, 1), full.parts.part(0).narrow(2, h, 1)}))
            << c.d << " head " << h;
        add_(dk, dk_one), add_(dv, dv_one);
      }
      EXPECT_LE(apart(full.parts.part(1).narrow(2, head, 1), dk), error_bound(accum_dtype(c.dtype))) << c.d;
      EXPECT_LE(apart(full.parts.part(2).narrow(2, head, 1), dv), error_bound(accum_dtype(c.dtype))) << c.d;
    }
  }
}

// A query computed alone at its position is bitwise identical to its row in a larger problem and in a different batch.
TEST_F(AttentionGpu, RowsAreBitwiseIndependentOfOtherRows) {
  for (const Case& c : {Case{DType::float32, 20}, Case{DType::bfloat16, 33}, Case{DType::bfloat16, 64}})
    for (const double dropout : {0.0, 0.2}) {
      AttentionOptions o{.dropout = dropout, .random = Philox(5)};
      o.tokens_total = 140;
      const Operands x = operands(2, 140, 140, {4, 2}, c.d, c.dtype, 1).to(arena);
      const Results full = run(x, o);
      for (const int64_t i : {0, 37, 63, 64, 139}) {
        const Operands row{x.packed.narrow(1, 0, i + 1), x.dout.narrow(1, i, 1), 1, x.heads};
        const Results alone = run(row, o);
        EXPECT_TRUE(test::bitwise_equal(
            {alone.forward.out, alone.forward.lse, alone.parts.part(0)},
            {full.forward.out.narrow(1, i, 1), full.forward.lse.narrow(2, i, 1), full.parts.part(0).narrow(1, i, 1)}))
            << c.d << " row " << i;
      }
      o.first_sequence = 1;
      const Results second = run({x.packed.narrow(0, 1, 1), x.dout.narrow(0, 1, 1), 140, x.heads}, o);
      EXPECT_TRUE(test::bitwise_equal({second.forward.out, second.gradients},
                                      {full.forward.out.narrow(0, 1, 1), full.gradients.narrow(0, 1, 1)}));
    }
}

// cuDNN attention: its support checks, which need no GPU, and on a GPU its results compared with Tessera's kernels and
// the CPU.

using cuda::FusedAttention;

// An H200 in cuDNN's JSON format (clocks, sizes and limits of compute capability 9.0).
constexpr const char* kH200 = R"({"deviceName": "NVIDIA H200", "cudaDeviceId": 0, "pciDeviceId": 0, "deviceVer": 900,
 "driverVer": 13000, "isTccDriver": 0, "supportCoopLaunch": 1, "multiProcessorCount": 132, "warpSize": 32,
 "totalGlobalMem": 150109880320, "l2CacheSize": 62914560, "smClockRateKHz": 1980000, "memClockRateKHz": 3201000,
 "regsPerBlock": 65536, "maxRegistersPerSM": 65536, "maxCtasPerSM": 32, "maxThreadsPerBlock": 1024,
 "maxThreadsPerSM": 2048, "maxSharedMemoryPerBlock": 49152, "maxSharedMemoryPerBlockOptin": 232448,
 "reservedSharedMemoryPerBlock": 1024, "maxBlockSize": [1024, 1024, 64], "maxGridSize": [2147483647, 65535, 65535]})";

std::string refused(const FusedAttention& problem, const char* gpu = kH200) {
  if constexpr (kWithCudnn)
    return cuda::cudnn_refuses(problem, 90, gpu);
  else
    return "";
}

class CudnnChecks : public testing::Test {
 protected:
  void SetUp() override {
    if (!kWithCudnn) GTEST_SKIP() << "a build without cuDNN";
    // cuDNN's checks load the driver's library; without a driver the toolkit's stub suffices.
    if (!dlopen("libcuda.so.1", RTLD_NOW) && !dlopen(TESSERA_CUDA_STUB, RTLD_NOW))
      GTEST_SKIP() << "cuDNN's checks load libcuda.so.1, and the toolkit has no stub of it";
  }
};

// Checks a forward problem and both modes of its backward pass.
void expect_supported(const std::function<FusedAttention(bool backward)>& problem) {
  EXPECT_EQ(refused(problem(false)), "") << "forward";
  for (const bool deterministic : {false, true}) {
    FusedAttention p = problem(true);
    p.deterministic = deterministic;
    EXPECT_EQ(refused(p), "") << "backward " << deterministic;
  }
}

TEST_F(CudnnChecks, AcceptGptShapes) {
  for (const int64_t d : {64, 128})
    for (const int64_t tokens : {64, 1000, 1024, 4096})
      for (const int64_t keys : {12, 4, 1})
        for (const bool causal : {true, false}) {
          SCOPED_TRACE(fmt::format("{}: {} tokens, {} key heads, causal {}", d, tokens, keys, causal));
          expect_supported([&](bool backward) {
            FusedAttention p = cuda::packed_problem(4, tokens, {12, keys}, d, backward);
            p.causal = causal;
            return p;
          });
        }
}

// Tiles of ring attention: a rank's own tokens; all its queries with the first chunk of another rank's keys; and its
// second chunk of queries with all keys of that rank.
TEST_F(CudnnChecks, AcceptRingAttentionTiles) {
  for (const int64_t d : {64, 128})
    for (const int64_t tokens : {128, 512, 1000, 4096})
      for (const int64_t keys : {12, 4})
        for (const cuda::RingTile& tile :
             {cuda::RingTile{4, tokens, tokens, tokens, true}, cuda::RingTile{4, tokens, tokens, tokens / 2, false},
              cuda::RingTile{4, tokens, tokens / 2, tokens, false}}) {
          SCOPED_TRACE(fmt::format("{}: {} queries, {} keys, {}", d, tile.queries, tile.keys, keys));
          expect_supported([&](bool backward) { return cuda::tile_problem(tile, {12, keys}, d, backward); });
        }
}

TEST_F(CudnnChecks, RejectOldLibraries) {
  if constexpr (kWithCudnn) {
    EXPECT_EQ(cuda::cudnn_too_old(91501), "");
    EXPECT_EQ(cuda::cudnn_too_old(91900), "");
    EXPECT_EQ(cuda::cudnn_too_old(91500),
              "9.15.0 is older than 9.15.1: it reads out of bounds if the number of tokens is not a multiple of 128");
  }
}

TEST_F(CudnnChecks, RejectWithOneLineReason) {
  FusedAttention wide = cuda::packed_problem(1, 128, {2}, 320, true),
                 odd = cuda::packed_problem(1, 128, {2}, 20, false);
  FusedAttention shifted = cuda::packed_problem(2, 128, {2}, 64, false);
  shifted.strides[FusedAttention::k][1] += 3;  // unaligned rows
  for (const FusedAttention& p : {wide, odd, shifted}) {
    EXPECT_NE(refused(p), "") << p.d;
    EXPECT_FALSE(has(refused(p), "\n"));
  }
  EXPECT_NE(refused(cuda::packed_problem(1, 128, {2}, 64, false), "{}"), "");
}

class CudnnGpu : public test::OnGpu {
 protected:
  void SetUp() override {
    OnGpu::SetUp();
    if (IsSkipped()) return;
    if (!kWithCudnn)
      GTEST_SKIP() << "a build without cuDNN";
    else
      cudnn = make_arena(Device::cuda), fixed = make_arena(Device::cuda);
    choose(cudnn, {.attention = AttentionKernels::automatic});
    choose(fixed, {.attention = AttentionKernels::cudnn, .deterministic = true});
  }
  static void choose(const ArenaPtr& arena, const KernelChoice& choice) { arena->local<KernelChoice>() = choice; }
  ArenaPtr cudnn, fixed;  // `arena` uses Tessera's kernels
};

Operands packed(int64_t batch, int64_t tokens, const Heads& heads, int64_t d, uint64_t name) {
  const auto normal = [&](int64_t count, uint64_t number) {
    return test::normal({batch, tokens, count, d}, DType::bfloat16, number, "attention by cuDNN");
  };
  return {normal(heads.packed(), name), normal(heads.query, name + 1), tokens, heads};
}

void expect_close(const Results& found, const Results& expected, const std::string& what) {
  constexpr double kBound = 0x1p-7, kSums = 1e-4;  // bounds of bfloat16 results and of float32 sums
  EXPECT_LE(apart(found.forward.out, expected.forward.out), kBound) << what;
  EXPECT_LE(apart(found.forward.lse, expected.forward.lse), kSums) << what;
  EXPECT_LE(apart(found.gradients, expected.gradients), kBound) << what;
}

// One of every five shapes, because each needs four plans, and a plan takes cuDNN a few tenths of a second.
TEST_F(CudnnGpu, MatchesCustomKernelsAndCpu) {
  const Philox random = Philox::named(1, "shapes for cuDNN");
  uint64_t sample = 0;
  for (const int64_t d : {64, 128})
    for (const Heads& heads : {Heads{3}, Heads{4, 2}, Heads{3, 1}})
      for (const bool causal : {true, false}) {
        constexpr std::array<int64_t, 5> kTokens{2, 63, 128, 200, 384};
        const int64_t tokens = kTokens[random.below(5, sample++)];
        const AttentionOptions o{.scale = causal ? 0 : 0.2, .causal = causal};
        const Operands x = packed(2, tokens, heads, d, 1);
        const std::string what = fmt::format("d {}, {} tokens, {} key heads", d, tokens, heads.key);
        const auto on = [&](const ArenaPtr& there) { return run(x.to(there), o); };
        const Results here = run(x, o), ours = on(arena);
        expect_close(ours, here, what + ", ours");
        expect_close(on(cudnn), here, what + ", cuDNN");
        const Results once = on(fixed), again = on(fixed);
        expect_close(once, here, what + ", cuDNN, deterministic");
        expect_close(once, ours, what + ", cuDNN, deterministic, versus ours");
        EXPECT_TRUE(bitwise_equal(again, once)) << what;
      }
}

// Ring attention tiles have different numbers of keys and queries. Their backward pass receives the `out` and
// log-sum-exp of more keys than those of the tile: here of the same keys twice, which halves every probability.
TEST_F(CudnnGpu, MatchesCpuOnRingAttentionTiles) {
  const auto tile = [&](const ArenaPtr& on, int64_t queries, int64_t keys) {
    Operands x = packed(2, 256, {2}, 64, 9).to(on);
    x.tq = queries;
    const Tensor q = x.part(0), k = x.part(1).narrow(1, 0, keys), v = x.part(2).narrow(1, 0, keys),
                 dout = x.dout.narrow(1, 0, queries).contiguous();
    const AttentionOptions o{.causal = false};
    Results r{attention(q, k, v, o), q.make({2, queries + 2 * keys, 2, 64}), {}};
    merge_attention(r.forward, {r.forward.out.clone(), r.forward.lse.clone()});
    Tensor dq = q.make(q.shape()), dkv = q.make({2, keys, 4, 64}), dk = dkv.narrow(2, 0, 2), dv = dkv.narrow(2, 2, 2);
    attention_backward(dout, q, k, v, r.forward, o, dq, dk, dv);
    r.gradients.narrow(1, 0, queries).copy_from(dq);
    r.gradients.narrow(1, queries, keys).copy_from(dk);
    r.gradients.narrow(1, queries + keys, keys).copy_from(dv);
    return r;
  };
  for (const auto& [queries, keys] : {std::pair<int64_t, int64_t>{256, 128}, {128, 256}, {100, 256}}) {
    const std::string what = std::to_string(queries) + " queries, " + std::to_string(keys) + " keys";
    const Results here = tile(make_arena(), queries, keys);
    expect_close(tile(arena, queries, keys), here, what + ", ours");
    expect_close(tile(fixed, queries, keys), here, what + ", cuDNN");
  }
  EXPECT_EQ(fixed->local<KernelLog>().forward.cudnn, 3);
  EXPECT_EQ(fixed->local<KernelLog>().backward.cudnn, 3);
}

// cuDNN's kernels run when they are selected: direct calls report success, and attention() returns a bitwise
// identical result.
TEST_F(CudnnGpu, RunsIfSelected) {
  if constexpr (kWithCudnn) {
    const Operands x = packed(2, 256, {2}, 64, 3).to(fixed);
    const Tensor q = x.part(0), k = x.part(1), v = x.part(2);
    const AttentionOptions o{.scale = 0.125};
    const Results through = run(x, o);
    const AttentionResult alone{q.make(q.shape()), q.make({2, 2, 256}, DType::float32)};
    ASSERT_TRUE(cuda::cudnn_attention({q, k, v, o}, alone));
    EXPECT_TRUE(test::bitwise_equal({alone.out, alone.lse}, {through.forward.out, through.forward.lse}));
    const Operands gradients{x.packed.make(x.packed.shape()), {}, x.tq, x.heads};
    ASSERT_TRUE(cuda::cudnn_attention_backward({q, k, v, o}, x.dout, alone,
                                               {gradients.part(0), gradients.part(1), gradients.part(2)}));
    EXPECT_TRUE(test::bitwise_equal(gradients.packed, through.gradients));
    for (const bool backward : {false, true})
      EXPECT_EQ(cuda::cudnn_refuses(cuda::packed_problem(2, 256, {2}, 64, backward)), "");
  }
}

// cuDNN is not used for dropout, decoding from a KV cache or unrounded sums: results are bitwise identical to
// those of Tessera's kernels.
TEST_F(CudnnGpu, FallsBackToCustomKernels) {
  const Operands x = packed(1, 96, {2}, 64, 5);
  const AttentionOptions drops{.dropout = 0.2, .random = Philox(1)};
  EXPECT_TRUE(bitwise_equal(run(x.to(cudnn), drops), run(x.to(arena), drops)));
  const auto wide = [&](const ArenaPtr& on) {
    const Operands there = x.to(on);
    const Tensor q = there.part(0);
    const AttentionResult sums{q.make(q.shape(), DType::float32), q.make({1, 2, 96}, DType::float32)};
    attention_into(q, there.part(1), there.part(2), {}, sums);
    return sums.out;
  };
  EXPECT_TRUE(test::bitwise_equal(wide(cudnn), wide(arena)));
  const auto last = [&](const ArenaPtr& on) {
    const Operands there = x.to(on);
    return attention(there.part(0).narrow(1, 95, 1), there.part(1), there.part(2)).out;
  };
  EXPECT_TRUE(test::bitwise_equal(last(cudnn), last(arena)));
  EXPECT_TRUE(cudnn->local<KernelLog>().refused.empty());
}

// Head dims 20 and 40: results are correct with either kernel, and the log names it. Requiring cuDNN is an error if it
// does not support them.
TEST_F(CudnnGpu, LogNamesKernelsForUnusualHeadDims) {
  for (const int64_t d : {20, 40}) {
    const Operands x = packed(1, 96, {2}, d, 7);
    cudnn->local<KernelLog>() = {};
    expect_close(run(x.to(cudnn), {}), run(x.to(arena), {}), "head of " + std::to_string(d));
    const KernelLog& log = cudnn->local<KernelLog>();
    EXPECT_EQ(log.forward.cudnn + log.forward.plain, 1);
    EXPECT_EQ(log.backward.cudnn + log.backward.plain, 1);
    EXPECT_EQ(log.refused.size(), static_cast<size_t>(log.forward.plain + log.backward.plain));
    for (const std::string& message : log.refused)
      EXPECT_TRUE(has(message, "of (B, T, H, D) = (1, 96, 2, " + std::to_string(d) + "): "));
    if (log.refused.empty())
      EXPECT_NO_THROW(run(x.to(fixed), {}));
    else
      EXPECT_THROW(run(x.to(fixed), {}), Error);
    if (d == 20) {
      EXPECT_EQ(log.refused.size(), 2u) << "its checks require multiples of 8";
    }
  }
}

}  // namespace
}  // namespace tessera
