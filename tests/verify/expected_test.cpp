// Closed forms, compared with the paper's table and manual counts; the memory bound of pipeline ranks; and the
// contract's bounds, from both sides.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "tests/support/one_thread.h"
#include "tests/verify/draw.h"
#include "verify/comparison.h"
#include "verify/tolerance.h"

namespace tessera {
namespace {

using test::small_plan;

// GPT-2 with 124 million parameters in mixed precision.
TypedOptions gpt2(int64_t ranks, int64_t zero, const char* grad_dtype) {
  TypedOptions o = verify_defaults();
  o.preset = "gpt2";
  say(o, fmt::format("vocab=50304 ranks={0} batch={0} zero={1} dtype=bf16 grad_dtype={2}", ranks, zero, grad_dtype));
  return o;
}

// Rajbhandari et al. 2020, section 5: bytes per rank with 2-byte parameters, g-byte gradients and K = 12.
TEST(Expected, MemoryMatchesPaper) {
  const double psi = 124'475'904;
  for (const char* grad_dtype : {"bf16", "fp32"}) {
    const double g = std::string(grad_dtype) == "bf16" ? 2 : 4;
    for (const double n : {2.0, 8.0, 64.0, 1024.0}) {
      const double stages[] = {2 + g + 12, 2 + g + 12 / n, 2 + (g + 12) / n, (2 + g + 12) / n};
      for (int64_t zero = 0; zero <= 3; ++zero) {
        const MemoryByCategory h = expected_memory(resolve(gpt2(static_cast<int64_t>(n), zero, grad_dtype))).front();
        const double found = static_cast<double>(h.parameters + h.gradients + h.optimizer);
        EXPECT_NEAR(found / (stages[zero] * psi), 1, n > 100 ? 0.03 : 0.003) << "stage " << zero << ", n " << n;
        EXPECT_GE(found, stages[zero] * psi * 0.999999);  // padding only adds
      }
    }
  }
}

// With everything in bfloat16 a parameter costs 8 bytes.
TEST(Expected, Bfloat16StateTakesEightBytesPerParameter) {
  TypedOptions o = gpt2(4, 0, "bf16");
  o["state_dtype"] = "bf16";
  const MemoryByCategory h = expected_memory(resolve(o)).front();
  EXPECT_NEAR(static_cast<double>(h.parameters + h.gradients + h.optimizer) / 124'475'904, 8, 0.001);
}

int64_t sent(const TypedOptions& o, const std::string& operation, const std::string& axis = "dp", int64_t steps = 1) {
  int64_t sum = 0;
  for (const SentBytes& s : expected_bytes(resolve(o), steps))
    if (s.axis == axis && s.operation == operation) sum += s.bytes;
  return sum;
}

void expect_held(const TypedOptions& o, size_t rank, int64_t parameters, int64_t gradients, int64_t optimizer) {
  const MemoryByCategory held = expected_memory(resolve(o)).at(rank);
  EXPECT_EQ(held.parameters, parameters);
  EXPECT_EQ(held.gradients, gradients);
  EXPECT_EQ(held.optimizer, optimizer);
}
int64_t optimizer_of_first(const TypedOptions& o) { return expected_memory(resolve(o)).front().optimizer; }

// One layer of 16 channels, context 8, vocabulary 32. Units in elements, each parameter rounded up to 16: tokens
// 512, positions 128, the block 16 + 16 + 768 + 48 + 256 + 16 + 16 + 16 + 1024 + 64 + 1024 + 16 = 3280, norm 32: 3952.
// Sharded over two ranks in multiples of 256: 512 + 512 + 3584 + 512 = 5120, which is 20 norm blocks.
TypedOptions tiny(std::string_view options) {
  TypedOptions o = verify_defaults();
  say(o, "layers=1 heads=2 channels=16 context=8 vocab=32");
  say(o, options);
  return o;
}

TEST(Expected, TrafficMatchesManualCount) {
  EXPECT_EQ(sent(tiny("ranks=2"), "all_reduce"), 2 * 3952 * 4);
  EXPECT_EQ(sent(tiny("ranks=2 zero=1"), "reduce_scatter"), 5120 * 4);
  EXPECT_EQ(sent(tiny("ranks=2 zero=1"), "all_gather"), 5120 * 4 + 20 * 8);
  EXPECT_EQ(sent(tiny("ranks=2 zero=2 microbatches=3"), "reduce_scatter"), 3 * 5120 * 4);
  // Gathered: tokens three times, positions once, block and norm twice.
  EXPECT_EQ(sent(tiny("ranks=2 zero=3 microbatches=3"), "all_gather"),
            3 * (3 * 512 + 512 + 2 * 3584 + 2 * 512) * 4 + 20 * 8);
  const TypedOptions o = tiny("ranks=2 dp_mode=dataparallel");
  EXPECT_EQ(sent(o, "reduce"), 3952 * 4);
  EXPECT_EQ(sent(o, "gather"), 6 * 8 * 32 * 4);  // the logits of half of 12 sequences
}

// The same model on four ranks in two groups of two: each group as above, and per step two all-reduces over two ranks
// of 2560 elements each.
TEST(Expected, HybridShardingTrafficMatchesManualCount) {
  const TypedOptions o = tiny("ranks=4 zero=2 shard_ranks=2 microbatches=3");
  EXPECT_EQ(sent(o, "reduce_scatter", "dp.shard"), 2 * 3 * 5120 * 4);
  EXPECT_EQ(sent(o, "all_gather", "dp.shard"), 2 * (5120 * 4 + 20 * 8));
  EXPECT_EQ(sent(o, "all_reduce", "dp.replicate"), 2 * 2 * 2560 * 4);
  EXPECT_EQ(sent(o, "all_reduce"), 0);
  expect_held(o, 3, 5120 * 4, 2560 * 4, 2560 * 8);
}

// Matrices of 768, 256, 1024 and 1024 elements: one rank owns 1024 + 768, the other 1024 + 256.
TEST(Expected, MuonTrafficMatchesManualCount) {
  const TypedOptions o = tiny("ranks=2 optimizer=muon");
  EXPECT_EQ(sent(o, "broadcast"), 3072 * 4);
  EXPECT_EQ(optimizer_of_first(o), 3072 * 4 + (3952 - 3072) * 8);
  // Shards of 1536: rank 0 has qkv and proj and the first half of up. Rank 0 owns up and qkv, rank 1 down and proj: so
  // rank 1 sends 512 elements of up, rank 0 sends 256 of proj, and each receives the results.
  EXPECT_EQ(sent(tiny("ranks=2 optimizer=muon zero=1"), "send"), 2 * (512 + 256) * 4);
}

// All ranks have the matrices qkv of 768 elements, proj of 256 and the router of four experts of 64; two of the four
// ranks have the matrices of 2048 and 1024 of an expert.
TEST(Expected, MuonTrafficWithExpertsMatchesManualCount) {
  TypedOptions o = tiny("ranks=4 family=llama experts=4 ep=2 optimizer=muon");
  EXPECT_EQ(sent(o, "broadcast"), 3 * (768 + 256 + 64) * 4);
  EXPECT_EQ(sent(o, "broadcast", "edp"), 4 * 3072 * 4);
  EXPECT_EQ(optimizer_of_first(o), (1088 + 2 * 3072) * 4 + (512 + 3 * 16) * 8);
  // Shards of 512: the third rank owns the router, which is in its shard; the second rank sends 256 elements of qkv. An
  // expert's shards are 1536: the first rank owns both matrices of one expert, the second rank those of the other
  // expert.
  o["zero"] = 1;
  EXPECT_EQ(sent(o, "send"), 2 * 256 * 4);
  EXPECT_EQ(sent(o, "send", "edp"), 2 * 2 * (512 + 1024 + 1536) * 4);
}

// Eight ranks in two groups of four. Padded for four ranks, the table of 512, the block of 16 + 768 + 256 + 16 + 64 and
// the norm of 16 have 1024, 2048 and 1024. Two of the four have an expert of 3072, in shards of 1536.
TEST(Expected, HybridShardingTrafficWithExpertsMatchesManualCount) {
  const TypedOptions o = tiny("ranks=8 batch=24 family=llama experts=4 ep=2 zero=2 shard_ranks=4 microbatches=3");
  EXPECT_EQ(sent(o, "reduce_scatter", "dp.shard"), 2 * 3 * 3 * 4096 * 4);
  EXPECT_EQ(sent(o, "reduce_scatter", "edp"), 4 * 3 * 2 * 3072 * 4);
  EXPECT_EQ(sent(o, "all_gather", "dp.shard"), 2 * 3 * (4096 * 4 + 16 * 8));
  EXPECT_EQ(sent(o, "all_gather", "edp"), 4 * 2 * (3072 * 4 + 12 * 8));
  EXPECT_EQ(sent(o, "all_reduce", "dp.replicate"), 2 * 4 * (1024 + 2 * 1536) * 4);
  expect_held(o, 7, (4096 + 2 * 3072) * 4, (1024 + 2 * 1536) * 4, (1024 + 2 * 1536) * 8);
}

// Synchronizations in steps 3, 6, 9, and in step 10, the last one.
TEST(Expected, DilocoTrafficMatchesManualCount) {
  const TypedOptions o = tiny("ranks=2 dp_mode=diloco sync_every=3 steps=10");
  EXPECT_EQ(sent(o, "all_reduce", "dp", 2), 0);
  EXPECT_EQ(sent(o, "all_reduce", "dp", 9), 3 * 2 * 3952 * 4);
  EXPECT_EQ(sent(o, "all_reduce", "dp", 10), 4 * 2 * 3952 * 4);
  EXPECT_EQ(sent(o, "all_reduce", "world", 10), 10 * 2 * 24);
  EXPECT_EQ(optimizer_of_first(o), 3952 * (8 + 8));
  // With nine steps the last synchronization is not repeated.
  EXPECT_EQ(sent(tiny("ranks=2 dp_mode=diloco sync_every=3 steps=9"), "all_reduce", "dp", 9), 3 * 2 * 3952 * 4);
}

// Two layers in two fragments: the embeddings and a block are 512 + 128 + 3280, the other block and the norm 3280 + 32.
// With H = 5 the first fragment is synchronized in steps 5 and 10, the second in 2, 7 and 12, and both in step 13.
TEST(Expected, DilocoTrafficWithFragmentsMatchesManualCount) {
  TypedOptions o = tiny("ranks=2 layers=2 dp_mode=diloco sync_every=5 sync_fragments=2 steps=13");
  EXPECT_EQ(sent(o, "all_reduce", "dp", 1), 0);
  EXPECT_EQ(sent(o, "all_reduce", "dp", 2), 2 * 3312 * 4);
  EXPECT_EQ(sent(o, "all_reduce", "dp", 5), 2 * (3312 + 3920) * 4);
  EXPECT_EQ(sent(o, "all_reduce", "dp", 12), 2 * (3 * 3312 + 2 * 3920) * 4);
  EXPECT_EQ(sent(o, "all_reduce", "dp", 13), 2 * (4 * 3312 + 3 * 3920) * 4);
  o["steps"] = 1;  // the last one is the first
  EXPECT_EQ(sent(o, "all_reduce", "dp", 1), 2 * (3312 + 3920) * 4);
}

// Differences have the gradients' dtype; synchronized values are fp32 with bf16 parameters.
TEST(Expected, DilocoTrafficInBfloat16MatchesManualCount) {
  TypedOptions o = tiny("ranks=2 dp_mode=diloco steps=1 dtype=bf16");
  EXPECT_EQ(sent(o, "all_reduce"), 2 * 3952 * 4);
  EXPECT_EQ(optimizer_of_first(o), 3952 * (12 + 8));
  o["grad_dtype"] = "bf16";
  EXPECT_EQ(sent(o, "all_reduce"), 2 * 3952 * 2);
}

// Two groups of two context ranks: gradients are reduced within a group in each step and, with H = 3, synchronized once
// between groups.
TEST(Expected, DilocoTrafficWithContextRanksMatchesManualCount) {
  const TypedOptions o = tiny("ranks=4 cp=2 dp_mode=diloco sync_every=3 steps=10");
  EXPECT_EQ(sent(o, "all_reduce", "cp", 3), 3 * 2 * 2 * 3952 * 4);
  EXPECT_EQ(sent(o, "all_reduce", "dp", 3), 2 * 2 * 3952 * 4);
}

// The memory bound of pipeline ranks equals a manual count, is tight, and is violated by a plan that holds more.

using Peaks = std::vector<int64_t>;

TEST(StageMemory, PeaksMatchManualCount) {
  const StageMemory m{
      .saved = 10, .deferred = 7, .forward = 12, .backward = 15, .input = 15, .weight = 9, .packs = 100};
  EXPECT_EQ(peaks_of_ranks(gpipe(2, 3), {m, m}, 1), (Peaks{100 + 20 + 15, 100 + 20 + 15}));
  EXPECT_EQ(peaks_of_ranks(one_f_one_b(2, 3), {m, m}, 1), (Peaks{100 + 10 + 15, 100 + 15}));
  EXPECT_EQ(peaks_of_ranks(naive(2, 3), {m, m}, 1), (Peaks{100 + 15, 100 + 15}));
  // Rank 0: F0 F1 I0 W0 F2 I1 W1 I2 W2. Rank 1: F0 I0 F1 I1 W0 F2 I2 W1 W2: at I1 it holds the 7 saved for W0.
  EXPECT_EQ(peaks_of_ranks(zb_h1(2, 3), {m, m}, 1), (Peaks{100 + 10 + 15, 100 + 7 + 15}));
  // Stages 1 and 2 are both on rank 1, which runs 1F 2F 2I 2W 1I 1W for one micro-batch. At 2I it holds the 10 of stage
  // 1; at 1I only the received gradient, which is included in its 15.
  EXPECT_EQ(peaks_of_ranks(zb_v(2, 1), {m, m, m, m}, 1).at(1), 200 + 10 + 15);
  const StageMemory little{.saved = 1, .deferred = 0, .forward = 5, .backward = 5, .input = 5, .weight = 0, .packs = 0};
  const Schedule both = parse_schedule("0F0 0F1 1F0 1B0 1F1 1B1 0B0 0B1\n", "both");
  // Before 1F0 the outputs of 0F0 and 0F1 are held, 3 bytes each; the first is the input of 1F0 and included in its 5.
  EXPECT_EQ(peaks_of_ranks(both, {little, little}, 3), (Peaks{2 + 3 + 5}));
}

TypedOptions pipeline_plan(const std::string& options) {
  return small_plan("layers=4 channels=64 context=64 pp=2 microbatches=6 batch=24 steps=3 " + options);
}

TEST(StageMemory, BoundIsTight) {
  for (const std::string& name : schedule_names())
    for (const char* recompute : {"none", "block"}) {
      const TypedOptions o = pipeline_plan(fmt::format("schedule={} recompute={}", name, recompute));
      const VerifyResult r = test::expect_passes(o);
      ASSERT_EQ(r.expected_peak.size(), 2U);
      for (size_t rank = 0; rank < 2; ++rank)
        EXPECT_GE(static_cast<double>(r.peak[rank]), 0.9 * static_cast<double>(r.expected_peak[rank]))
            << test::make_command(o) << ", rank " << rank;
    }
}

// GPipe's order violates the bound of 1F1B.
TEST(StageMemory, DetectsExcessMicrobatchInFlight) {
  const TypedOptions o = pipeline_plan("schedule=gpipe");
  const VerifyResult r = verify(resolve(o));
  const auto stages = measure_stages(resolve(o), 0);
  const Peaks all = peaks_of_ranks(gpipe(2, 6), stages, handed_bytes(resolve(o))),
              few = peaks_of_ranks(one_f_one_b(2, 6), stages, handed_bytes(resolve(o)));
  for (size_t rank = 0; rank < 2; ++rank)
    EXPECT_GT(r.peak[rank], peak_bound(r.expected_peak[rank] - all[rank] + few[rank])) << rank;
}

// The contract's bounds from both sides: values just below pass, values just above fail.

using Bounds = test::OneThread;

TEST_F(Bounds, ToleranceIsCalibratedForSplitReductions) {
  const auto bound = [](DType dtype, int64_t layers, double orders, double error) {
    return compute_tolerance(dtype, layers, orders, error).bound;
  };
  EXPECT_EQ(bound(DType::float64, 4, 1, 1), 1e-12);  // independent of measurements
  const double fp32 = 1.03 * 1.03 * std::ldexp(1.0, -24), bf16 = 1.03 * 1.03 * std::ldexp(1.0, -8);  // two layers
  EXPECT_DOUBLE_EQ(bound(DType::float32, 2, 0, 0), 64 * fp32);
  EXPECT_DOUBLE_EQ(bound(DType::float32, 2, 15.9 * fp32, 31.9 * fp32), 64 * fp32);
  EXPECT_DOUBLE_EQ(bound(DType::float32, 2, 20 * fp32, 0), 80 * fp32);
  EXPECT_DOUBLE_EQ(bound(DType::float32, 2, 20 * fp32, 50 * fp32), 100 * fp32);
  EXPECT_DOUBLE_EQ(bound(DType::float32, 2, 1, 0), 256 * fp32);
  EXPECT_DOUBLE_EQ(bound(DType::float32, 2, 0, 1), 256 * fp32);
  EXPECT_DOUBLE_EQ(bound(DType::bfloat16, 2, 30 * bf16, 0), 120 * bf16);
  EXPECT_DOUBLE_EQ(bound(DType::bfloat16, 2, 1, 0), 256 * bf16);
}

TEST_F(Bounds, CalibrationStaysWithinLimits) {
  for (const auto& [dtype, bits] : {std::pair{"dtype=fp32 steps=3", 24}, {"dtype=bf16 steps=3", 8}}) {
    const TrainConfig job = resolve(small_plan(dtype));
    const double unit = std::pow(1.03, 2) * std::ldexp(1.0, -bits);
    const double bound = compute_tolerance(job, test::synthetic(job)).bound;
    EXPECT_GE(bound, 63.999 * unit);
    EXPECT_LE(bound, 256.001 * unit);
  }
}

// --- values and tensors of a step ---

VerifyResult within(double bound) {
  VerifyResult r;
  r.exact = false;
  r.bound = bound;
  return r;
}

bool number_passes(VerifyResult result, double found, double expected, bool exactly = false) {
  Comparison comparison(result);
  if (exactly) comparison.exactly();
  comparison.number(1, "gradient norm", found, expected);
  EXPECT_EQ(result.bitwise, found == expected);
  return result.wrong_steps.empty();
}

TEST_F(Bounds, RejectScalarsOutsideTolerance) {
  const double next = std::nextafter(3.0, 4.0);
  EXPECT_TRUE(number_passes({}, 3, 3));
  EXPECT_FALSE(number_passes({}, next, 3));
  EXPECT_TRUE(number_passes(within(1e-3), 3, 3, true));
  EXPECT_FALSE(number_passes(within(1e-3), next, 3, true));
  for (const double sign : {-1.0, 1.0}) {
    EXPECT_TRUE(number_passes(within(1e-3), 3 * (1 + sign * 0.999e-3), 3));
    EXPECT_FALSE(number_passes(within(1e-3), 3 * (1 + sign * 1.001e-3), 3));
    EXPECT_FALSE(number_passes(within(1e-3), -3 * (1 + sign * 1.001e-3), -3));
  }
  EXPECT_FALSE(number_passes(within(1e-3), std::nan(""), 3));
  EXPECT_FALSE(number_passes(within(1e-3), INFINITY, 3));
}

// Two parameters of one unit, each (12) and 0.25; `found` differs from them.
struct Tensors {
  ArenaPtr arena = make_arena();
  DType dtype;
  Parameter first{.name = "first", .full_shape = {12}}, second{.name = "second", .full_shape = {12}};
  Tensor unsharded = filled({32});
  std::vector<NamedTensor> found = {{"first", filled({12})}, {"second", filled({12})}};
  explicit Tensors(DType d) : dtype(d) {}

  Tensor filled(const Shape& shape) const {
    Tensor t = Tensor::empty(shape, dtype, arena);
    t.fill(0.25);
    return t;
  }
  bool pass(VerifyResult result, bool exactly = false) {
    const FlatUnit unit{
        .name = "unit", .values = unsharded, .grads = {}, .slots = {{&first, 0, 12}, {&second, 16, 12}}};
    Comparison comparison(result);
    if (exactly) comparison.exactly();
    double worst = 0;
    const std::vector<FlatUnit> units{unit};
    const std::vector<NamedTensor> nobody;
    comparison.tensors({.step = 1,
                        .kind = TensorDifference::Kind::gradient,
                        .found = found,
                        .units = units,
                        .full = {unsharded},
                        .owners = nobody},
                       worst);
    return result.wrong_steps.empty();
  }
};

TEST_F(Bounds, RejectTensorsOutsideTolerance) {
  // Twelve elements of 0.25 have the norm 0.25 sqrt(12), so a change d of one element is a relative error of d / (0.25
  // sqrt(12)).
  const double norm = 0.25 * std::sqrt(12.0);
  for (const size_t which : {0, 1})
    for (const int64_t place : {0, 5, 11}) {
      const auto with = [&](double change) {
        Tensors t(DType::float64);
        t.found[which].tensor.data<double>()[place] += change;
        return t;
      };
      EXPECT_TRUE(with(0).pass({}));
      EXPECT_TRUE(with(0.999e-3 * norm).pass(within(1e-3)));
      EXPECT_TRUE(with(-0.999e-3 * norm).pass(within(1e-3)));
      EXPECT_FALSE(with(1.001e-3 * norm).pass(within(1e-3)));
      EXPECT_FALSE(with(-1.001e-3 * norm).pass(within(1e-3)));
      EXPECT_FALSE(with(std::nan("")).pass(within(1e-3)));
      EXPECT_FALSE(with(1e-16).pass({}));  // one bit
      EXPECT_FALSE(with(1e-16).pass(within(1e-3), true));
      EXPECT_TRUE(with(1e-16).pass(within(1e-3)));
    }
  for (const DType dtype : {DType::float32, DType::bfloat16})
    for (int64_t byte = 0; byte < 12 * element_size(dtype); ++byte)
      for (const size_t which : {0, 1}) {
        Tensors t(dtype);
        t.found[which].tensor.raw()[byte] ^= std::byte{1};
        EXPECT_FALSE(t.pass({})) << byte;
        EXPECT_FALSE(t.pass(within(1e9), true)) << byte;
      }
}

// Elements in zero_grad_range, whose true gradient is zero, are not compared; all others are.
TEST_F(Bounds, IgnoreZeroGradientRangesOfTensors) {
  for (int64_t place = 0; place < 12; ++place) {
    Tensors t(DType::float64);
    t.first.zero_grad_range = {4, 8};
    t.found[0].tensor.data<double>()[place] += 2e-3 * 0.25 * std::sqrt(8.0);
    EXPECT_EQ(t.pass(within(1e-3)), place >= 4 && place < 8) << place;
  }
}

// --- totals of a run ---

// Everything is correct with these two pipeline ranks.
VerifyResult right() {
  VerifyResult r;
  r.sent = r.expected_sent = {{"dp", "all_reduce", 8, 1000, 0}, {"pp", "send", 2, 64, 0}};
  r.held = r.expected_held = {{100, 200, 300}, {110, 210, 310}};
  r.peak = r.expected_peak = {1'000'000, 2'000'000};
  r.in_flight = r.expected_in_flight = {2, 1};
  r.bubble = r.bubble_formula = 0.25;
  for (int i = 0; i < 40; ++i) r.losses.push_back(4 - 0.01 * i);
  return r;
}

bool totals_pass(const std::function<void(VerifyResult&)>& corrupt, const Plan& plan = {.pp = 2}) {
  VerifyResult r = right();
  corrupt(r);
  check_totals(r, plan);
  return r.passed();
}

TEST_F(Bounds, RejectAnyDifferenceOfCounts) {
  EXPECT_TRUE(totals_pass([](VerifyResult&) {}));
  for (const int64_t by : {-1, 1}) {
    for (const size_t i : {0, 1}) {
      EXPECT_FALSE(totals_pass([&](VerifyResult& r) { r.sent[i].bytes += by; }));
      EXPECT_FALSE(totals_pass([&](VerifyResult& r) { r.sent[i].calls += by; }));
      EXPECT_FALSE(totals_pass([&](VerifyResult& r) { r.held[i].parameters += by; }));
      EXPECT_FALSE(totals_pass([&](VerifyResult& r) { r.held[i].gradients += by; }));
      EXPECT_FALSE(totals_pass([&](VerifyResult& r) { r.held[i].optimizer += by; }));
      EXPECT_FALSE(totals_pass([&](VerifyResult& r) { r.in_flight[i] += by; }));
    }
    EXPECT_TRUE(totals_pass([&](VerifyResult& r) { *r.bubble += static_cast<double>(by) * 0.9e-9; }));
    EXPECT_FALSE(totals_pass([&](VerifyResult& r) { *r.bubble += static_cast<double>(by) * 1.1e-9; }));
  }
  EXPECT_FALSE(totals_pass([](VerifyResult& r) { r.sent.push_back({"tp", "all_reduce", 1, 0, 0}); }));
  EXPECT_FALSE(totals_pass([](VerifyResult& r) { r.sent[1].axis = "tp"; }));
  EXPECT_FALSE(totals_pass([](VerifyResult& r) { r.sent[1].operation = "recv"; }));
  EXPECT_FALSE(totals_pass([](VerifyResult& r) { r.sent.pop_back(); }));
  const auto silent = [](VerifyResult& r) { r.sent = r.expected_sent = {}; };
  EXPECT_FALSE(totals_pass(silent));
  EXPECT_TRUE(totals_pass(silent, {}));
}

TEST_F(Bounds, RejectPeaksAboveBound) {
  EXPECT_EQ(peak_bound(0), 16384);
  EXPECT_EQ(peak_bound(1'000'000), 1'036'384);
  for (const size_t rank : {0, 1}) {
    EXPECT_TRUE(totals_pass([&](VerifyResult& r) { r.peak[rank] = rank == 0 ? 1'036'384 : 2'056'384; }));
    EXPECT_FALSE(totals_pass([&](VerifyResult& r) { r.peak[rank] = rank == 0 ? 1'036'385 : 2'056'385; }));
  }
}

TEST_F(Bounds, RejectIncreasingAndNonFiniteLosses) {
  const auto risen = [](VerifyResult& r) { std::reverse(r.losses.begin(), r.losses.end()); };
  EXPECT_FALSE(totals_pass(risen));
  EXPECT_FALSE(totals_pass([](VerifyResult& r) { r.losses.assign(40, 3.0); }));
  EXPECT_TRUE(totals_pass([&](VerifyResult& r) {
    risen(r);
    r.losses.pop_back();  // too few to judge
  }));
  EXPECT_FALSE(totals_pass([](VerifyResult& r) { r.losses = {1, std::nan("")}; }));
  EXPECT_FALSE(totals_pass([](VerifyResult& r) { r.losses = {INFINITY, 1}; }));
}

}  // namespace
}  // namespace tessera
