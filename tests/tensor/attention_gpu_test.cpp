// Attention on a GPU beside the CPU's: plain kernels, tensor cores, tiles; and by cuDNN: what its own checks say of the
// problems that are asked of it, which needs no GPU, and its results beside our kernels' and the CPU's.
#include <dlfcn.h>
#include <fmt/format.h>

#include "tensor/ops/attention/cuda/cudnn_attention.h"
#include "tensor/ops/elementwise.h"
#include "tests/support/errors.h"
#include "tests/support/gpu.h"
#include "tests/support/tensors.h"

namespace tessera {
namespace {

using namespace test;

using AttentionGpu = test::OnGpu;

double bound_of(DType dtype) { return dtype == DType::float64 ? 1e-13 : dtype == DType::float32 ? 1e-5 : 0x1p-7; }

std::string kernels(const Tensor& q, const Tensor& k, const Tensor& v) {
  if constexpr (kWithCuda)
    return cuda::attention_kernels(q, k, v);
  else
    return "";
}

Tensor normal(const Shape& shape, DType dtype, uint64_t name) {
  return test::normal(shape, dtype, name, "attention on a GPU");
}

// Queries, keys and values cut from one packed tensor (B, Tk, H + 2 K, D), the queries being the last Tq.
struct Operands {
  Tensor packed, dout;
  int64_t tq;
  Heads heads;
  Tensor part(int which) const {
    const Tensor whole = packed.narrow(2, heads.begin(which), heads.count(which));
    return which == 0 ? whole.narrow(1, whole.dim(1) - tq, tq) : whole;
  }
  Operands to(const ArenaPtr& arena) const { return {packed.to(arena), dout.to(arena), tq, heads}; }
};

Operands operands(int64_t batch, int64_t tq, int64_t tk, const Heads& heads, int64_t d, DType dtype, uint64_t name) {
  return {normal({batch, tk, heads.packed(), d}, dtype, name), normal({batch, tq, heads.query, d}, dtype, name + 1), tq,
          heads};
}

struct Results {
  Attended forward;
  Tensor gradients;  // packed too
  Operands parts;    // cut the gradients into those of q, k and v
};

Results run(const Operands& x, const AttentionOptions& given, bool wide) {
  AttentionOptions options = given;
  if (given.starts.defined()) options.starts = given.starts.to(x.packed.arena());
  const DType dtype = wide ? wide_of(x.packed.dtype()) : x.packed.dtype();
  const Tensor q = x.part(0), k = x.part(1), v = x.part(2);
  Results r{attention(q, k, v, options), x.packed.make(x.packed.shape(), dtype), {}};
  r.gradients.fill(0);
  r.parts = {r.gradients, {}, x.tq, x.heads};
  Tensor dq = r.parts.part(0), dk = r.parts.part(1), dv = r.parts.part(2);
  attention_backward(x.dout, q, k, v, r.forward, options, dq, dk, dv);
  if (wide) {
    const Attended summed{q.make(q.shape(), dtype), r.forward.lse.clone()};
    attention_into(q, k, v, options, summed);
    r.forward.out = summed.out;
  }
  return r;
}

struct Case {
  DType dtype;
  int64_t d, pad = 0;  // tokens have `pad` numbers more, so that rows begin elsewhere
};

// Documents, as a rank of a ring sees them that has queries further on: some see no key. Or any starts at all.
void draw_starts(const Philox& random, int64_t b, int64_t tq, int64_t tk, AttentionOptions& o) {
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

struct Drawn {
  Operands x;
  AttentionOptions options;
  bool wide;
};

Drawn draw(const Case& c, uint64_t trial) {
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
  Operands x = operands(b, tq, tk, heads, c.d, c.dtype, 2 * trial);
  o.window = std::array<int64_t, 5>{0, 0, 1, 20, 90}[static_cast<size_t>(below(5, 15))];
  if (below(2, 14) == 0) draw_starts(random, b, tq, tk, o);
  return {x, o, below(3, 11) == 0};
}

void check(const Case& c, uint64_t trial, const ArenaPtr& arena, const std::string& expected_kernels) {
  const Drawn drawn = draw(c, trial);
  Operands there = drawn.x.to(arena);
  if (c.pad > 0) {
    const Shape s = drawn.x.packed.shape();
    Tensor room = Tensor::zeros(s.with_last(c.d + c.pad), c.dtype, arena);
    room.narrow(3, 0, c.d).copy_from(there.packed);
    there.packed = room.narrow(3, 0, c.d);
  }
  ASSERT_EQ(kernels(there.part(0), there.part(1), there.part(2)), expected_kernels);
  const Results here = run(drawn.x, drawn.options, drawn.wide), got = run(there, drawn.options, drawn.wide);
  const std::string what = fmt::format("{} d {} trial {} {}{}", name_of(c.dtype), c.d, trial,
                                       there.part(0).shape().str(), there.part(1).shape().str());
  const double bound = bound_of(c.dtype);
  EXPECT_EQ(got.forward.out.dtype(), here.forward.out.dtype());
  EXPECT_LE(apart(got.forward.out, here.forward.out), bound) << what;
  EXPECT_LE(apart(got.forward.lse, here.forward.lse), bound_of(wide_of(c.dtype))) << what;
  // To the largest of all three: where a query sees one key, the gradients of scores are rounding alone.
  EXPECT_LE(apart(got.gradients, here.gradients), bound) << what;
  if (trial % 4 != 0) return;
  const Results again = run(there, drawn.options, drawn.wide);
  EXPECT_TRUE(same_bits(again.forward.out, got.forward.out) && same_bits(again.gradients, got.gradients)) << what;
}

TEST_F(AttentionGpu, PlainKernelsTakeEveryHead) {
  for (const DType dtype : test::floating(arena))
    for (const int64_t d : {1, 20, 33, 130})
      for (uint64_t trial = 0; trial < 4; ++trial)
        check({dtype, d}, 10 * static_cast<uint64_t>(d) + trial, arena, "plain");
}

TEST_F(AttentionGpu, PlainKernelsTakeRowsThatBeginAnywhere) {
  for (uint64_t trial = 0; trial < 6; ++trial) check({DType::bfloat16, 64, 3}, trial, arena, "plain");
}

TEST_F(AttentionGpu, TensorCoresTakeHeadsOf64) {
  for (uint64_t trial = 0; trial < 10; ++trial)
    check({DType::bfloat16, 64, trial % 3 == 0 ? 8 : 0}, 100 + trial, arena, "tensor cores");
}

TEST_F(AttentionGpu, TensorCoresTakeHeadsOf128) {
  for (uint64_t trial = 0; trial < 10; ++trial) check({DType::bfloat16, 128}, 200 + trial, arena, "tensor cores");
}

// A group's gradients of keys and values are those of its heads each alone, added up; its queries have the bits that
// they have alone.
TEST_F(AttentionGpu, AGroupAddsWhatItsHeadsBring) {
  for (const Case& c : {Case{DType::float64, 20}, Case{DType::bfloat16, 64}, Case{DType::bfloat16, 128}}) {
    if (!test::has_kernels(c.dtype, Device::cuda)) continue;
    constexpr int64_t kGroup = 3;
    const AttentionOptions o{.dropout = 0.2, .random = Philox(8), .heads_total = 2 * kGroup, .tokens_total = 150};
    const Operands x = operands(1, 150, 150, {2 * kGroup, 2}, c.d, c.dtype, 5).to(arena);
    const Results whole = run(x, o, true);
    for (int64_t head = 0; head < 2; ++head) {
      Tensor dk, dv;
      for (int64_t h = head * kGroup; h < (head + 1) * kGroup; ++h) {
        AttentionOptions one = o;
        one.first_head = h;
        const Tensor q = x.part(0).narrow(2, h, 1), k = x.part(1).narrow(2, head, 1), v = x.part(2).narrow(2, head, 1);
        const Tensor dout = x.dout.narrow(2, h, 1);
        const Attended alone = attention(q, k, v, one);
        EXPECT_TRUE(same_bits(alone.lse, whole.forward.lse.narrow(1, h, 1))) << c.d << " head " << h;
        Tensor dq = q.make(q.shape(), wide_of(c.dtype)), dk_one = dq.make(dq.shape()), dv_one = dq.make(dq.shape());
        attention_backward(dout, q, k, v, alone, one, dq, dk_one, dv_one);
        EXPECT_TRUE(same_bits(dq, whole.parts.part(0).narrow(2, h, 1))) << c.d << " head " << h;
        if (dk.defined())
          add_(dk, dk_one), add_(dv, dv_one);
        else
          dk = dk_one, dv = dv_one;
      }
      EXPECT_LE(apart(whole.parts.part(1).narrow(2, head, 1), dk), bound_of(wide_of(c.dtype))) << c.d;
      EXPECT_LE(apart(whole.parts.part(2).narrow(2, head, 1), dv), bound_of(wide_of(c.dtype))) << c.d;
    }
  }
}

// One query alone, at the same place in the matrix: the bits of its row among others, and in another batch.
TEST_F(AttentionGpu, ARowHasItsOwnBits) {
  for (const Case& c : {Case{DType::float32, 20}, Case{DType::bfloat16, 33}, Case{DType::bfloat16, 64}})
    for (const double dropout : {0.0, 0.2}) {
      AttentionOptions o{.dropout = dropout, .random = Philox(5)};
      o.tokens_total = 140;
      const Operands x = operands(2, 140, 140, {4, 2}, c.d, c.dtype, 1).to(arena);
      const Results whole = run(x, o, false);
      for (const int64_t i : {0, 37, 63, 64, 139}) {
        const Operands row{x.packed.narrow(1, 0, i + 1), x.dout.narrow(1, i, 1), 1, x.heads};
        const Results alone = run(row, o, false);
        EXPECT_TRUE(same_bits(alone.forward.out, whole.forward.out.narrow(1, i, 1))) << c.d << " row " << i;
        EXPECT_TRUE(same_bits(alone.forward.lse, whole.forward.lse.narrow(2, i, 1))) << c.d << " row " << i;
        EXPECT_TRUE(same_bits(alone.parts.part(0), whole.parts.part(0).narrow(1, i, 1))) << c.d << " row " << i;
      }
      o.first_sequence = 1;
      const Results second = run({x.packed.narrow(0, 1, 1), x.dout.narrow(0, 1, 1), 140, x.heads}, o, false);
      EXPECT_TRUE(same_bits(second.forward.out, whole.forward.out.narrow(0, 1, 1)));
      EXPECT_TRUE(same_bits(second.gradients, whole.gradients.narrow(0, 1, 1)));
    }
}

// Keys in two tiles, merged: the attention to all of them, and its gradients.
TEST_F(AttentionGpu, TilesMakeTheWhole) {
  for (const Case& c : {Case{DType::float64, 16}, Case{DType::float32, 33}, Case{DType::bfloat16, 64}})
    for (const int64_t cut : {60, 64, 90}) {
      if (!test::has_kernels(c.dtype, Device::cuda)) continue;
      constexpr int64_t kKeys = 150, kQueries = 60;
      const DType wide = wide_of(c.dtype);
      AttentionOptions o{.dropout = 0.25, .random = Philox(6)};
      o.tokens_total = kKeys;
      const Operands x = operands(1, kQueries, kKeys, {2, 1}, c.d, c.dtype, 3).to(arena);
      const Results whole = run(x, o, true);
      const Tensor q = x.part(0);
      Attended merged;
      std::vector<AttentionOptions> tiles(2, o);
      const auto keys = [&](int which, int64_t tile) {
        return tile == 0 ? x.part(which).narrow(1, 0, cut) : x.part(which).narrow(1, cut, kKeys - cut);
      };
      tiles[0].causal = false;  // all of these keys are before all queries
      tiles[1].first_key = cut;
      tiles[0].first_query = tiles[1].first_query = kKeys - kQueries;
      for (int64_t tile = 0; tile < 2; ++tile) {
        const Attended part{q.make(q.shape(), wide), q.make({1, 2, kQueries}, wide)};
        attention_into(q, keys(1, tile), keys(2, tile), tiles[static_cast<size_t>(tile)], part);
        if (tile == 0)
          merged = part;
        else
          merge_attended(merged, part);
      }
      EXPECT_LE(apart(merged.out, whole.forward.out), bound_of(c.dtype)) << c.d << " cut " << cut;
      EXPECT_LE(apart(merged.lse, whole.forward.lse), bound_of(wide)) << c.d << " cut " << cut;
      const Attended rounded{merged.out.to(c.dtype), merged.lse};
      Tensor sum = Tensor::zeros(q.shape(), wide, arena);
      for (int64_t tile = 0; tile < 2; ++tile) {
        const Tensor k = keys(1, tile), v = keys(2, tile);
        Tensor dq = q.make(q.shape(), wide), dk = k.make(k.shape(), wide), dv = v.make(v.shape(), wide);
        attention_backward(x.dout, q, k, v, rounded, tiles[static_cast<size_t>(tile)], dq, dk, dv);
        add_(sum, dq);
        const Tensor all_dk = whole.parts.part(1), all_dv = whole.parts.part(2);
        const auto cut_of = [&](const Tensor& t) {
          return tile == 0 ? t.narrow(1, 0, cut) : t.narrow(1, cut, kKeys - cut);
        };
        EXPECT_LE(apart(dk, cut_of(all_dk)), bound_of(c.dtype)) << c.d << " cut " << cut;
        EXPECT_LE(apart(dv, cut_of(all_dv)), bound_of(c.dtype)) << c.d << " cut " << cut;
      }
      const Tensor all_dq = whole.parts.part(0);
      EXPECT_LE(apart(sum, all_dq), bound_of(c.dtype)) << c.d << " cut " << cut;
    }
}

// Attention by cuDNN: what its own checks say of the problems that are asked of it, which needs no GPU, and on a GPU
// its results beside our kernels' and the CPU's.

using cuda::FusedAttention;

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
          const std::string what = fmt::format("{}: {} queries, {} keys, {}", d, tile.queries, tile.keys, keys);
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
  ArenaPtr cudnn, fixed;  // beside `arena`, which has our own kernels
};

Tensor normal(const Shape& shape, uint64_t name) {
  return test::normal(shape, DType::bfloat16, name, "attention by cuDNN");
}

// Runs both passes on a packed (B, T, (H + 2 K) D), as autograd asks for them.
Results attend(const Tensor& packed, const Tensor& dout, const AttentionOptions& options, const Heads& heads = {2}) {
  const auto part = [&](const Tensor& whole, int i) { return packed_part(whole, heads, i); };
  Results r{attention(part(packed, 0), part(packed, 1), part(packed, 2), options), packed.make(packed.shape()), {}};
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
        const std::string what = fmt::format("d {}, {} tokens, {} heads of keys", d, tokens, heads.key);
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
    Results r{attention(q, k, v, o), {}, {}};
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
      EXPECT_TRUE(has(said, "of (B, T, H, D) = (1, 96, 2, " + std::to_string(d) + "): "));
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
