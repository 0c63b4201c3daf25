// Plans of every strategy, schedule and product of axes train like one rank, to the bit or to the bound of the contract:
// random ones and one of each kind; with a vocabulary in two blocks, masked targets and choices of experts.


#include "tests/verify/draw.h"
#include "tests/support/gpu.h"
#include "tests/support/masked_sequences.h"
#include "tests/verify/plans.h"
#include "verify/reference.h"
#include "verify/verify.h"
#include "tests/support/errors.h"

namespace tessera {
namespace {

using test::Draw;
using test::expect_passes;
using test::small_plan;

TrainOptions draw_plan(uint64_t trial) {
  Draw d("plans", trial);
  TrainOptions o = small_plan();
  o["layers"] = d.between(1, 3);
  o["heads"] = d.between(1, 3);
  o["channels"] = o.sizes.heads * 4 * d.between(1, 5);
  o["context"] = d.between(3, 20);
  o["vocab"] = d.between(5, 90);
  o.ranks = d.of<int64_t>({2, 3, 4, 8});
  o["microbatches"] = d.between(1, 3);
  o["batch"] = *o.ranks * o.plan.microbatches * d.between(1, 3);
  o["dropout"] = d.of({0.0, 0.1, 0.3});
  o["dtype"] = d.of<const char*>({"fp32", "fp32", "bf16", "fp64"});
  o["grad_dtype"] = text_of(o.optim.dtype) == "bf16" ? d.of<const char*>({"fp32", "bf16"}) : "fp32";
  o["optimizer"] = d.of<const char*>({"sgd", "adam", "adamw"});
  o["momentum"] = d.of({0.0, 0.9});
  o["clip"] = d.of({0.0, 0.5, 1.0});
  o["recompute"] = d.of<const char*>({"none", "activation", "activation+norm", "attention", "block"});
  o["seed"] = d.between(0, 1 << 20);
  o["lr"] = text_of(o.optim.optimizer) == "sgd" ? 0.3 : 0.01;
  o["dp_mode"] = d.of<const char*>({"ddp", "ddp", "ddp", "ddp", "dataparallel", "ps-sync"});
  if (text_of(o.plan.dp_mode) == "ddp") {
    o["zero"] = d.between(0, 3);
    o["all_reduce"] = d.of<const char*>({"direct", "direct", "ring", "tree", "root"});
    o["bucket_mb"] = d.of({1e-6, 0.001, 0.01, 4.0});
  }
  o["offload"] = d.of<const char*>({"none", "none", "optimizer"});
  if (text_of(o.plan.dp_mode) == "ps-sync") o["servers"] = d.between(1, *o.ranks);
  test::draw_family(d, o);
  test::draw_experts(d, o, *o.ranks);
  if (text_of(o.optim.dtype) == "bf16") o["state_dtype"] = d.of<const char*>({"fp32", "bf16"});
  test::draw_replicas(d, o, *o.ranks);
  return o;
}

TEST(Contract, RandomPlansTrainLikeOneRank) {
  for (uint64_t trial = 0; trial < test::plans(60); ++trial) {
    SCOPED_TRACE(trial);
    expect_passes(draw_plan(trial));
  }
}

TEST(Contract, EachStrategyAndStage) {
  for (const char* dtype : {"fp32", "bf16"})
    for (const int64_t ranks : {2, 3}) {
      TrainOptions o = small_plan();
      o["dtype"] = dtype;
      o.ranks = ranks;
      o["microbatches"] = 2;
      for (const int64_t zero : {0, 1, 2, 3}) o["zero"] = zero, expect_passes(o);
      o["zero"] = 0;
      for (const char* mode : {"dataparallel", "ps-sync"}) {
        o["dp_mode"] = mode;
        expect_passes(o);
      }
    }
}

// The default model and the path without parallelism.
TEST(Contract, OneRankIsItsOwnOracle) {
  TrainOptions o = small_plan();
  say(o, "ranks=1 microbatches=3");
  expect_passes(o);
  for (const int64_t zero : {1, 2, 3}) o["zero"] = zero, expect_passes(o);  // any stage is accepted where the axis is 1
}

// A copy for each use of the tied weight, without a pipeline that needs it.
TEST(Contract, CopiesOfATiedWeightAreSummedApart) {
  for (const int64_t zero : {0, 3}) {
    TrainOptions o = verify_defaults();
    say(o, "layers=2 heads=2 channels=16 context=8 batch=8 steps=4 ranks=2 microbatches=2");
    o["zero"] = zero;
    say(o, "tie_copies=true threads_per_rank=1");
    const VerifyResult r = verify(job_of(o));
    EXPECT_TRUE(r.passed() && r.bitwise) << test::command_of(o) << "\n" << (r.passed() ? "" : r.failures.front());
  }
}

TEST(Contract, TheLossFalls) {
  TrainOptions o = small_plan();
  o["steps"] = 40;
  say(o, "ranks=2 zero=3");
  const VerifyResult r = verify(job_of(o));
  EXPECT_TRUE(r.passed());
  EXPECT_LT(r.losses.back(), r.losses.front() - 0.2);
}

// Pipelines of every schedule train like one rank to the bit, alone and with data parallelism; tensor and context
// parallelism, and all products up to 16 ranks, to the bound of the contract.

// Every random plan draws these alike.
TrainOptions draw_model(Draw& d) {
  TrainOptions o = small_plan();
  o["vocab"] = d.between(5, 70);
  o["dropout"] = d.of({0.0, 0.1, 0.3});
  o["optimizer"] = d.of<const char*>({"sgd", "adam", "adamw"});
  o["momentum"] = d.of({0.0, 0.9});
  o["clip"] = d.of({0.0, 0.5, 1.0});
  o["recompute"] = d.of<const char*>({"none", "none", "activation", "activation+norm", "attention", "block"});
  o["seed"] = d.between(0, 1 << 20);
  o["lr"] = text_of(o.optim.optimizer) == "sgd" ? 0.3 : 0.01;
  o["timeout"] = 60;
  return o;
}

void draw_pipeline(Draw& d, TrainOptions& o, int64_t ranks) {
  o["pp"] = ranks;
  const auto& names = schedule_names();
  o["schedule"] = names[static_cast<size_t>(d.between(0, static_cast<int64_t>(names.size()) - 1))];
  o["microbatches"] = d.between(1, 6);
  int64_t chunks = is_v(*value_named<ScheduleKind>(kScheduleNames, text_of(o.plan.schedule))) ? 2 : 1;
  if (text_of(o.plan.schedule) == "interleaved") {
    o["chunks"] = chunks = d.between(1, 3);
    o["microbatches"] = ranks * d.between(1, 2);
  }
  o["layers"] = ranks * chunks + d.between(0, 2);
}

// Pipelines with DDP or a stage of ZeRO.
TrainOptions draw_exact_plan(uint64_t trial) {
  Draw d("pipelines", trial);
  TrainOptions o = draw_model(d);
  o["heads"] = d.between(1, 3);
  o["channels"] = o.sizes.heads * 4 * d.between(1, 4);
  o["context"] = d.between(3, 14);
  draw_pipeline(d, o, d.between(1, 4));
  o["dp"] = d.of<int64_t>({1, 1, 2, 3});
  o["batch"] = o.plan.dp * o.plan.microbatches * d.between(1, 2);
  o["dtype"] = d.of<const char*>({"fp32", "fp32", "bf16", "fp64"});
  o["grad_dtype"] = text_of(o.optim.dtype) == "bf16" ? d.of<const char*>({"fp32", "bf16"}) : "fp32";
  o["zero"] = d.between(0, 3);
  o["all_reduce"] = d.of<const char*>({"direct", "direct", "ring", "tree", "root"});
  o["bucket_mb"] = d.of({1e-6, 0.001, 4.0});
  test::draw_family(d, o);
  test::draw_experts(d, o, o.plan.dp);
  if (text_of(o.optim.dtype) == "bf16") o["state_dtype"] = d.of<const char*>({"fp32", "bf16"});
  test::draw_replicas(d, o, o.plan.dp * o.plan.cp);
  return o;
}

TEST(MeshContract, PipelinesTrainLikeOneRankToTheBit) {
  for (uint64_t trial = 0; trial < test::plans(40); ++trial) {
    SCOPED_TRACE(trial);
    expect_passes(draw_exact_plan(trial));
  }
}

// Sizes of the axes, with at least one rank on a tensor or context axis and 16 at most in all.
void draw_mesh(Draw& d, TrainOptions& o) {
  do {
    o["tp"] = d.of<int64_t>({1, 2, 2, 3, 4});
    o["cp"] = d.of<int64_t>({1, 1, 2, 3});
    o["dp"] = d.of<int64_t>({1, 1, 2});
    o["pp"] = d.of<int64_t>({1, 1, 2, 3});
  } while (o.plan.tp * o.plan.cp == 1 || o.plan.tp * o.plan.cp * o.plan.dp * o.plan.pp > 16);
}

TrainOptions draw_split_plan(uint64_t trial) {
  Draw d("products", trial);
  TrainOptions o = draw_model(d);
  draw_mesh(d, o);
  if (o.plan.pp > 1)
    draw_pipeline(d, o, o.plan.pp);
  else
    o["layers"] = d.between(1, 3);
  o["cp_mode"] = d.of<const char*>({"ring", "ulysses"});
  o["sp"] = d.between(0, 1) == 1;
  const int64_t unit = o.plan.tp * (text_of(o.plan.cp_mode) == "ulysses" ? o.plan.cp : 1);
  o["heads"] = unit * d.between(1, 3);
  o["channels"] = o.sizes.heads * 4 * d.between(1, 3);
  o["context"] = 2 * o.plan.cp * o.plan.tp * d.between(1, 2);
  o["batch"] = o.plan.dp * o.plan.microbatches * d.between(1, 2);
  o["zero"] = d.between(0, 3);
  o["all_reduce"] = d.of<const char*>({"direct", "direct", "ring", "tree", "root"});
  o["dtype"] = d.of<const char*>({"fp64", "fp64", "fp64", "fp32", "bf16"});
  o["steps"] = 4;
  test::draw_family(d, o, unit);
  test::draw_experts(d, o, o.plan.dp * o.plan.cp);
  return o;
}

TEST(MeshContract, ProductsOfAllAxesTrainLikeOneRank) {
  for (uint64_t trial = 0; trial < test::plans(40); ++trial) {
    SCOPED_TRACE(trial);
    expect_passes(draw_split_plan(trial));
  }
}

// One plan of each kind, so that a failure has a name.
TEST(MeshContract, EachScheduleAlone) {
  for (const std::string& name : schedule_names()) {
    TrainOptions o = small_plan();
    o["schedule"] = name;
    say(o, "pp=2 layers=4 microbatches=4 batch=8");
    expect_passes(o);
  }
}

TEST(MeshContract, EachSplitAlone) {
  for (const bool sp : {false, true}) {
    TrainOptions o = small_plan();
    say(o, "dtype=fp64 tp=2");
    o["sp"] = sp;
    expect_passes(o);
  }
  for (const char* mode : {"ring", "ulysses"}) {
    TrainOptions o = small_plan();
    say(o, "dtype=fp64 cp=2");
    o["cp_mode"] = mode;
    expect_passes(o);
  }
}

TEST(MeshContract, TheLossFallsUnderAllFourAxes) {
  TrainOptions o = small_plan();
  o["pp"] = o["dp"] = o["cp"] = o["tp"] = 2;
  say(o, "sp=true zero=1 microbatches=2 batch=12 steps=40");
  const VerifyResult r = verify(job_of(o));
  EXPECT_TRUE(r.passed()) << r.failures.front();
  EXPECT_LT(r.losses.back(), r.losses.front() - 0.2);
}

// A vocabulary so wide that the head is scored in two blocks of rows: still every plan has the bits of one rank, also
// where the logits stand whole (DataParallel), and the bound of its peak holds.

// Two sequences of 64 tokens in a micro-batch.
TrainOptions wide_plan(const char* dtype = "fp32") {
  TrainOptions o = test::small_plan();
  say(o, "channels=8 context=64 vocab=70000");
  if (std::string(dtype) != "fp64") o["vocab"] = 140000;
  if (std::string(dtype) == "bf16") o["vocab"] = 280000;
  o["dtype"] = dtype;
  say(o, "ranks=2 microbatches=2 batch=8 steps=2 timeout=120");
  return o;
}

TEST(WideVocab, TheseHaveTwoBlocks) {
  for (const char* dtype : {"fp32", "bf16", "fp64"}) {
    const ArenaPtr arena = make_arena();
    const TrainOptions o = wide_plan(dtype);
    const DType type = job_of(o).optim.dtype;
    const RowBlocks blocks = row_blocks(Tensor::empty({128, o.sizes.channels}, type, arena),
                                        Tensor::empty({o.sizes.vocab, o.sizes.channels}, type, arena));
    EXPECT_EQ(blocks.block, 64) << dtype;
  }
}

TEST(WideVocab, EachStrategyTrainsLikeOneRank) {
  for (const char* dtype : {"fp32", "bf16", "fp64"}) expect_passes(wide_plan(dtype));
  TrainOptions o = wide_plan();
  for (const int64_t zero : {1, 2, 3}) o["zero"] = zero, expect_passes(o);
  o["zero"] = 0;
  for (const char* mode : {"dataparallel", "ps-sync"}) {
    o["dp_mode"] = mode;
    expect_passes(o);
  }
  o = wide_plan("bf16");
  o["grad_dtype"] = "bf16";
  expect_passes(o);
  o["dp_mode"] = "dataparallel";
  expect_passes(o);
}

// Whole and split backward passes; all forward passes before the first backward one; two stages on each rank.
TEST(WideVocab, PipelinesTrainLikeOneRank) {
  for (const char* schedule : {"1f1b", "gpipe", "zb-h1", "zb-v"}) {
    TrainOptions o = wide_plan();
    say(o, "pp=2 layers=4 microbatches=4");
    o["schedule"] = schedule;
    expect_passes(o);
  }
}

// Where not all targets are trained, every plan takes the mean over those of the whole batch, as one rank does.

VerifyHooks masked(bool packed) {
  VerifyHooks hooks;
  hooks.sequences = [packed](const Job& job) { return test::masked_sequences(job, packed); };
  return hooks;
}

TrainOptions plan_of(int64_t dp, int64_t microbatches) {
  TrainOptions o = test::small_plan();
  say(o, "channels=16 steps=3 batch=12");
  o["dp"] = dp;
  o["microbatches"] = microbatches;
  return o;
}

void expect_passes(TrainOptions o, bool packed) {
  o["document_mask"] = packed;
  const VerifyResult r = verify(job_of(o), masked(packed));
  EXPECT_TRUE(r.passed()) << test::command_of(o) << "\n" << (r.failures.empty() ? "" : r.failures.front());
  EXPECT_TRUE(r.bitwise || !r.exact) << test::command_of(o);
}

TEST(MaskedTargets, HaveTheBitsOfOneRankOnTheDataAndPipelineAxes) {
  for (const bool packed : {false, true}) {
    for (int64_t zero = 0; zero <= 3; ++zero) {
      TrainOptions o = plan_of(3, 2);
      o["zero"] = zero;
      expect_passes(o, packed);
    }
    for (const char* schedule : {"1f1b", "zb-v"}) {
      TrainOptions o = plan_of(2, 3);
      say(o, "layers=4 pp=2");
      o["schedule"] = schedule;
      expect_passes(o, packed);
    }
    TrainOptions o = plan_of(2, 1);
    o["dp_mode"] = "ps-sync";
    expect_passes(o, packed);
  }
  TrainOptions o = plan_of(2, 2);
  o["dp_mode"] = "dataparallel";
  expect_passes(o, false);
}

TEST(MaskedTargets, AgreeOnTheTensorAndContextAxes) {
  for (const bool packed : {false, true}) {
    TrainOptions o = plan_of(2, 2);
    say(o, "dtype=fp64 cp=2");
    expect_passes(o, packed);
    o["cp_mode"] = "ulysses";
    expect_passes(o, packed);
    forget(o, {"cp"});
    say(o, "tp=2 sp=true");
    expect_passes(o, packed);
  }
}

// A rank of a GPU is told the number of a step's targets anew: a captured step would keep that of the first.
TEST(MaskedTargets, HaveTheBitsOfOneRankOnAGpu) {
  if (const std::string why = test::no_gpu(); !why.empty()) GTEST_SKIP() << why;
  TrainOptions o = plan_of(1, 2);
  say(o, "ranks=1 steps=5 device=cuda");
  expect_passes(o, false);
}

// The contract can fail: a rank that takes the mean over its own targets is caught.
TEST(MaskedTargets, ARankThatCountsItsOwnTargetsIsCaught) {
  VerifyHooks hooks = masked(false);
  hooks.loading = [](Sequences s, const Job& job, int rank) {
    s.trained = [load = s.load, rank, per_rank = job.optim.batch / 2, context = job.model.context](int64_t step) {
      std::vector<int32_t> in(static_cast<size_t>(per_rank * context)), out(in.size());
      load(step, rank * per_rank, per_rank, in.data(), out.data());
      return 2 * (std::ssize(out) - std::count(out.begin(), out.end(), Rows::kIgnored));
    };
    return s;
  };
  EXPECT_FALSE(verify(job_of(plan_of(2, 1)), hooks).passed());
}

// And so are ignored targets that count: the oracle's mean is that of a plain loop.
TEST(MaskedTargets, AreNoPartOfTheMean) {
  Job job = job_of(plan_of(1, 1));
  job.model.dropout = 0;
  job.optim.dtype = DType::float64;
  Sequences sequences = test::masked_sequences(job);
  const int64_t batch = job.optim.batch, context = job.model.context;
  std::vector<int32_t> in(static_cast<size_t>(batch * context)), out(in.size());
  sequences.load(0, 0, batch, in.data(), out.data());
  EXPECT_EQ(sequences.trained(0), std::ssize(out) - std::count(out.begin(), out.end(), Rows::kIgnored));
  ASSERT_LT(sequences.trained(0), std::ssize(out) / 2);
  const double masked_loss = Reference(job, sequences, {}).compute_gradients().loss;
  // Untrained, a model expects every token alike.
  EXPECT_NEAR(masked_loss, std::log(static_cast<double>(job.model.vocab)), 0.3);
}

TEST(MaskedTargets, AreRefusedWhereWorkersUpdateAlone) {
  TrainOptions o = plan_of(2, 1);
  o["dp_mode"] = "ps-async";
  const Job job = job_of(o);
  EXPECT_THROW(check_sequences(job, test::masked_sequences(job)), FieldError);
  EXPECT_NO_THROW(check_sequences(job_of(plan_of(2, 1)), test::masked_sequences(job)));
}

// The oracle takes the routing of a plan that splits sums: only what rounding explains.

// On the plan's ranks every token goes to the same two experts. What they then compute is right, and so are all
// gradients beside an oracle that follows them: the margin alone says that these were not the router's choices.
TEST(Routing, ChoicesThatAreNotTheRoutersAreNoRounding) {
  TrainOptions o = test::small_plan();
  say(o, "dtype=fp64 tp=2 experts=4 steps=2");
  VerifyHooks hooks;
  hooks.made = [](Trainer& t) {
    const int64_t context = t.whole_model().config.context;
    for (MixtureOfExperts* mixture : t.model().all<MixtureOfExperts>())
      mixture->set_choices([context](int64_t, int64_t sequences) {
        std::vector<int32_t> choices;
        for (int64_t i = 0; i < sequences * context; ++i) choices.insert(choices.end(), {0, 1});
        return Tensor::of<int32_t>(choices, {std::ssize(choices)}, make_arena());
      });
  };
  EXPECT_TRUE(verify(job_of(o)).passed());
  const VerifyResult r = verify(job_of(o), hooks);
  ASSERT_EQ(r.failures.size(), 1U);
  EXPECT_TRUE(has(r.failures[0], "tokens went to another expert than on one rank"));
  EXPECT_GT(r.strayed, 0);
}

}  // namespace
}  // namespace tessera
