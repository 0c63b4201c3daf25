// Plans as values: construction, comparison, printing, JSON, and reported fields of invalid ones. Also plans with
// experts, replica checks, and stragglers.

#include <algorithm>
#include <cstdint>
#include <functional>
#include <limits>
#include <numeric>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "tests/support/errors.h"
#include "tests/train/support.h"
#include "train/async/trainer.h"
#include "train/check.h"
#include "train/memory.h"
#include "train/usage.h"

namespace tessera {
namespace {

const Plan kSketch{
    .pp = 2, .dp = 2, .tp = 2, .zero = ZeroStage::one, .schedule = ScheduleKind::zb_h1, .microbatches = 8};

// Every field has a non-default value.
Plan odd_one() {
  return {.pp = 2,
          .dp = 3,
          .cp = 4,
          .tp = 5,
          .sp = true,
          .zero = ZeroStage::three,
          .dp_mode = DataMode::ps_async,
          .servers = 2,
          .staleness = 7,
          .record = "a \"file\"",
          .replay = "b",
          .bucket_mb = 0.1,
          .grad_dtype = DType::bfloat16,
          .all_reduce = Algorithm::tree,
          .offload = Offload::optimizer,
          .schedule = ScheduleKind::zb_v,
          .schedule_file = "c.txt",
          .chunks = 3,
          .cp_mode = ContextMode::ulysses,
          .microbatches = 9,
          .recompute = Recompute::activation_norm,
          .device = Device::cuda,
          .backend = Backend::nccl,
          .cuda_graph = CudaGraph::off,
          .attention = AttentionKernels::own,
          .layout_invariant = true,
          .deterministic = true,
          .threads_per_rank = 11,
          .timeout = 1.5};
}

TEST(Plan, IsComparableAndPrintable) {
  EXPECT_EQ(Plan{}, Plan{});
  EXPECT_EQ(kSketch.ranks(), 8);
  Plan other = kSketch;
  EXPECT_EQ(other, kSketch);
  other.microbatches = 4;
  EXPECT_NE(other, kSketch);
  EXPECT_EQ(to_text(kSketch), "pp=2 dp=2 tp=2 zero=1 schedule=zb-h1 microbatches=8");
  EXPECT_EQ(to_text(Plan{}), "one rank");
  EXPECT_EQ(describe(kSketch), "8 thread ranks (pp 2 x dp 2 x tp 2), zb-h1, ZeRO-1");
}

TEST(Plan, RoundTripsThroughJson) {
  for (const Plan& plan : {Plan{}, kSketch, odd_one()}) EXPECT_EQ(plan_from_json(to_json(plan)), plan) << to_json(plan);
  EXPECT_EQ(plan_from_json("{}"), Plan{});
  EXPECT_EQ(plan_from_json(R"({"dp": 2, "zero": 3, "dp_mode": "ps-sync", "bucket_mb": 1})"),
            (Plan{.dp = 2, .zero = ZeroStage::three, .dp_mode = DataMode::ps_sync, .bucket_mb = 1}));
  // Field names are unique and complete: each field alone changes the text.
  const std::string text = to_text(odd_one());
  EXPECT_EQ(std::count(text.begin(), text.end(), '='), 29) << text;
}

void expect_field(const std::function<void()>& f, const std::string& field, const std::string& message) {
  EXPECT_THROW(f(), FieldError);
  EXPECT_TRUE(error_message(f).starts_with("`" + field + "`: ")) << error_message(f);
  expect_error(Status::usage, {message}, f);
}

TEST(Plan, ErrorsNameFieldOfInvalidJson) {
  const auto expect = [](const char* json, const char* field, const char* message) {
    expect_field([&] { plan_from_json(json); }, field, message);
  };
  expect(R"({"ranks": 2})", "ranks",
         "unknown field of a plan; expected one of pp, dp, cp, tp, ep, sp, tie_copies, zero,");
  expect(R"({"dp": "2"})", "dp", "expected an integer, got \"2\"");
  expect(R"({"dp": 2.5})", "dp", "expected an integer, got 2.5");
  expect(R"({"sp": 1})", "sp", "expected true or false, got 1");
  expect(R"({"zero": 4})", "zero", "expected 0, 1, 2 or 3, got 4");
  expect(R"({"zero": -1})", "zero", "got -1");
  expect(R"({"schedule": "fast"})", "schedule",
         "expected naive, gpipe, 1f1b, interleaved, zb-h1, zb-h2, zb-v, v-half, v-min, got");
  expect(R"({"timeout": null})", "timeout", "expected a number, got null");
  expect(R"({"record": 3})", "record", "expected a string, got 3");
  expect_error(Status::usage, {"expected a JSON object, got [1]"}, [] { plan_from_json("[1]"); });
  expect_error(Status::usage, {"expected a JSON object"}, [] { plan_from_json("{"); });
}

TEST(Plan, CheckNamesInvalidField) {
  const auto expect = [](const Plan& plan, const char* field, const char* message) {
    expect_field([&] { check(plan); }, field, message);
  };
  EXPECT_NO_THROW(check(kSketch));
  EXPECT_NO_THROW(check(Plan{}));
  expect({.tp = 0}, "tp", "expected at least 1, got 0");
  expect({.microbatches = -1}, "microbatches", "expected at least 1, got -1");
  expect({.bucket_mb = 0}, "bucket_mb", "expected a number above 0, got 0");
  expect({.timeout = std::nan("")}, "timeout", "expected a number above 0");
  expect({.dp = 2, .dp_mode = DataMode::ps_sync, .servers = 3}, "servers",
         "expected at most the number of ranks, 2, got 3");
  expect({.staleness = 2}, "staleness", "requires `dp_mode` ps-async, got ddp; nearest valid value: 1");
  expect({.zero = ZeroStage::two, .dp_mode = DataMode::ps_sync}, "zero", "2 requires `dp_mode` ddp, got ps-sync");
  expect({.tp = 2, .dp_mode = DataMode::ps_sync}, "dp_mode", "ps-sync supports only data-parallel ranks");
  expect({.all_reduce = Algorithm::native}, "all_reduce", "expected direct, ring, tree or root");
  expect({.record = "x"}, "record", "requires `dp_mode` ps-async, got ddp");
  expect({.chunks = 2}, "chunks", "requires `schedule` interleaved, got 1f1b");
  expect({.pp = 2, .schedule = ScheduleKind::interleaved, .microbatches = 3}, "schedule", "3 micro-batches");
  expect({.backend = Backend::nccl}, "backend", "expected `device` cuda, got cpu");
  expect({.dp = 2, .backend = Backend::mpi}, "backend", "mpi requires a start by mpirun");
}

TEST(Configuration, CheckNamesInvalidFieldAndNearestValidValue) {
  const auto expect = [](const TrainConfig& job, const char* field, const char* message) {
    expect_field([&] { check(job); }, field, message);
  };
  EXPECT_NO_THROW(check(TrainConfig{}));
  expect({.model = {.heads = 3}}, "heads", "3 heads do not divide 128 channels");
  expect({.plan = {.microbatches = 5}}, "microbatches",
         "5 does not divide the batch size, 12; nearest valid value: 4 or 6");
  expect({.plan = {.dp = 5}}, "batch", "nearest valid value: 10 or 15");
  expect({.plan = {.tp = 3}}, "tp", "3 does not divide the 4 heads; nearest valid value: 2 or 4");
  expect({.plan = {.cp = 3}}, "cp", "nearest valid `context`: 60 or 66");
  expect({.plan = {.pp = 8}}, "pp", "8 ranks have 8 stages, more than the 4 layers");
  expect({.model = {.context = 7}, .plan = {.tp = 2, .sp = true}}, "sp", "nearest valid value: `tp` 1 or 7");
}

TEST(Configuration, CheckNamesContradictorySettingsOfRun) {
  const auto expect = [](const TrainConfig& job, const char* field, const char* message) {
    expect_field([&] { check(job); }, field, message);
    EXPECT_NO_THROW(check_trainer(job)) << field;  // settings of training alone
  };
  expect({.optim = {.lr = 0.01, .min_lr = 0.02}}, "min_lr", "expected at most `lr` (0.01), got 0.02");
  EXPECT_NO_THROW(check(TrainConfig{.optim = {.lr = 0.02, .min_lr = 0.02}}));
  expect({.run = {.resume = true}}, "resume", "requires `out` DIR, the run to resume");
  expect({.run = {.out = "run", .resume = true, .no_save = true}}, "resume", "cannot be combined with `no_save`");
  expect({.run = {.epochs = 0}}, "epochs", "expected more than 0, got 0");
  expect({.run = {.patience = 1, .no_eval = true}}, "patience", "requires periodic validation, got `no_eval`");
  expect({.run = {.eval_every = 0, .patience = 1}}, "patience", "got `eval_every` 0");
  expect({.plan = {.dp_mode = DataMode::ps_async}, .run = {.check_replicas = 1}}, "check_replicas",
         "requires replicas that are identical after each step, got `dp_mode` ps-async");
  expect({.model = {.lora = {.alpha = 2}}}, "lora_alpha", "requires `lora_rank`");
  expect({.model = {.quantize = {.codec = Codec::nf4}}}, "quantize", "nf4 requires `lora_rank`");
  expect({.model = {.quantize = {.group = 64}}}, "quantize_group", "requires `quantize` gptq, got none");
}

TEST(Configuration, CheckComparesRanksWithMesh) {
  EXPECT_NO_THROW(check(TrainConfig{.plan = {.dp = 2}, .ranks = 2}));
  expect_field([] { check(TrainConfig{.plan = {.dp = 2}, .ranks = 6}); }, "ranks",
               "pp 1 x dp 2 x cp 1 x tp 1 is 2 ranks; expected 6; nearest valid value: `dp` 6");
  expect_field([] { check(TrainConfig{.plan = {.pp = 2}, .ranks = 3}); }, "ranks", "nearest valid value: 2 or 4 ranks");
  expect_field([] { check(TrainConfig{.plan = {.schedule_file = "1f2b"}}); }, "schedule",
               "unknown schedule '1f2b'; expected naive, gpipe, 1f1b,");
}

// A program that uses the library without command-line options.
TEST(Configuration, LossesAreIdenticalUnderDataParallelPlans) {
  const auto losses = [](const Plan& plan) {
    const TrainConfig job{.model = {.layers = 2, .heads = 2, .channels = 16, .context = 8, .vocab = 20},
                          .optim = {.optimizer = OptimizerKind::sgd, .lr = 0.1, .warmup = 0, .steps = 3, .batch = 4},
                          .plan = plan};
    check(job);
    std::vector<double> out;
    train(job, 0, [&](Trainer& trainer, Communicator& world) {
      EXPECT_EQ(trainer.state().job.plan, plan);
      for (int64_t step = 0; step < job.optim.steps; ++step) {
        const double loss = trainer.step().loss;
        if (world.rank() == 0) out.push_back(loss);
      }
    });
    return out;
  };
  const std::vector<double> alone = losses({.microbatches = 2, .threads_per_rank = 1});
  EXPECT_EQ(alone.size(), 3);
  EXPECT_LT(alone.back(), alone.front());
  EXPECT_EQ(losses({.dp = 2, .threads_per_rank = 1}), alone);
  EXPECT_EQ(losses({.dp = 2, .zero = ZeroStage::three, .threads_per_rank = 1}), alone);
  EXPECT_EQ(losses({.dp = 2, .dp_mode = DataMode::ps_sync, .servers = 2, .threads_per_rank = 1}), alone);
}

// A custom program may pass each rank a different job, in every field that affects the run.
TEST(JobConsistency, ErrorsNameDifferingFields) {
  const TrainConfig same{
      .model = {.layers = 1, .channels = 8, .context = 4, .vocab = 5}, .optim = {.batch = 4}, .plan = {.dp = 2}};
  const auto expect = [&](const std::function<void(TrainConfig&)>& change, const std::string& message) {
    const auto made = [&](Communicator& world) {
      TrainConfig job = same;
      if (world.rank() == 1) change(job);
      if (job.plan.dp_mode == DataMode::ps_async)
        const AsyncTrainer trainer(job, synthetic_sequences(5, 4, 4, 1), world);
      else
        const Trainer trainer(job, synthetic_sequences(5, 4, 4, 1), world);
    };
    expect_error(Status::usage, {"ranks disagree: " + message}, [&] { launch({.ranks = 2, .timeout_s = 20}, made); });
  };
  expect([](TrainConfig& job) { job.optim.lr = 0.5; }, "`lr` is 0.001 on rank 0 and 0.5 on rank 1");
  expect([](TrainConfig& job) { job.model.channels = 16; }, "`channels` is 8 on rank 0 and 16 on rank 1");
  expect([](TrainConfig& job) { job.plan = {.pp = 2}; }, "`dp` is 2 on rank 0 and 1 on rank 1");
  expect([](TrainConfig& job) { job.plan.zero = ZeroStage::three; }, "`zero` is ");
  expect([](TrainConfig& job) { job.plan.dp_mode = DataMode::ps_async; }, "`dp_mode` is ");
}

// Plans with experts: load balance, rejected options, and cost per token.

TrainConfig small_job() {
  TrainConfig job{.model = {.layers = 3, .heads = 2, .channels = 8, .context = 10, .vocab = 30},
                  .optim = {.steps = 2, .batch = 8},
                  .plan = {.threads_per_rank = 1, .timeout = 20}};
  job.model.experts = {.count = 4, .per_token = 2};
  return job;
}

ExpertLoad expert_load(const TrainConfig& job) {
  ExpertLoad out;
  train(job, 2, [&](Trainer& trainer, Communicator& world) {
    const ExpertLoad found = expert_load(trainer.state());
    if (world.rank() == 0) out = found;
    EXPECT_EQ(expert_load(trainer.state()).busiest().times, 0);  // reset by the previous call
  });
  return out;
}

TEST(TrainedExperts, ExpertLoadCoversAllRanks) {
  TrainConfig job = small_job();
  const ExpertLoad one = expert_load(job);
  ASSERT_EQ(one.rows.size(), 3U);
  for (const std::vector<int64_t>& layer : one.rows)
    EXPECT_EQ(std::accumulate(layer.begin(), layer.end(), int64_t{0}), 2 * 8 * 10 * 2);
  EXPECT_EQ(one.dropped, 0);
  job.plan.dp = 4, job.plan.ep = 2, job.plan.pp = 3;
  EXPECT_EQ(expert_load(job).rows, one.rows);
  job.plan = {.dp = 2, .ep = 2, .microbatches = 2, .recompute = Recompute::block, .threads_per_rank = 1, .timeout = 20};
  job.model.recompute = Recompute::block;
  EXPECT_EQ(expert_load(job).rows, one.rows);
  job.model.recompute = Recompute::none;
  job.plan = {.dp = 2, .tp = 2, .ep = 2, .sp = true, .threads_per_rank = 1, .timeout = 20};
  EXPECT_EQ(expert_load(job).rows, one.rows);  // no two fp32 logits are close enough to reroute a token
  job.plan = {.dp = 2, .ep = 2, .microbatches = 2, .threads_per_rank = 1, .timeout = 20};
  job.model.experts.capacity = 0.5;
  const ExpertLoad dropped = expert_load(job);
  EXPECT_GT(dropped.dropped, 0);
  int64_t all = dropped.dropped;
  for (const std::vector<int64_t>& layer : dropped.rows) all += std::accumulate(layer.begin(), layer.end(), int64_t{0});
  EXPECT_EQ(all, 3 * 2 * 8 * 10 * 2);
}

// With cp, ranks hold chunks of the sequences; capacity admits the first tokens of each full sequence.
TEST(TrainedExperts, CapacityAppliesToFullSequences) {
  TrainConfig job = small_job();
  job.model.context = 12;
  job.model.experts.capacity = 0.6;
  const ExpertLoad one = expert_load(job);
  EXPECT_GT(one.dropped, 0);
  for (const ContextMode mode : {ContextMode::ring, ContextMode::ulysses}) {
    job.plan = {.dp = 2, .cp = 2, .ep = 4, .cp_mode = mode, .threads_per_rank = 1, .timeout = 20};
    const ExpertLoad many = expert_load(job);
    EXPECT_EQ(many.rows, one.rows);
    EXPECT_EQ(many.dropped, one.dropped);
  }
}

TEST(TrainedExperts, ReportsLoadOfBusiestExpert) {
  const ExpertLoad load{.rows = {{2, 2, 2, 2}, {1, 6, 1, 0}}};
  EXPECT_EQ(load.busiest().times, 3);
  EXPECT_EQ(load.busiest().layer, 1);
  EXPECT_EQ(load.busiest().expert, 1);
}

TEST(TrainedExperts, RejectsUnsupportedOptions) {
  const auto expect = [](const std::string& message, const std::function<void(TrainConfig&)>& change) {
    TrainConfig job = small_job();
    job.plan.dp = job.plan.ep = 2;
    change(job);
    const std::string found = error_message([&] { check(job); });
    EXPECT_TRUE(found.starts_with(message)) << found << ", expected " << message;
  };
  const std::string nothing = "nothing was thrown";
  expect(nothing, [](TrainConfig& j) { j.plan.dp = 4; });
  expect("`ep`", [](TrainConfig& j) { j.plan.dp = 4, j.plan.ep = 3; });
  expect("`ep`", [](TrainConfig& j) { j.plan.dp = j.plan.ep = 8; });
  expect("`ep`", [](TrainConfig& j) { j.model.experts.count = 0; });
  expect(nothing, [](TrainConfig& j) { j.plan.tp = 2; });
  expect(nothing, [](TrainConfig& j) { j.model.context = 12, j.plan.cp = 2, j.plan.ep = 4; });
  expect("`ep`", [](TrainConfig& j) { j.plan.dp_mode = DataMode::ps_sync; });
  expect("`all_reduce`", [](TrainConfig& j) { j.plan.all_reduce = Algorithm::ring; });
  const auto groups = [](int64_t ep, int64_t ranks) {
    return [=](TrainConfig& j) {
      j.model.experts.count = 8;
      j.plan = {.dp = 8, .ep = ep, .zero = ZeroStage::two, .shard_ranks = ranks, .threads_per_rank = 1, .timeout = 20};
    };
  };
  expect(nothing, groups(2, 4));
  expect("`shard_ranks`: each group holds all experts, sharded over 4 ranks of `ep`; expected a multiple of 4, got 2",
         groups(4, 2));
  expect(nothing, [](TrainConfig& j) { j.optim.optimizer = OptimizerKind::muon; });
  expect("`experts_per_token`", [](TrainConfig& j) { j.plan = {}, j.model.experts.per_token = 5; });
  const auto adapters = [](const std::string& target) {
    return [=](TrainConfig& j) { j.plan = {}, j.model.lora = {.rank = 2, .targets = {target}}; };
  };
  expect(nothing, adapters("c_attn"));
  expect("`lora_targets`: expected one or more of c_attn, attn.c_proj (experts have no adapters), got 'c_fc'",
         adapters("c_fc"));
  expect("`quantize`", [](TrainConfig& j) { j.plan = {}, j.model.quantize.codec = Codec::nf4; });
}

// Unselected experts have parameters but no computation.
TEST(TrainedExperts, ActiveParametersMatchDenseModel) {
  ModelConfig moe = preset("moe-nano").value(), dense = preset("llama-nano").value();
  moe.vocab = dense.vocab = 81;
  const int64_t routers = moe.layers * moe.channels * moe.experts.count;
  EXPECT_EQ(make_model(moe)->training_flops(), make_model(dense)->training_flops() + 6 * static_cast<double>(routers));
  EXPECT_EQ(make_model(moe)->parameter_count(),
            make_model(dense)->parameter_count() + routers + moe.layers * 6 * 3 * 128 * 192);
}

// Consistency checks: non-finite values and diverged replicas.

TrainConfig small_job(const Plan& plan) {
  TrainConfig job{.model = {.layers = 2, .heads = 2, .channels = 16, .context = 8, .vocab = 32},
                  .optim = {.steps = 2, .batch = 8},
                  .plan = plan};
  job.plan.threads_per_rank = 1;
  return job;
}

// Runs two steps, modifies one value on rank `rank`, and compares replicas.
std::string compared(const TrainConfig& job, int rank, const std::string& tensor) {
  const auto corrupt = [&](Trainer& trainer, Communicator& world) {
    for (const TensorSlice& h : held_between_steps(trainer.state()))
      if (world.rank() == rank && h.name == tensor) h.part.data<float>()[0] += 1e-3F;
    const OpCounts before = world.counts();
    check_replicas(trainer.state());
    EXPECT_EQ(world.counts(), before);
  };
  return error_message([&] { train(job, job.optim.steps, corrupt); }, Status::communication);
}

TEST(CheckReplicas, AcceptsEqualReplicasUnderEveryAxis) {
  for (const Plan& plan :
       {Plan{.dp = 4}, Plan{.dp = 2, .tp = 2}, Plan{.cp = 2, .zero = ZeroStage::two}, Plan{.pp = 2, .dp = 2},
        Plan{.dp = 2, .zero = ZeroStage::one}, Plan{.dp = 2, .tp = 2, .zero = ZeroStage::three},
        Plan{.dp = 2, .dp_mode = DataMode::dataparallel}, Plan{.dp = 2, .dp_mode = DataMode::ps_sync}})
    EXPECT_EQ(compared(small_job(plan), -1, ""), "nothing was thrown") << describe(plan);
}

TEST(CheckReplicas, NamesRankOfDivergedReplica) {
  EXPECT_TRUE(has(compared(small_job({.dp = 4}), 2, "blocks.1.mlp.up.weight"),
                  "step 2: replicas of blocks.1.mlp.up.weight differ between ranks: rank 2 does not match ranks "
                  "0, 1, 3"));
  for (const std::string name : {"tokens.weight", "norm.bias.m", "blocks.0.mlp.up.bias.v", "blocks.1.mlp.up.bias.v"}) {
    const std::string message = compared(small_job({.dp = 2}), 1, name);  // ordered by rank
    EXPECT_TRUE(has(message, name + " differ between ranks: rank 0 and rank 1"));
  }
  // A norm is replicated on both ranks of a tensor-parallel pair.
  EXPECT_TRUE(has(compared(small_job({.tp = 2}), 1, "norm.weight"), "norm.weight differ"));
  EXPECT_EQ(compared(small_job({.tp = 2}), 1, "blocks.0.mlp.up.weight"), "nothing was thrown")
      << "there is one copy of it";
  // A tied weight is on the first and the last stage.
  EXPECT_TRUE(has(compared(small_job({.pp = 2}), 1, "tokens.weight"), "tokens.weight differ"));
}

TEST(FirstNonFinite, FindsElementAtAnyPosition) {
  const Philox random = Philox::named(1, "finite");
  for (uint64_t trial = 0; trial < 200; ++trial) {
    std::vector<float> x(random.below(3000, 3 * trial) + 1);
    for (size_t i = 0; i < x.size(); ++i)
      x[i] = i % 3 == 0 ? std::numeric_limits<float>::max() : i % 3 == 1 ? -1e-45F : 0.0F;
    EXPECT_EQ(first_not_finite(DType::float32, std::as_bytes(std::span(x))), -1);
    const auto at = static_cast<int64_t>(random.below(x.size(), 3 * trial + 1));
    x[static_cast<size_t>(at)] = random.below(2, 3 * trial + 2) == 0 ? -INFINITY : NAN;
    EXPECT_EQ(first_not_finite(DType::float32, std::as_bytes(std::span(x))), at);
  }
  const std::vector<double> wide = {1.0, -INFINITY};
  EXPECT_EQ(first_not_finite(DType::float64, std::as_bytes(std::span(wide))), 1);
  const std::vector<uint16_t> narrow = {0x7f7f, 0xff80};
  EXPECT_EQ(first_not_finite(DType::bfloat16, std::as_bytes(std::span(narrow))), 1);
}

// A rank is a straggler only if it clearly stands out.

TEST(Straggler, OnlyOutliersAreDetected) {
  const auto late = find_straggler({0.5, 12, 0.5, 1}, 10);  // the three other ranks waited 12 s of 30 s in total
  ASSERT_TRUE(late);
  EXPECT_EQ(late->rank, 1);
  EXPECT_DOUBLE_EQ(late->fraction, 0.4);
  EXPECT_TRUE(find_straggler({0.1, 2.5}, 10));
  EXPECT_FALSE(find_straggler({0.5, 5.9, 0.5, 1}, 10));  // less than a fifth of 30 s
  EXPECT_FALSE(find_straggler({8, 12, 7, 8}, 10));       // not twice the others' mean
  EXPECT_FALSE(find_straggler({0, 1.5}, 1.9));           // the run is too short
  EXPECT_FALSE(find_straggler({0}, 10));
  // Values just below and above each limit: 6 s is a fifth of 30 s, 6 s is twice 3 s, and a run of 2 s suffices.
  for (const double more : {-0.001, 0.0, 0.001}) {
    EXPECT_EQ(find_straggler({0, 6 + more, 0, 0}, 10).has_value(), more >= 0) << more;
    EXPECT_EQ(find_straggler({3, 6 + more, 3, 3}, 9).has_value(), more >= 0) << more;
    EXPECT_EQ(find_straggler({0, 1}, 2 + more).has_value(), more >= 0) << more;
  }
  EXPECT_FALSE(find_straggler({}, 10));
}

// Only fields that a user did not set follow the optimizer, and only where its row differs from the common defaults.
TEST(Optimisation, UnsetFieldsFollowOptimizer) {
  const OptimizerDefaults common;
  for (size_t i = 0; i < kOptimizers.size(); ++i) {
    const OptimizerDefaults& own = kOptimizers[i].defaults;
    Optimisation optim{.optimizer = static_cast<OptimizerKind>(i)}, set = optim;
    set_defaults(optim, [](std::string_view) { return false; });
    EXPECT_EQ(optim, (Optimisation{.optimizer = set.optimizer,
                                   .momentum = own.momentum,
                                   .lr = own.lr,
                                   .weight_decay = own.weight_decay,
                                   .beta1 = own.beta1,
                                   .beta2 = own.beta2}));
    set.momentum = 0.5, set.lr = 2;
    const Optimisation before = set;
    set_defaults(set, [](std::string_view) { return true; });
    EXPECT_EQ(set, before);
    set_defaults(set, [](std::string_view field) { return field == "momentum"; });
    EXPECT_EQ(set.momentum, 0.5);
    EXPECT_EQ(set.lr, own.lr == common.lr ? 2 : own.lr);
  }
}

}  // namespace
}  // namespace tessera
