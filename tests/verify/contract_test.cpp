// Plans of every strategy, schedule and combination of axes train like one rank, bitwise or, if they split sums, within
// a tolerance (the verification contract, verify/verify.h): random plans and one of each kind; with a two-block
// vocabulary, masked targets and expert routing.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "models/decoder.h"
#include "tests/support/errors.h"
#include "tests/verify/draw.h"
#include "verify/reference.h"

namespace tessera {
namespace {

// Each sequence ignores its targets before a different position, possibly the last, so that ranks and micro-batches
// have very different numbers of targets. `packed`: documents of 1 to 6 tokens without an end token.
Sequences masked_sequences(const TrainConfig& job, bool packed = false) {
  const int64_t context = job.model.context, batch = job.optim.batch;
  const Philox random = Philox::named(5, "masks");
  const auto count_targets = [=](int64_t step, int64_t s) {  // number of targets, 1 to context, mostly few
    const auto at = static_cast<uint64_t>(step * batch + s);
    return 1 + random.below(static_cast<uint64_t>(random.below(3, at) == 0 ? context : 2), at, 1);
  };
  Sequences made = synthetic_sequences(job.model.vocab, context, batch, static_cast<uint64_t>(job.optim.seed));
  made.load = [=, load = std::move(made.load)](int64_t step, int64_t first, int64_t count, int32_t* in, int32_t* out) {
    load(step, first, count, in, out);
    for (int64_t s = 0; s < count; ++s)
      for (int64_t t = 0; t < context - static_cast<int64_t>(count_targets(step, first + s)); ++t)
        out[s * context + t] = Rows::kIgnored;
  };
  made.trained = [=](int64_t step) {
    int64_t sum = 0;
    for (int64_t s = 0; s < batch; ++s) sum += static_cast<int64_t>(count_targets(step, s));
    return sum;
  };
  if (!packed) return made;
  made.document_end.reset();
  made.starts = [=](int64_t step, int64_t first, int64_t count, int32_t* starts) {
    for (int64_t s = 0; s < count; ++s) {
      const auto at = static_cast<uint64_t>(step * batch + first + s);
      int64_t start = 0;
      for (int64_t t = 0, end = 0; t < context; ++t) {
        if (t == end) start = t, end += 1 + static_cast<int64_t>(random.below(6, at, 2 + static_cast<uint64_t>(t)));
        starts[s * context + t] = static_cast<int32_t>(start);
      }
    }
  };
  return made;
}

using namespace test;

TypedOptions sample_plan(Sampler& d) {
  TypedOptions o = small_plan();
  sample(d, o, "layers=1..3 heads=1..3");
  o["channels"] = o.model.heads * 4 * d.between(1, 5);
  sample(d, o, "context=3..20 vocab=5..90");
  o.ranks = d.of<int64_t>({2, 3, 4, 8});
  o["microbatches"] = d.between(1, 3);
  o["batch"] = *o.ranks * o.plan.microbatches * d.between(1, 3);
  sample(d, o, "dropout=0|0.1|0.3 dtype=fp32|fp32|bf16|fp64");
  o["grad_dtype"] = value_name(o.optim.dtype) == "bf16" ? d.of<const char*>({"fp32", "bf16"}) : "fp32";
  sample(
      d, o,
      "optimizer=sgd|adam|adamw momentum=0|0.9 clip=0|0.5|1 recompute=none|activation|activation+norm|attention|block");
  o["seed"] = d.between(0, 1 << 20);
  o["lr"] = value_name(o.optim.optimizer) == "sgd" ? 0.3 : 0.01;
  o["dp_mode"] = d.of<const char*>({"ddp", "ddp", "ddp", "ddp", "dataparallel", "ps-sync"});
  if (value_name(o.plan.dp_mode) == "ddp")
    sample(d, o, "zero=0..3 all_reduce=direct|direct|ring|tree|root bucket_mb=1e-6|0.001|0.01|4");
  o["offload"] = d.of<const char*>({"none", "none", "optimizer"});
  if (value_name(o.plan.dp_mode) == "ps-sync") o["servers"] = d.between(1, *o.ranks);
  sample_family(d, o);
  sample_experts(d, o, *o.ranks);
  if (value_name(o.optim.dtype) == "bf16") o["state_dtype"] = d.of<const char*>({"fp32", "bf16"});
  sample_replicas(d, o, *o.ranks);
  return o;
}

TEST(Contract, RandomPlansTrainLikeOneRank) { expect_random_pass(60, "plans", sample_plan); }

TEST(Contract, EachStrategyAndZeroStageTrainsLikeOneRank) {
  for (const char* options : {"dtype=fp32 ranks=2", "dtype=fp32 ranks=3", "dtype=bf16 ranks=2", "dtype=bf16 ranks=3"})
    expect_passes(small_plan(fmt::format("microbatches=2 {}", options)),
                  {"zero=0", "zero=1", "zero=2", "zero=3", "dp_mode=dataparallel", "dp_mode=ps-sync"});
}

// The default model on one rank, without any parallelism.
TEST(Contract, OneRankMatchesOracle) {
  // Any ZeRO stage is valid on an axis of size 1.
  expect_passes(small_plan("ranks=1 microbatches=3"), {"zero=0", "zero=1", "zero=2", "zero=3"});
}

// Separate copies of a tied weight without a pipeline.
TEST(Contract, TiedWeightCopiesAreReducedSeparately) {
  for (const int64_t zero : {0, 3}) {
    TypedOptions o = verify_defaults();
    say(o,
        "layers=2 heads=2 channels=16 context=8 batch=8 steps=4 ranks=2 microbatches=2 tie_copies=true "
        "threads_per_rank=1");
    o["zero"] = zero;
    EXPECT_TRUE(expect_passes(o).bitwise) << make_command(o);
  }
}

// In the second step no token passes through the last block or the first block's feed-forward layer. Gradients of the
// first step must neither accumulate nor remain: the moments decay, and AdamW's step equals the oracle's.
TEST(Contract, UnusedParameterInSecondStepHasZeroGradient) {
  for (const char* options : {"zero=0", "zero=0 bucket_mb=1e-6", "zero=1", "zero=2", "zero=3", "dp_mode=dataparallel",
                              "dp_mode=ps-sync", "dp_mode=diloco sync_every=2", "zero=0 pp=2"}) {
    TrainConfig job = resolve(small_plan(fmt::format("steps=4 dp=2 microbatches=2 batch=8 {}", options)));
    job.make = [](const ModelConfig& config) {
      std::unique_ptr<LanguageModel> model = make_model(config);
      const auto skip = [m = model.get()](const Module::Inner& inner, const Var& x) {
        return m->step().step == 1 ? x : inner(x);
      };
      dynamic_cast<DecoderBlock&>(model->layer(0)).mlp.wrap(skip);
      model->layer(config.layers - 1).wrap(skip);  // layer 1 (one-layer models are built only to count sizes)
      return model;
    };
    std::atomic<int64_t> skipped = 0;  // elements
    const VerifyHooks hooks = {.summed = [&](Trainer& t) {
      for (const FlatUnit& unit : t.state().strategy().shards())
        for (const Slot& slot : unit.slots) {
          const std::string& name = slot.parameter->name;
          const int64_t begin = std::max(slot.begin, int64_t{0}), end = std::min(slot.end(), unit.grads.numel());
          if (begin >= end || t.state().steps_done() > 1 ||
              !(name.starts_with("blocks.1") || has(name, "blocks.0.mlp")))
            continue;
          const std::vector<float> grads = unit.grads.narrow(0, begin, end - begin).to_vector<float>();
          const bool is_zero = std::ranges::count(grads, 0.F) == std::ssize(grads);
          EXPECT_EQ(is_zero, t.state().steps_done() == 1) << options << ": " << name;
          if (is_zero) skipped += end - begin;
        }
    }};
    const VerifyResult r = verify(job, hooks);
    EXPECT_TRUE(r.passed() && r.bitwise) << options << ": " << testing::PrintToString(r.failures);
    EXPECT_GE(skipped, (12 + 8) * 32 * 32) << options;  // at least the matrices of both skipped modules
  }
}

TEST(Contract, LossDecreases) {
  for (const std::string options :
       {"ranks=2 zero=2", "ranks=2 zero=3", "pp=2 dp=2 cp=2 tp=2 sp=true zero=1 microbatches=2 batch=12"}) {
    const VerifyResult r = expect_passes(small_plan("steps=40 " + options));
    EXPECT_LT(r.losses.at(39), r.losses.at(0) - 0.2) << options;
  }
}

// Pipelines of every schedule match one rank bitwise, alone and with data parallelism; tensor and context parallelism,
// and all combinations up to 16 ranks, within the tolerance.

// Options of every random plan.
TypedOptions sample_model(Sampler& d) {
  TypedOptions o = small_plan();
  sample(d, o,
         "vocab=5..70 dropout=0|0.1|0.3 optimizer=sgd|adam|adamw momentum=0|0.9 clip=0|0.5|1 "
         "recompute=none|none|activation|activation+norm|attention|block");
  o["seed"] = d.between(0, 1 << 20);
  o["lr"] = value_name(o.optim.optimizer) == "sgd" ? 0.3 : 0.01;
  o["timeout"] = 60;
  return o;
}

// Pipelines with DDP or ZeRO.
TypedOptions sample_exact_plan(Sampler& d) {
  TypedOptions o = sample_model(d);
  o["heads"] = d.between(1, 3);
  o["channels"] = o.model.heads * 4 * d.between(1, 4);
  o["context"] = d.between(3, 14);
  o["pp"] = d.between(1, 4);
  sample_schedule(d, o, "microbatches=1..6", 3, 2);
  o["dp"] = d.of<int64_t>({1, 1, 2, 3});
  o["batch"] = o.plan.dp * o.plan.microbatches * d.between(1, 2);
  o["dtype"] = d.of<const char*>({"fp32", "fp32", "bf16", "fp64"});
  o["grad_dtype"] = value_name(o.optim.dtype) == "bf16" ? d.of<const char*>({"fp32", "bf16"}) : "fp32";
  sample(d, o, "zero=0..3 all_reduce=direct|direct|ring|tree|root bucket_mb=1e-6|0.001|4");
  sample_family(d, o);
  sample_experts(d, o, o.plan.dp);
  if (value_name(o.optim.dtype) == "bf16") o["state_dtype"] = d.of<const char*>({"fp32", "bf16"});
  sample_replicas(d, o, o.plan.dp * o.plan.cp);
  return o;
}

TEST(MeshContract, PipelinesMatchOneRankExactly) { expect_random_pass(40, "pipelines", sample_exact_plan); }

// With at least one tensor or context rank, and at most 16 in total.
TypedOptions sample_split_plan(Sampler& d) {
  TypedOptions o = sample_model(d);
  do sample(d, o, "tp=1|2|2|3|4 cp=1|1|2|3 dp=1|1|2 pp=1|1|2|3");
  while (o.plan.tp * o.plan.cp == 1 || o.plan.tp * o.plan.cp * o.plan.dp * o.plan.pp > 16);
  if (o.plan.pp > 1)
    sample_schedule(d, o, "microbatches=1..6", 3, 2);
  else
    o["layers"] = d.between(1, 3);
  sample(d, o, "cp_mode=ring|ulysses sp=false|true");
  const int64_t unit = o.plan.tp * (value_name(o.plan.cp_mode) == "ulysses" ? o.plan.cp : 1);
  o["heads"] = unit * d.between(1, 3);
  o["channels"] = o.model.heads * 4 * d.between(1, 3);
  o["context"] = 2 * o.plan.cp * o.plan.tp * d.between(1, 2);
  o["batch"] = o.plan.dp * o.plan.microbatches * d.between(1, 2);
  sample(d, o, "zero=0..3 all_reduce=direct|direct|ring|tree|root dtype=fp64|fp64|fp64|fp32|bf16 steps=4");
  sample_family(d, o, unit);
  sample_experts(d, o, o.plan.dp * o.plan.cp);
  return o;
}

TEST(MeshContract, CombinedAxesTrainLikeOneRank) { expect_random_pass(40, "products", sample_split_plan); }

// One plan of each kind, so that failures are identified.
TEST(MeshContract, EachScheduleTrainsLikeOneRank) {
  for (const std::string& name : schedule_names())
    expect_passes(small_plan("pp=2 layers=4 microbatches=4 batch=8 schedule=" + name));
}

TEST(MeshContract, EachShardingAxisTrainsLikeOneRank) {
  const std::vector<std::string_view> splits = {"tp=2", "tp=2 sp=true", "cp=2 cp_mode=ring", "cp=2 cp_mode=ulysses"};
  expect_passes(small_plan("dtype=fp64"), splits);
  // Dropout on a shard of channels or tokens, also of adapter inputs, uses the mask of one rank.
  for (const std::string family : {"gpt2", "llama"})
    expect_passes(small_plan("dtype=fp64 steps=4 lora_rank=2 lora_targets=all lora_dropout=0.2 family=" + family),
                  splits);
}

TEST(MeshContract, EachStepReportsProgress) {
  std::map<std::string, int64_t> told;
  const auto count = [&](std::string_view work, int64_t step) { EXPECT_EQ(told[std::string(work)]++, step) << work; };
  EXPECT_TRUE(verify(resolve(small_plan("tp=2 steps=3")), {.working = count}).passed());
  EXPECT_EQ(told, (std::map<std::string, int64_t>{{"calibrating the bound by two summation orders", 3},
                                                  {"calibrating the bound by fp32 versus fp64", 3},
                                                  {"comparing the plan with one rank", 3}}));
}

// A vocabulary wide enough for two row blocks in the head: every plan remains bitwise identical to one rank, also with
// full logits (DataParallel), within its peak bound.

// Two sequences of 64 tokens per micro-batch.
TypedOptions wide_plan(const std::string& dtype = "fp32") {
  TypedOptions o =
      small_plan("channels=8 context=64 ranks=2 microbatches=2 batch=8 steps=2 timeout=120 dtype=" + dtype);
  o["vocab"] = dtype == "fp64" ? 70000 : dtype == "fp32" ? 140000 : 280000;
  return o;
}

TEST(WideVocab, PlansHaveTwoLogitBlocks) {
  for (const char* dtype : {"fp32", "bf16", "fp64"}) {
    const ArenaPtr arena = make_arena();
    const TypedOptions o = wide_plan(dtype);
    const DType type = resolve(o).optim.dtype;
    const RowBlocks blocks = row_blocks(Tensor::empty({128, o.model.channels}, type, arena),
                                        Tensor::empty({o.model.vocab, o.model.channels}, type, arena));
    EXPECT_EQ(blocks.block, 64) << dtype;
  }
}

TEST(WideVocab, EachStrategyTrainsLikeOneRank) {
  for (const char* dtype : {"fp32", "bf16", "fp64"}) expect_passes(wide_plan(dtype));
  expect_passes(wide_plan(), {"zero=1", "zero=2", "zero=3", "dp_mode=dataparallel", "dp_mode=ps-sync"});
  expect_passes(wide_plan("bf16"), {"grad_dtype=bf16", "grad_dtype=bf16 dp_mode=dataparallel"});
}

// Full and split backward passes; all forward passes before the first backward; two stages per rank.
TEST(WideVocab, PipelinesTrainLikeOneRank) {
  TypedOptions o = wide_plan();
  say(o, "pp=2 layers=4 microbatches=4");
  expect_passes(o, {"schedule=1f1b", "schedule=gpipe", "schedule=zb-h1", "schedule=zb-v"});
}

// If some targets are untrained, every plan averages over the trained ones of the global batch, like one rank.

VerifyHooks masked(bool packed) {
  return {.sequences = [packed](const TrainConfig& job) { return masked_sequences(job, packed); }};
}

TypedOptions masked_plan(const std::string& options) { return small_plan("channels=16 steps=3 batch=12 " + options); }

void expect_masked_passes(const std::string& options, bool packed) {
  TypedOptions o = masked_plan(options);
  o["document_mask"] = packed;
  expect_passes(o, masked(packed));
}

TEST(MaskedTargets, TrainLikeOneRank) {
  const std::vector<const char*> plans = {"dp=3 microbatches=2",
                                          "dp=3 microbatches=2 zero=1",
                                          "dp=3 microbatches=2 zero=2",
                                          "dp=3 microbatches=2 zero=3",
                                          "dp=2 microbatches=3 layers=4 pp=2 schedule=1f1b",
                                          "dp=2 microbatches=3 layers=4 pp=2 schedule=zb-v",
                                          "dp=2 dp_mode=ps-sync",
                                          "dp=2 microbatches=2 dtype=fp64 cp=2",
                                          "dp=2 microbatches=2 dtype=fp64 cp=2 cp_mode=ulysses",
                                          "dp=2 microbatches=2 dtype=fp64 tp=2 sp=true"};
  for (const bool packed : {false, true})
    for (const char* options : plans) expect_masked_passes(options, packed);
  expect_masked_passes("dp=2 microbatches=2 dp_mode=dataparallel", false);
}

// A GPU rank receives the number of a step's targets in every step: a captured step must not retain the first one.
TEST(MaskedTargets, GpuStepsMatchOracleBitwise) {
  if (const std::string why = no_gpu(); !why.empty()) GTEST_SKIP() << why;
  expect_masked_passes("ranks=1 microbatches=2 steps=5 device=cuda", false);
}

// Verification can fail: a rank that averages over its own targets is detected.
TEST(MaskedTargets, VerifyDetectsLocalMeanOnOneRank) {
  VerifyHooks hooks = masked(false);
  hooks.loading = [](Sequences s, const TrainConfig& job, int rank) {
    s.trained = [load = s.load, rank, per_rank = job.optim.batch / 2, context = job.model.context](int64_t step) {
      std::vector<int32_t> in(static_cast<size_t>(per_rank * context)), out(in.size());
      load(step, rank * per_rank, per_rank, in.data(), out.data());
      return 2 * (std::ssize(out) - std::count(out.begin(), out.end(), Rows::kIgnored));
    };
    return s;
  };
  EXPECT_FALSE(verify(resolve(masked_plan("dp=2")), hooks).passed());
}

// Counting ignored targets is detected too, because the oracle's mean equals that of a plain loop.
TEST(MaskedTargets, AreExcludedFromMean) {
  TrainConfig job = resolve(masked_plan("dp=1"));
  job.model.dropout = 0;
  job.optim.dtype = DType::float64;
  Sequences sequences = masked_sequences(job);
  const int64_t batch = job.optim.batch, context = job.model.context;
  std::vector<int32_t> in(static_cast<size_t>(batch * context)), out(in.size());
  sequences.load(0, 0, batch, in.data(), out.data());
  EXPECT_EQ(sequences.trained(0), std::ssize(out) - std::count(out.begin(), out.end(), Rows::kIgnored));
  ASSERT_LT(sequences.trained(0), std::ssize(out) / 2);
  const double masked_loss = Reference(job, sequences, {}).compute_gradients().loss;
  // An untrained model predicts all tokens equally.
  EXPECT_NEAR(masked_loss, std::log(static_cast<double>(job.model.vocab)), 0.3);
}

TEST(MaskedTargets, AreRejectedWithAsyncWorkers) {
  const TrainConfig job = resolve(masked_plan("dp=2 dp_mode=ps-async"));
  EXPECT_THROW(check_sequences(job, masked_sequences(job)), FieldError);
  EXPECT_NO_THROW(check_sequences(resolve(masked_plan("dp=2")), masked_sequences(job)));
}

// The oracle replays the routing of plans that split sums, and accepts it only if rounding explains the difference.

// The plan's ranks route every token to the same two experts. Because the oracle replays these choices, all values and
// gradients agree; only the margin reveals that the router did not make the choices.
TEST(Routing, WrongExpertChoicesExceedRoutingMargin) {
  TypedOptions o = small_plan("dtype=fp64 tp=2 experts=4 steps=2");
  const VerifyHooks hooks = {.made = [](Trainer& t) {
    const int64_t context = t.state().full_model().config.context;
    for (MixtureOfExperts* mixture : t.state().model().all<MixtureOfExperts>())
      mixture->set_choices([context](int64_t, int64_t sequences) {
        std::vector<int32_t> choices;
        for (int64_t i = 0; i < sequences * context; ++i) choices.insert(choices.end(), {0, 1});
        return Tensor::of<int32_t>(choices, {std::ssize(choices)}, make_arena());
      });
  }};
  EXPECT_TRUE(verify(resolve(o)).passed());
  const VerifyResult r = verify(resolve(o), hooks);
  ASSERT_EQ(r.failures.size(), 1U);
  EXPECT_TRUE(has(r.failures[0], "tokens were routed to a different expert than on one rank"));
  EXPECT_GT(r.rerouted_tokens, 0);
}

}  // namespace
}  // namespace tessera
