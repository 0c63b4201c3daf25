// Verification detects every injected fault under every applicable strategy, and the diagnosis identifies its cause;
// errors of known size are detected: a single bit, and both sides of a bound.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <functional>
#include <initializer_list>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "tests/support/errors.h"
#include "tests/support/one_thread.h"
#include "tests/verify/draw.h"
#include "train/check.h"
#include "verify/defects/defects.h"

namespace tessera {
namespace {

using namespace test;

// Expects the unmodified plan to pass, and with the fault verification to fail or training to stop.
void expect_detected_by_verify(std::string_view mutation, const TypedOptions& o) {
  const TrainConfig job = resolve(o);
  ASSERT_TRUE(verify(job).passed()) << make_command(o);
  EXPECT_FALSE(verify(job, with_fault(find_fault(mutation), job)).passed()) << mutation << ": " << make_command(o);
}

// The same under each of the plans, with both kinds of optimizer.
void expect_detected_by_verify(std::string_view mutation, std::string_view options,
                               std::initializer_list<std::string_view> each) {
  for (const char* optimizer : {"sgd", "adamw"})
    for (const std::string_view plan : each)
      expect_detected_by_verify(
          mutation, small_plan(fmt::format("steps=3 microbatches=2 clip=0.1 timeout=5 optimizer={} {} {}", optimizer,
                                           options, plan)));
}

constexpr auto kThree = "ranks=3 batch=12";

TEST(Mutation, DetectsFaultsUnderZeroStages) {
  for (const char* mutation : {"missing-gradient-sum", "gradients-divided-twice", "skipped-microbatch",
                               "shifted-sequences", "stale-part", "ring-order", "unclipped-rank"})
    expect_detected_by_verify(mutation, kThree, {"zero=0", "zero=1", "zero=2", "zero=3"});
}

TEST(Mutation, DetectsFaultsUnderDataParallelAndParameterServer) {
  for (const char* mutation : {"gradients-divided-twice", "skipped-microbatch", "shifted-sequences"})
    expect_detected_by_verify(mutation, kThree, {"dp_mode=dataparallel", "dp_mode=ps-sync"});
}

// Model parallelism on the smallest mesh that has the axis, alone and combined with data parallelism.
TEST(Mutation, DetectsFaultsOnModelParallelAxes) {
  const std::pair<const char*, const char*> cases[] = {{"missing-input-gradient-sum", "tp=2"},
                                                       {"unsummed-norm-weight", "tp=2 sp=true"},
                                                       {"wrong-causal-mask", "cp=2"},
                                                       {"unsummed-head-norm", "family=llama qk_norm=true tp=2"},
                                                       {"wrong-positions", "family=llama cp=2"},
                                                       {"wrong-documents", "document_mask=true vocab=12 cp=2"},
                                                       {"wrong-documents", "document_mask=true vocab=12 pp=2"},
                                                       {"other-targets", "pp=2"},
                                                       {"untied-copies", "pp=2"},
                                                       {"missing-gradient-sum", "pp=2 dp=2 tp=2"},
                                                       {"gradients-divided-twice", "pp=2 dp=2 tp=2"},
                                                       {"skipped-microbatch", "pp=2 dp=2 tp=2"},
                                                       {"shifted-sequences", "pp=2 dp=2 tp=2"},
                                                       {"stale-part", "pp=2 dp=2 tp=2"},
                                                       {"unclipped-rank", "pp=2 dp=2 tp=2"}};
  for (const auto& [mutation, options] : cases)
    expect_detected_by_verify(mutation, std::string("batch=8 ") + options, {"dtype=fp64", "dtype=fp32"});
}

// Errors of known size: one bit where equality is required, and both sides of the bound elsewhere.

using InjectedErrors = test::OneThread;

void flip_lowest_bit(const Tensor& t, int64_t at) { t.raw()[at * element_size(t.dtype())] ^= std::byte{1}; }

// Flips the lowest bit of the first local element in the tensor that `of` selects from a unit.
void flip(const std::vector<FlatUnit>& units, const std::function<Tensor(const FlatUnit&)>& of) {
  for (const FlatUnit& unit : units)
    for (const Slot& slot : unit.slots)
      if (slot.begin >= 0 && slot.begin < unit.values.numel() && !slot.parameter->is_copy())
        return flip_lowest_bit(of(unit), slot.begin);
}

using Injection = std::function<void(Trainer&)>;

VerifyHooks after_update(const Injection& inject) {
  return {.update = [=](Trainer& t, const StepReport& report) {
    t.update(report);
    inject(t);
  }};
}
VerifyHooks after_reductions(const Injection& inject) { return {.summed = inject}; }

void expect_bits(const TypedOptions& o) {
  const TrainConfig job = resolve(o);
  const auto passes = [&](const VerifyHooks& hooks) {
    const VerifyResult r = verify(job, hooks);
    EXPECT_EQ(r.bitwise, r.passed() && r.exact) << make_command(o);
    return r.passed();
  };
  ASSERT_TRUE(verify(job).passed()) << make_command(o);
  const auto of_values = [](const FlatUnit& unit) { return unit.values; };
  EXPECT_FALSE(passes(after_update([&](Trainer& t) { flip(t.state().strategy().resident_units(), of_values); })))
      << make_command(o);
  for (const std::string kind : {"m", "v", "master"}) {
    if (kind == "master" && value_name(o.optim.dtype) != "bf16") continue;
    EXPECT_FALSE(passes(after_update([&](Trainer& t) {
      flip(t.state().strategy().shards(), [&](const FlatUnit& unit) {
        for (const NamedTensor& state : t.state().optimizer().state())
          if (state.name == unit.name + "." + kind) return state.tensor;
        return Tensor();
      });
    }))) << kind
         << " of " << make_command(o);
  }
  if (o.plan.tp > 1) return;  // gradients need only be within a bound
  EXPECT_FALSE(passes(after_reductions([](Trainer& t) {
    flip(t.state().strategy().shards(), [](const FlatUnit& unit) { return unit.grads; });
  }))) << make_command(o);
}

TypedOptions one_step(const char* dtype, std::string_view options) {
  return small_plan(fmt::format("steps=1 batch=4 ranks=2 dtype={} {}", dtype, options));
}

TEST_F(InjectedErrors, OneFlippedBitIsDetectedUnderBitwiseBounds) {
  for (const char* dtype : {"fp64", "fp32", "bf16"})
    for (const char* options : {"zero=0", "zero=2", "zero=3"}) expect_bits(one_step(dtype, options));
}

TEST_F(InjectedErrors, OneFlippedBitOfStateIsDetectedUnderSplitReductions) {
  for (const char* dtype : {"fp32", "bf16"}) expect_bits(one_step(dtype, "tp=2"));
}

// Scales the gradient of a replicated parameter by 1 + `fraction`.
VerifyHooks too_large_by(double fraction) {
  return after_reductions([=](Trainer& t) {
    for (const FlatUnit& unit : t.state().strategy().shards())
      for (const Slot& slot : unit.slots)
        if (slot.parameter->shard.is_replicated() && slot.parameter->zero_grad_range.end == 0) {
          Tensor part = unit.grads.narrow(0, slot.begin, slot.size);
          return scale_(part, 1 + fraction);
        }
  });
}

TEST_F(InjectedErrors, GradientErrorsAboveBoundAreDetected) {
  for (const char* dtype : {"fp64", "fp32", "bf16"})
    for (const char* options : {"tp=2", "cp=2"}) {
      const TypedOptions o = one_step(dtype, options);
      const TrainConfig job = resolve(o);
      const VerifyResult right = verify(job);
      ASSERT_TRUE(right.passed()) << make_command(o);
      const double unit = value_name(o.optim.dtype) == "fp64"
                              ? 1e-12
                              : 256 * 1.0609 * std::ldexp(1.0, value_name(o.optim.dtype) == "bf16" ? -8 : -24);
      EXPECT_LE(right.bound, 1.001 * unit);
      const double own = right.grad_max_rel;  // rounding error
      ASSERT_LT(own, 0.5 * right.bound) << make_command(o);
      EXPECT_TRUE(verify(job, too_large_by(right.bound - 1.01 * own)).passed()) << make_command(o);
      const VerifyResult wrong = verify(job, too_large_by(right.bound + 1.01 * own + 0.01 * right.bound));
      EXPECT_FALSE(wrong.passed()) << make_command(o);
      EXPECT_LT(wrong.grad_max_rel, 2 * right.bound);
    }
}

// In TESSERA_PLANS random plans selected by TESSERA_DRAW, each injected fault fails verification, and the diagnosis
// identifies its cause from observations alone.

// A plan without faults, possibly invalid.
TypedOptions sample_plan(Sampler& d) {
  TypedOptions o = small_plan();
  sample(
      d, o,
      "steps=3 timeout=20 channels=16 heads=4 layers=2..3 family=gpt2|llama pp=1|1|2 dp=1|2|2|3 tp=1|1|2 cp=1|1|1|2");
  o["sp"] = o.plan.tp > 1 && d.between(0, 2) == 0;
  sample(d, o, "zero=0..3 microbatches=1..3");
  o["batch"] = o.plan.dp * o.plan.microbatches * d.between(1, 3);
  sample(d, o,
         "schedule=1f1b|gpipe|naive|zb-h1|zb-v recompute=none|none|block untied=true|false|false|false "
         "document_mask=true|false|false|false dropout=0|0.1 optimizer=adamw|adam|sgd dtype=fp32|fp32|fp64|bf16 "
         "seed=1..1000");
  return o;
}

// The plan changed to meet all requirements of the fault (InjectedFault::needs()); nullopt if they cannot all be met.
std::optional<TypedOptions> with_needs(TypedOptions o, const InjectedFault& d) {
  for (int round = 0; round < 3; ++round) {
    const std::vector<Need> needs = d.needs(resolve(o));
    if (needs.empty()) return o;
    for (std::string name; const Need& n : needs) {
      name = n.field;
      std::ranges::replace(name, '_', '-');
      set_option(o, name, n.value);
    }
  }
  return {};
}

std::optional<TypedOptions> sample_with(const InjectedFault& fault, uint64_t trial) {
  Sampler d("defects", trial);
  for (int attempt = 0; attempt < 30; ++attempt) try {
      const TypedOptions sampled = sample_plan(d);
      auto o = with_needs(sampled, fault);
      if (o && o->optim.document_mask) (*o)["vocab"] = 12;  // with more, the end-of-document token may be missing
      if (!o || resolve(*o).plan.ranks() > 8) continue;
      check(resolve(*o));
      return o;
    } catch (const Error&) {  // invalid plan
      continue;
    }
  return {};
}

std::string to_string(const VerifyResult& r) {
  std::string out;
  for (const Diagnosis& d : r.diagnosis) out += fmt::format("  {}: {}\n", d.cause, d.evidence);
  for (size_t i = 0; i < std::min<size_t>(4, r.failures.size()); ++i) out += "    " + r.failures[i] + "\n";
  return out;
}

TEST(InjectedFaults, AreDiagnosedFromSymptoms) {
  const uint64_t count = test::plans(all_faults().size());
  uint64_t caught = 0, right = 0;
  for (uint64_t trial = 0; trial < count; ++trial) {
    const InjectedFault& fault = all_faults()[trial % all_faults().size()];
    const auto o = sample_with(fault, trial);
    ASSERT_TRUE(o) << fault.name << " has no plan";
    const VerifyResult r =
        explain(resolve(*o), [&](const TrainConfig& j) { return with_fault_if_applicable(fault, j); });
    caught += r.passed() ? 0 : 1;
    if (r.passed()) {
      std::printf("NOT SEEN %s: %s\n", fault.name.data(), make_command(*o).c_str());
      continue;
    }
    const bool named = r.diagnosis.at(0).cause == fault.cause;
    right += named ? 1 : 0;
    if (named) continue;
    std::printf("%s is taken for %s: %s\n%s", fault.name.data(), r.diagnosis[0].cause.data(), make_command(*o).c_str(),
                to_string(r).c_str());
  }
  std::printf("%lu injected, %lu detected, %lu named by the first diagnosis\n", count, caught, right);
  EXPECT_EQ(caught, count);
  EXPECT_GE(static_cast<double>(right), 0.95 * static_cast<double>(count));
}

// Diagnosis rules on synthetic observations; nothing is run.

using Kind = TensorDifference::Kind;

std::string_view first_index(const Observations& seen) { return diagnose(seen).at(0).cause; }

TensorDifference gradient(const std::string& name, std::vector<int64_t> shape, std::optional<double> factor = {}) {
  TensorDifference out;
  out.step = 1;
  out.kind = Kind::gradient;
  out.name = name;
  out.shape = std::move(shape);
  out.distance = 0.5;
  out.elements = out.wrong = 4;
  out.factor = factor;
  return out;
}

Observations of_two() {
  Observations o;
  o.dp = 2;
  o.batch = 4;
  o.trained = 2;
  return o;
}

TEST(Diagnosis, IsEmptyForCorrectRun) { EXPECT_TRUE(diagnose(of_two()).empty()); }

TEST(Diagnosis, DistinguishesScaleFromDoubleReduction) {
  Observations o = of_two();
  o.tensors = {gradient("tokens.weight", {4, 2}, 2.0), gradient("norm.weight", {2}, 2.0)};
  EXPECT_EQ(first_index(o), "wrong-scale");
  o.sent = {{"dp", "all_reduce", 2, 2, 64, 32}};
  EXPECT_EQ(first_index(o), "summed-twice");
  o.sent = {{"dp", "all_reduce", 0, 2, 0, 32}};
  EXPECT_EQ(first_index(o), "missing-gradient-sum");
  o.sent.clear();
  o.tensors[1].factor = 3.0;
  EXPECT_EQ(first_index(o), "unknown");
}

TEST(Diagnosis, IdentifiesMissingTensorAxisReduction) {
  Observations o = of_two();
  o.tp = 2;
  o.sent = {{"tp", "all_reduce", 6, 8, 600, 620}};
  o.tensors = {gradient("blocks.1.norm1.weight", {2}), gradient("blocks.1.norm1.bias", {2})};
  EXPECT_EQ(first_index(o), "weight-not-summed");
  o.tensors.push_back(gradient("tokens.weight", {4, 2}));
  EXPECT_EQ(first_index(o), "missing-backward-sum");
  o.scalars = {{1, "loss", 2, 1}};
  EXPECT_EQ(first_index(o), "missing-forward-sum");
}

// With a wide tolerance, byte counts are the only evidence.
TEST(Diagnosis, DistinguishesWeightFromActivationReductionByBytes) {
  Observations o = of_two();
  o.sent = {{"tp", "all_reduce", 6, 8, 600, 620}};
  EXPECT_EQ(first_index(o), "weight-not-summed");
  o.sent[0].expected_bytes = 1000;
  EXPECT_EQ(first_index(o), "missing-backward-sum");
}

TEST(Diagnosis, IdentifiesSequencesByGradientCoefficients) {
  Observations o = of_two();
  o.microbatches = 1;  // two sequences each
  o.tensors = {gradient("tokens.weight", {4, 2})};
  const auto with = [&](std::vector<double> weights) {
    o.mixture = Mixture{1, std::move(weights), 0.01};
    return first_index(o);
  };
  EXPECT_EQ(with({1, 1, 0, 0}), "microbatch-skipped");
  EXPECT_EQ(with({2, 2, 0, 0}), "microbatch-repeated");
  EXPECT_EQ(with({1, 2, 1, 0}), "wrong-sequences");
  EXPECT_EQ(with({1, 1, 1, 1}), "unknown");
}

// In the second step, the last stage of one or two pipelines reads wrong targets, except in every fourth sequence.
TEST(Diagnosis, ReportsRanksWithWrongTokens) {
  const auto expect = [](int first_rank, const std::vector<std::string>& lines, const std::string& evidence) {
    VerifyHooks hooks;
    hooks.loading = [=](Sequences s, const TrainConfig& run, int rank) {
      s.load = [=, right = s.load, context = run.model.context](int64_t step, int64_t first, int64_t count, int32_t* in,
                                                                int32_t* out) {
        right(step, first, count, in, out);
        std::vector<int32_t> other(static_cast<size_t>(context));
        for (int64_t i = 0; i < count && rank >= first_rank && step == 1; ++i)
          if ((first + i) % 4 != 0) right(8, first + i, 1, other.data(), out + i * context);
      };
      return s;
    };
    const VerifyResult r = explain(resolve(small_plan("pp=2 dp=3 batch=12 microbatches=2 steps=3")),
                                   [=](const TrainConfig&) { return hooks; });
    std::vector<std::string> found = r.failures;
    std::erase_if(found, [](const std::string& failure) { return !failure.starts_with("rank"); });
    EXPECT_EQ(found, lines);
    ASSERT_FALSE(r.diagnosis.empty());
    EXPECT_EQ(r.diagnosis[0].cause, "wrong-targets");
    EXPECT_TRUE(has(r.diagnosis[0].evidence, evidence + "), all of them of the last pipeline stage"));
  };
  const std::string was = " received tokens that differ from the oracle's in 3 sequences, first in sequence ",
                    given = " given tokens that differ from the plan's (step 2: first in place of sequence ";
  expect(5, {"rank 5" + was + "9 of step 2"}, "rank 5 is" + given + "9");
  expect(4, {"rank 4" + was + "5 of step 2", "rank 5" + was + "9 of step 2"}, "ranks 4, 5 are" + given + "5");
}

TEST(Diagnosis, IdentifiesUpdateErrors) {
  Observations o = of_two();
  TensorDifference p = gradient("tokens.weight", {4, 2}), m = p;
  p.kind = Kind::parameter;
  m.kind = Kind::state;
  m.name += ".m";
  m.factor = 10.0;
  o.tensors = {p, m};
  EXPECT_EQ(first_index(o), "clipping");
  o.tensors[0].unchanged = true;
  EXPECT_EQ(first_index(o), "update-skipped");
  o.tensors[0].wrong = 1;  // one of four elements
  EXPECT_EQ(first_index(o), "stale-part");
  o.permuted = true;
  EXPECT_EQ(first_index(o), "misplaced-gather");
}

TEST(Diagnosis, DescribesCauseOfEachFault) {
  for (const InjectedFault& d : all_faults()) EXPECT_FALSE(text_of_cause(d.cause).empty()) << d.name;
  EXPECT_EQ(text_of_cause("unknown"), "no rule matches");
  EXPECT_EQ(text_of_cause("a-cause"), "");
}

TEST(InjectedFaults, ReportUnmetRequirements) {
  TypedOptions o = small_plan();
  o["dp"] = 2;
  EXPECT_EQ(error_message([&] { with_fault(find_fault("unsummed-head-norm"), resolve(o)); }),
            "`defect`: unsummed-head-norm does not apply to this plan; it requires `tp` 2 and `family` llama and "
            "`qk_norm` (4 ranks)");
  EXPECT_EQ(error_message([&] { with_fault(find_fault("ring-order"), resolve(o)); }),
            "`defect`: ring-order does not apply to this plan; it requires `dp` 3 (3 ranks)");
  EXPECT_TRUE(error_message([&] { find_fault("a-bug"); }).ends_with("got 'a-bug'"));
}

TEST(InjectedFaults, RandomFaultIsApplicable) {
  TypedOptions o = small_plan();
  o.ranks = o["tp"] = 2;
  std::set<std::string_view> sampled;
  for (uint64_t sample = 0; sample < 60; ++sample) {
    const InjectedFault& d = random_fault(resolve(o), sample);
    EXPECT_EQ(&d, &random_fault(resolve(o), sample));
    EXPECT_TRUE(d.needs(resolve(o)).empty()) << d.name;
    sampled.insert(d.name);
  }
  EXPECT_GE(sampled.size(), 5U);
}

}  // namespace
}  // namespace tessera
