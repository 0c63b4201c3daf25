// Attention by cuDNN: what its own checks say of the problems that are asked of it, which needs no GPU, and on a GPU
// its results beside our kernels' and the CPU's.
#include "tensor/ops/attention/cuda/cudnn_attention.h"

#include <dlfcn.h>

#include "tests/support/gpu.h"
#include "tests/support/tensors.h"

namespace tessera {
namespace {

using cuda::FusedAttention;
using test::apart;
using test::same_bits;

// An H200 as cuDNN's JSON says it (clocks, sizes and limits of compute capability 9.0).
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
    // cuDNN's checks load the driver's library; the toolkit's empty one will do where there is no driver.
    if (!dlopen("libcuda.so.1", RTLD_NOW) && !dlopen(TESSERA_CUDA_STUB, RTLD_NOW))
      GTEST_SKIP() << "no libcuda.so.1, and no stub of it in the toolkit, which cuDNN's checks load";
  }
};

TEST_F(CudnnChecks, TakeWhatAGptAsks) {
  for (const int64_t d : {64, 128})
    for (const int64_t tokens : {64, 1000, 1024, 4096})
      for (const int64_t keys : {12, 4, 1})
        for (const bool causal : {true, false}) {
          FusedAttention p = cuda::packed_problem(4, tokens, {12, keys}, d, false);
          p.causal = causal;
          EXPECT_EQ(refused(p), "") << d << " forward " << tokens << " " << keys;
          for (const bool deterministic : {false, true}) {
            p = cuda::packed_problem(4, tokens, {12, keys}, d, true);
            p.causal = causal;
            p.deterministic = deterministic;
            EXPECT_EQ(refused(p), "") << d << " backward " << tokens << " " << keys << " " << deterministic;
          }
        }
}

// The tiles of ring attention: a rank's own tokens, all of its queries beside another's first chunk, the late ones
// beside both.
TEST_F(CudnnChecks, TakeWhatARingAsks) {
  for (const int64_t d : {64, 128})
    for (const int64_t tokens : {128, 512, 1000, 4096})
      for (const int64_t keys : {12, 4})
        for (const cuda::TileOfRing& tile :
             {cuda::TileOfRing{4, tokens, tokens, tokens, true}, cuda::TileOfRing{4, tokens, tokens, tokens / 2, false},
              cuda::TileOfRing{4, tokens, tokens / 2, tokens, false}}) {
          const std::string what = std::to_string(d) + ": " + std::to_string(tile.queries) + " queries, " +
                                   std::to_string(tile.keys) + " keys, " + std::to_string(keys);
          EXPECT_EQ(refused(cuda::tile_problem(tile, {12, keys}, d, false)), "") << what;
          for (const bool deterministic : {false, true}) {
            FusedAttention p = cuda::tile_problem(tile, {12, keys}, d, true);
            p.deterministic = deterministic;
            EXPECT_EQ(refused(p), "") << "backward, " << what;
          }
        }
}

TEST_F(CudnnChecks, AreNotAskedOfAnOldLibrary) {
  if constexpr (kWithCudnn) {
    EXPECT_EQ(cuda::cudnn_too_old(91501), "");
    EXPECT_EQ(cuda::cudnn_too_old(91900), "");
    EXPECT_EQ(cuda::cudnn_too_old(91500),
              "9.15.0 is older than 9.15.1: it reads memory that is not its own where 128 does not divide the tokens");
  }
}

TEST_F(CudnnChecks, RefuseWithAReasonInOneLine) {
  FusedAttention wide = cuda::packed_problem(1, 128, {2}, 320, true),
                 odd = cuda::packed_problem(1, 128, {2}, 20, false);
  FusedAttention shifted = cuda::packed_problem(2, 128, {2}, 64, false);
  shifted.strides[FusedAttention::k][1] += 3;  // rows that begin anywhere
  for (const FusedAttention& p : {wide, odd, shifted}) {
    EXPECT_NE(refused(p), "") << p.d;
    EXPECT_EQ(refused(p).find('\n'), std::string::npos) << refused(p);
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
  ArenaPtr cudnn, fixed;  // beside `arena`, which has our own kernels
};

Tensor normal(const Shape& shape, uint64_t name) {
  return test::normal(shape, DType::bfloat16, name, "attention by cuDNN");
}

struct Results {
  Attended forward;
  Tensor gradients;  // packed
};

// Runs both passes on a packed (B, T, (H + 2 K) D), as autograd asks for them.
Results attend(const Tensor& packed, const Tensor& dout, const AttentionOptions& options, const Heads& heads = {2}) {
  const auto part = [&](const Tensor& whole, int i) { return packed_part(whole, heads, i); };
  Results r{attention(part(packed, 0), part(packed, 1), part(packed, 2), options), packed.make(packed.shape())};
  Tensor dq = part(r.gradients, 0), dk = part(r.gradients, 1), dv = part(r.gradients, 2);
  attention_backward(dout, part(packed, 0), part(packed, 1), part(packed, 2), r.forward, options, dq, dk, dv);
  return r;
}

void expect_close(const Results& found, const Results& expected, const std::string& what) {
  constexpr double kBound = 0x1p-7, kSums = 1e-4;  // bounds of bfloat16 results, and of the sums beneath them
  EXPECT_LE(apart(found.forward.out, expected.forward.out), kBound) << what;
  EXPECT_LE(apart(found.forward.lse, expected.forward.lse), kSums) << what;
  EXPECT_LE(apart(found.gradients, expected.gradients), kBound) << what;
}

// One of each five of these shapes, since each takes four plans and a plan takes cuDNN a few tenths of a second.
TEST_F(CudnnGpu, ComputesWhatOurKernelsAndTheCpuCompute) {
  const Philox random = Philox::named(1, "shapes for cuDNN");
  uint64_t drawn = 0;
  for (const int64_t d : {64, 128})
    for (const Heads& heads : {Heads{3}, Heads{4, 2}, Heads{3, 1}})
      for (const bool causal : {true, false}) {
        constexpr std::array<int64_t, 5> kTokens{2, 63, 128, 200, 384};
        const int64_t tokens = kTokens[random.below(5, drawn++)];
        const AttentionOptions o{.scale = causal ? 0 : 0.2, .causal = causal};
        const Tensor packed = normal({2, tokens, heads.packed() * d}, 1), dout = normal({2, tokens, heads.query, d}, 2);
        const std::string what = "d " + std::to_string(d) + ", " + std::to_string(tokens) + " tokens, " +
                                 std::to_string(heads.key) + " heads of keys";
        const auto on = [&](const ArenaPtr& there) { return attend(packed.to(there), dout.to(there), o, heads); };
        const Results here = attend(packed, dout, o, heads), ours = on(arena);
        expect_close(ours, here, what + ", ours");
        expect_close(on(cudnn), here, what + ", cuDNN");
        const Results once = on(fixed), again = on(fixed);
        expect_close(once, here, what + ", cuDNN, deterministic");
        expect_close(once, ours, what + ", cuDNN, deterministic, beside ours");
        EXPECT_TRUE(same_bits(again.gradients, once.gradients) && same_bits(again.forward.out, once.forward.out))
            << what;
      }
}

// The tiles of a ring: other keys than queries. Its backward pass takes an out and a log-sum-exp of more keys than its
// own, here those of the same keys twice, so that every probability is half of what it is alone.
TEST_F(CudnnGpu, ComputesTilesOfARing) {
  const auto tile = [&](const ArenaPtr& on, int64_t queries, int64_t keys) {
    const Tensor there = normal({2, 256, 6 * 64}, 9).to(on), dout = normal({2, queries, 2, 64}, 10).to(on);
    const Tensor q = packed_part(there, {2}, 0).narrow(1, 256 - queries, queries),
                 k = packed_part(there, {2}, 1).narrow(1, 0, keys), v = packed_part(there, {2}, 2).narrow(1, 0, keys);
    const AttentionOptions o{.causal = false};
    Results r{attention(q, k, v, o), {}};
    merge_attended(r.forward, {r.forward.out.clone(), r.forward.lse.clone()});
    Tensor dq = q.make(q.shape()), dkv = q.make({2, keys, 4, 64}), dk = dkv.narrow(2, 0, 2), dv = dkv.narrow(2, 2, 2);
    attention_backward(dout, q, k, v, r.forward, o, dq, dk, dv);
    r.gradients = Tensor::empty({2, queries + 2 * keys, 2, 64}, DType::bfloat16, make_arena());
    r.gradients.narrow(1, 0, queries).copy_from(dq.on_host());
    r.gradients.narrow(1, queries, keys).copy_from(dk.on_host());
    r.gradients.narrow(1, queries + keys, keys).copy_from(dv.on_host());
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

// That they were not ours: asked by themselves they say so, and attention() has their bits.
TEST_F(CudnnGpu, IsAskedWhereItIsChosen) {
  if constexpr (kWithCudnn) {
    const Tensor packed = normal({2, 256, 6 * 64}, 3).to(fixed), dout = normal({2, 256, 2, 64}, 4).to(fixed);
    const auto part = [](const Tensor& whole, int i) { return packed_part(whole, {2}, i); };
    const Tensor q = part(packed, 0), k = part(packed, 1), v = part(packed, 2);
    const AttentionOptions o{.scale = 0.125};
    const Results through = attend(packed, dout, o);
    const Attended alone{q.make(q.shape()), q.make({2, 2, 256}, DType::float32)};
    ASSERT_TRUE(cuda::cudnn_attention({q, k, v, o}, alone));
    EXPECT_TRUE(same_bits(alone.out, through.forward.out) && same_bits(alone.lse, through.forward.lse));
    const Tensor gradients = packed.make(packed.shape());
    ASSERT_TRUE(cuda::cudnn_attention_backward({q, k, v, o}, dout, alone,
                                               {part(gradients, 0), part(gradients, 1), part(gradients, 2)}));
    EXPECT_TRUE(same_bits(gradients, through.gradients));
    for (const bool backward : {false, true})
      EXPECT_EQ(cuda::cudnn_refuses(cuda::packed_problem(2, 256, {2}, 64, backward)), "");
  }
}

// It is not asked for dropout, a cache's query, or sums that are not rounded: those have the bits of our kernels.
TEST_F(CudnnGpu, OurKernelsServeTheRest) {
  const Tensor packed = normal({1, 96, 6 * 64}, 5), dout = normal({1, 96, 2, 64}, 6);
  const AttentionOptions drops{.dropout = 0.2, .random = Philox(1)};
  const Results ours = attend(packed.to(arena), dout.to(arena), drops),
                found = attend(packed.to(cudnn), dout.to(cudnn), drops);
  EXPECT_TRUE(same_bits(found.forward.out, ours.forward.out) && same_bits(found.gradients, ours.gradients));
  const auto wide = [&](const ArenaPtr& on) {
    const Tensor there = packed.to(on), q = packed_part(there, {2}, 0);
    const Attended sums{q.make(q.shape(), DType::float32), q.make({1, 2, 96}, DType::float32)};
    attention_into(q, packed_part(there, {2}, 1), packed_part(there, {2}, 2), {}, sums);
    return sums.out;
  };
  EXPECT_TRUE(same_bits(wide(cudnn), wide(arena)));
  const auto last = [&](const ArenaPtr& on) {
    const Tensor there = packed.to(on);
    return attention(packed_part(there, {2}, 0).narrow(1, 95, 1), packed_part(there, {2}, 1),
                     packed_part(there, {2}, 2))
        .out;
  };
  EXPECT_TRUE(same_bits(last(cudnn), last(arena)));
  EXPECT_TRUE(cudnn->local<KernelLog>().refused.empty());
}

// Heads of 20 and 40 numbers: whoever serves them, the log says it, and the numbers are right. Who asks for cuDNN alone
// gets an error where it does not serve.
TEST_F(CudnnGpu, TheLogSaysWhoServesAnOddHead) {
  for (const int64_t d : {20, 40}) {
    const Tensor packed = normal({1, 96, 6 * d}, 7), dout = normal({1, 96, 2, d}, 8);
    cudnn->local<KernelLog>() = {};
    const Results ours = attend(packed.to(arena), dout.to(arena), {}),
                  found = attend(packed.to(cudnn), dout.to(cudnn), {});
    expect_close(found, ours, "head of " + std::to_string(d));
    const KernelLog& log = cudnn->local<KernelLog>();
    EXPECT_EQ(log.forward.cudnn + log.forward.plain, 1);
    EXPECT_EQ(log.backward.cudnn + log.backward.plain, 1);
    EXPECT_EQ(log.refused.size(), static_cast<size_t>(log.forward.plain + log.backward.plain));
    for (const std::string& said : log.refused)
      EXPECT_NE(said.find("of (B, T, H, D) = (1, 96, 2, " + std::to_string(d) + "): "), std::string::npos) << said;
    if (log.refused.empty())
      EXPECT_NO_THROW(attend(packed.to(fixed), dout.to(fixed), {}));
    else
      EXPECT_THROW(attend(packed.to(fixed), dout.to(fixed), {}), Error);
    if (d == 20) {
      EXPECT_EQ(log.refused.size(), 2u) << "its checks want multiples of 8";
    }
  }
}

}  // namespace
}  // namespace tessera
