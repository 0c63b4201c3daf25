// The bounds of the contract, each from both sides: what is just below passes, what is just above does not.

#include "tests/support/one_thread.h"
#include "tests/verify/plans.h"
#include "verify/comparison.h"

namespace tessera {
namespace {

using test::small_plan;
using Bounds = test::OneThread;

TEST_F(Bounds, OfPlansThatSplitSums) {
  const auto bound = [](DType dtype, int64_t layers, double orders, double error) {
    return tolerance_of(dtype, layers, orders, error).bound;
  };
  EXPECT_EQ(bound(DType::float64, 4, 1, 1), 1e-12);  // whatever was measured
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

TEST_F(Bounds, CalibrationOfAJobStaysWithinItsLimits) {
  for (const char* dtype : {"fp32", "bf16"}) {
    TrainOptions o = small_plan();
    o["dtype"] = dtype;
    o["steps"] = 3;
    const Job job = job_of(o);
    const double unit = std::pow(1.03, 2) * std::ldexp(1.0, text_of(o.optim.dtype) == "bf16" ? -8 : -24);
    const double bound = tolerance_of(job, counted_sequences(40, 16, o.optim.batch, 1)).bound;
    EXPECT_GE(bound, 63.999 * unit);
    EXPECT_LE(bound, 256.001 * unit);
  }
}

// --- numbers and tensors of a step ---

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

TEST_F(Bounds, OfANumber) {
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
  Parameter first{.name = "first", .whole = {12}}, second{.name = "second", .whole = {12}};
  Tensor whole = filled({32});
  std::vector<NamedTensor> found = {{"first", filled({12})}, {"second", filled({12})}};
  explicit Tensors(DType d) : dtype(d) {}

  Tensor filled(const Shape& shape) const {
    Tensor t = Tensor::empty(shape, dtype, arena);
    t.fill(0.25);
    return t;
  }
  bool pass(VerifyResult result, bool exactly = false) {
    const FlatUnit unit{.name = "unit", .values = whole, .grads = {}, .slots = {{&first, 0, 12}, {&second, 16, 12}}};
    Comparison comparison(result);
    if (exactly) comparison.exactly();
    double worst = 0;
    const std::vector<FlatUnit> units{unit};
    const std::vector<NamedTensor> nobody;
    comparison.tensors({.step = 1,
                        .kind = TensorDifference::Kind::gradient,
                        .found = found,
                        .units = units,
                        .whole = {whole},
                        .owners = nobody},
                       worst);
    return result.wrong_steps.empty();
  }
};

TEST_F(Bounds, OfATensor) {
  // 0.25 in twelve places has the norm 0.25 sqrt(12): a change d of one place is d / (0.25 sqrt(12)) of it.
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
    for (int64_t byte = 0; byte < 12 * size_of(dtype); ++byte)
      for (const size_t which : {0, 1}) {
        Tensors t(dtype);
        t.found[which].tensor.raw()[byte] ^= std::byte{1};
        EXPECT_FALSE(t.pass({})) << byte;
        EXPECT_FALSE(t.pass(within(1e9), true)) << byte;
      }
}

// Where the true gradient vanishes nothing is compared, and beside that place all is.
TEST_F(Bounds, OfATensorThatVanishesInAPart) {
  for (int64_t place = 0; place < 12; ++place) {
    Tensors t(DType::float64);
    t.first.vanishes = {4, 8};
    t.found[0].tensor.data<double>()[place] += 2e-3 * 0.25 * std::sqrt(8.0);
    EXPECT_EQ(t.pass(within(1e-3)), place >= 4 && place < 8) << place;
  }
}

// --- counts of a whole run ---

// All is right with these two pipeline ranks.
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

bool totals_pass(const std::function<void(VerifyResult&)>& spoil, const Plan& plan = {.pp = 2}) {
  VerifyResult r = right();
  spoil(r);
  check_totals(r, plan);
  return r.passed();
}

TEST_F(Bounds, OfWhatIsCounted) {
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
  const auto silent = [](VerifyResult& r) { r.sent = r.expected_sent = {}; };
  EXPECT_FALSE(totals_pass(silent));
  EXPECT_TRUE(totals_pass(silent, {}));
}

TEST_F(Bounds, OfAPeak) {
  EXPECT_EQ(peak_bound(0), 16384);
  EXPECT_EQ(peak_bound(1'000'000), 1'036'384);
  for (const size_t rank : {0, 1}) {
    EXPECT_TRUE(totals_pass([&](VerifyResult& r) { r.peak[rank] = rank == 0 ? 1'036'384 : 2'056'384; }));
    EXPECT_FALSE(totals_pass([&](VerifyResult& r) { r.peak[rank] = rank == 0 ? 1'036'385 : 2'056'385; }));
  }
}

TEST_F(Bounds, OfTheLosses) {
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
