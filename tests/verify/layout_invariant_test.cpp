// Layout-invariant arithmetic (docs/layout_invariant.md): tensor- and sequence-parallel plans are bitwise identical to
// one rank, by the oracle and by comparing the runs of two layouts; a fault of one ulp is detected; unsupported plans
// are refused.
#include <gtest/gtest.h>

#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "tests/support/draw.h"
#include "tests/support/errors.h"
#include "train/checkpoint/full_state.h"
#include "verify/defects/transports.h"
#include "verify/verify.h"

namespace tessera {
namespace {

using test::Sampler;

// Eight heads, so that `tp` may be 8.
TrainConfig invariant_job(const Plan& plan = {}, int64_t steps = 3) {
  TrainConfig job{.model = {.layers = 2, .heads = 8, .channels = 64, .context = 32, .vocab = 64},
                  .optim = {.lr = 3e-3, .warmup = 0, .steps = steps, .batch = 4},
                  .plan = plan};
  job.model.dropout = 0.1;
  job.plan.layout_invariant = true;
  if (job.plan.threads_per_rank == 0) job.plan.threads_per_rank = 1;
  job.plan.timeout = 60;
  return job;
}

void expect_bitwise(const TrainConfig& job) {
  const VerifyResult r = verify(job);
  EXPECT_TRUE(r.passed()) << to_text(job.plan) << ": " << (r.failures.empty() ? "" : r.failures.front());
  EXPECT_TRUE(r.exact && r.bitwise) << to_text(job.plan);
  EXPECT_EQ(r.losses.size(), static_cast<size_t>(job.optim.steps));
}

TEST(LayoutInvariant, PlansMatchOneRankBitwise) {
  const std::vector<Plan> plans = {
      {.tp = 2},
      {.tp = 8},
      {.tp = 4, .sp = true},
      {.tp = 8, .sp = true},
      {.dp = 2, .tp = 2, .zero = ZeroStage::one},
      {.dp = 2, .tp = 2, .sp = true, .zero = ZeroStage::two, .microbatches = 2},
      {.dp = 2, .tp = 2, .zero = ZeroStage::three},
      {.pp = 2, .tp = 2, .sp = true, .microbatches = 2},
      {.pp = 2, .tp = 2, .schedule = ScheduleKind::zb_h1, .microbatches = 2},
      {.tp = 2, .sp = true, .tie_copies = true},
  };
  for (const Plan& plan : plans) expect_bitwise(invariant_job(plan));
}

TEST(LayoutInvariant, FamiliesAndDtypesMatchOneRankBitwise) {
  TrainConfig llama = invariant_job({.tp = 4, .sp = true});
  llama.model.family = Family::llama;
  llama.model.kv_heads = 4;
  llama.model.ffn = 104;
  expect_bitwise(llama);
  llama.model.tied = false;
  llama.model.qkv_bias = llama.model.mlp_bias = llama.model.proj_bias = true;
  llama.model.window = 5;
  llama.plan.recompute = Recompute::block;
  expect_bitwise(llama);
  for (const DType dtype : {DType::float64, DType::bfloat16})
    for (const Plan& plan : {Plan{.tp = 8}, Plan{.dp = 2, .tp = 2, .sp = true, .zero = ZeroStage::two}}) {
      TrainConfig job = invariant_job(plan);
      job.optim.dtype = dtype;
      if (dtype == DType::float64) job.plan.grad_dtype = DType::float64;
      expect_bitwise(job);
    }
}

TEST(LayoutInvariant, RandomPlansMatchOneRankBitwise) {
  for (uint64_t trial = 0; trial < test::plans(6); ++trial) {
    SCOPED_TRACE(trial);
    Sampler d("layout-invariant plans", trial);
    Plan plan{.tp = d.of<int64_t>({1, 2, 4})};
    plan.sp = plan.tp > 1 && d.between(0, 1) == 1;
    plan.zero = d.of({ZeroStage::none, ZeroStage::one, ZeroStage::two, ZeroStage::three});
    plan.microbatches = d.of<int64_t>({1, 2});
    plan.recompute = d.of({Recompute::none, Recompute::block, Recompute::activation, Recompute::attention});
    if (plan.tp < 4) (d.between(0, 1) == 1 ? plan.dp : plan.pp) = d.of<int64_t>({1, 2});
    TrainConfig job = invariant_job(plan, 2);
    job.model.dropout = d.of({0.0, 0.2});
    job.model.tied = d.between(0, 1) == 1;
    job.model.context = d.of<int64_t>({16, 32, 48});
    if (d.between(0, 1) == 1) {
      job.model.family = Family::llama;
      job.model.kv_heads = d.of<int64_t>({4, 8});
      job.model.ffn = 8 * d.between(5, 20);
    }
    job.optim.clip = d.of({0.0, 0.05, 1.0});
    job.optim.optimizer = d.of({OptimizerKind::adamw, OptimizerKind::sgd});
    expect_bitwise(job);
  }
}

// Values and optimizer state after the last step, as full tensors; losses and norms.
struct Trained {
  std::vector<NamedTensor> tensors;
  std::vector<double> scalars;
};
Trained train_plan(const Plan& plan) {
  const TrainConfig job = invariant_job(plan);
  Trained out;
  const Sequences sequences = synthetic_sequences(job.model.vocab, job.model.context, job.optim.batch, 1);
  launch(launch_options(job.plan), [&](Communicator& world) {
    Trainer trainer(job, sequences, world);
    for (int64_t step = 0; step < job.optim.steps; ++step) {
      const StepReport r = trainer.step();
      if (world.rank() == 0) out.scalars.insert(out.scalars.end(), {r.loss, r.grad_norm});
    }
    std::vector<NamedTensor> all = full_values(trainer.state()), state = full_state(trainer.state());
    all.insert(all.end(), state.begin(), state.end());
    const ArenaPtr aside = make_arena();
    for (const NamedTensor& x : all)
      if (world.rank() == 0) out.tensors.push_back({x.name, x.tensor.contiguous().to(aside)});
  });
  return out;
}

TEST(LayoutInvariant, LayoutsAndThreadsProduceEqualTensors) {
  const Trained one = train_plan({});
  for (const Plan& plan : std::vector<Plan>{
           {.tp = 2}, {.tp = 4, .sp = true}, {.tp = 8}, {.threads_per_rank = 2}, {.tp = 2, .threads_per_rank = 2}}) {
    const Trained other = train_plan(plan);
    EXPECT_EQ(one.scalars, other.scalars) << to_text(plan);
    ASSERT_EQ(one.tensors.size(), other.tensors.size());
    for (size_t i = 0; i < one.tensors.size(); ++i) {
      const Tensor &a = one.tensors[i].tensor, &b = other.tensors[i].tensor;
      ASSERT_EQ(a.nbytes(), b.nbytes());
      EXPECT_EQ(std::memcmp(a.raw(), b.raw(), static_cast<size_t>(a.nbytes())), 0)
          << to_text(plan) << ": " << one.tensors[i].name;
    }
  }
}

// The partial sums that rank 1 contributes to one all-reduce differ by one unit in the last place. Addition rounds away
// some of these differences.
TEST(LayoutInvariant, OneUlpInOnePartialSumIsDetected) {
  const TrainConfig job = invariant_job({.tp = 2}, 1);
  for (const int64_t wrong : {1, 5}) {
    VerifyHooks hooks;
    const auto calls = std::make_shared<std::atomic<int64_t>>(0);
    const auto partial_sums = [](const std::string& axis, const Call& call) {
      return axis == "tp" && call.op == Op::all_reduce && call.reduction == Reduction::pair_sum && call.count >= 4096;
    };
    const auto add_ulp = [calls, wrong](Transport& transport, const Call& call) {
      auto* const x = reinterpret_cast<float*>(call.out);
      if (transport.rank() == 1 && (*calls)++ == wrong)
        for (int64_t i = 0; i < call.count; ++i) x[i] = std::nextafter(x[i], 1e30F);
      return transport.direct(call);
    };
    hooks.launching = [=](LaunchOptions& how) {
      how.around = [=](std::unique_ptr<Transport> inner) {
        return std::make_unique<FaultyCallTransport>(std::move(inner), FaultyCall{partial_sums, add_ulp});
      };
    };
    const VerifyResult r = verify(job, hooks);
    EXPECT_GT(calls->load(), wrong);
    EXPECT_FALSE(r.passed()) << "call " << wrong;
    EXPECT_FALSE(r.bitwise);
  }
  EXPECT_TRUE(verify(job).passed());
}

TEST(LayoutInvariant, RefusesUnsupportedPlansByName) {
  const std::vector<std::pair<std::string_view, std::function<void(TrainConfig&)>>> cases = {
      {"context parallelism", [](TrainConfig& j) { j.plan.cp = 2; }},
      {"mixture of experts", [](TrainConfig& j) { j.model.experts.count = 4; }},
      {"adapters", [](TrainConfig& j) { j.model.lora = {.rank = 4, .targets = {"c_attn"}}; }},
      {"qk_norm", [](TrainConfig& j) { j.model.family = Family::llama, j.model.qk_norm = true; }},
      {"grad_dtype", [](TrainConfig& j) { j.optim.dtype = j.plan.grad_dtype = DType::bfloat16; }},
      {"muon", [](TrainConfig& j) { j.optim.optimizer = OptimizerKind::muon; }},
      {"dp_mode", [](TrainConfig& j) { j.plan.dp = 2, j.plan.dp_mode = DataMode::diloco; }},
      {"all_reduce", [](TrainConfig& j) { j.plan.dp = 2, j.plan.all_reduce = Algorithm::ring; }},
      {"8 leaves", [](TrainConfig& j) { j.model.heads = 6, j.model.channels = 48, j.plan.tp = 3; }},
      {"vocabulary", [](TrainConfig& j) { j.plan.tp = 2, j.model.vocab = 41; }},
      {"chunks", [](TrainConfig& j) { j.plan.tp = 8, j.plan.sp = true, j.model.context = 24; }}};
  for (const auto& [text, change] : cases) {
    TrainConfig job = invariant_job();
    change(job);
    EXPECT_TRUE(has(error_message([&] { verify(job); }), text));
  }
}

}  // namespace
}  // namespace tessera
