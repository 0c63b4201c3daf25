// A plan as a value: made in a program, compared, printed, written and read; and the field that is wrong.

#include "tests/support/errors.h"
#include "train/async/trainer.h"

namespace tessera {
namespace {

const Plan kSketch{
    .pp = 2, .dp = 2, .tp = 2, .zero = ZeroStage::one, .schedule = ScheduleKind::zb_h1, .microbatches = 8};

// Every field has another value than the default.
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
          .deterministic = true,
          .threads_per_rank = 11,
          .timeout = 1.5};
}

TEST(Plan, IsAValue) {
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

TEST(Plan, IsReadFromWhatItWrites) {
  for (const Plan& plan : {Plan{}, kSketch, odd_one()}) EXPECT_EQ(plan_from_json(to_json(plan)), plan) << to_json(plan);
  EXPECT_EQ(plan_from_json("{}"), Plan{});
  EXPECT_EQ(plan_from_json(R"({"dp": 2, "zero": 3, "dp_mode": "ps-sync", "bucket_mb": 1})"),
            (Plan{.dp = 2, .zero = ZeroStage::three, .dp_mode = DataMode::ps_sync, .bucket_mb = 1}));
  // No two fields share a name, and none is forgotten: each alone makes another text.
  const std::string text = to_text(odd_one());
  EXPECT_EQ(std::count(text.begin(), text.end(), '='), 28) << text;
}

void expect_field(const std::function<void()>& f, const std::string& field, const std::string& words) {
  EXPECT_THROW(f(), FieldError);
  EXPECT_TRUE(error_of(f).starts_with("`" + field + "`: ")) << error_of(f);
  expect_error(Status::usage, {words}, f);
}

TEST(Plan, WrongJsonNamesTheField) {
  const auto expect = [](const char* json, const char* field, const char* words) {
    expect_field([&] { plan_from_json(json); }, field, words);
  };
  expect(R"({"ranks": 2})", "ranks", "no field of a plan; expected one of pp, dp, cp, tp, ep, sp, tie_copies, zero,");
  expect(R"({"dp": "2"})", "dp", "expected a whole number, found \"2\"");
  expect(R"({"dp": 2.5})", "dp", "expected a whole number, found 2.5");
  expect(R"({"sp": 1})", "sp", "expected true or false, found 1");
  expect(R"({"zero": 4})", "zero", "expected 0, 1, 2 or 3, found 4");
  expect(R"({"zero": -1})", "zero", "found -1");
  expect(R"({"schedule": "fast"})", "schedule",
         "expected naive, gpipe, 1f1b, interleaved, zb-h1, zb-h2, zb-v, v-half, v-min, found");
  expect(R"({"timeout": null})", "timeout", "expected a number, found null");
  expect(R"({"record": 3})", "record", "expected a string, found 3");
  expect_error(Status::usage, {"expected a JSON object, found [1]"}, [] { plan_from_json("[1]"); });
  expect_error(Status::usage, {"expected a JSON object"}, [] { plan_from_json("{"); });
}

TEST(Plan, ACheckNamesTheField) {
  const auto expect = [](const Plan& plan, const char* field, const char* words) {
    expect_field([&] { check(plan); }, field, words);
  };
  EXPECT_NO_THROW(check(kSketch));
  EXPECT_NO_THROW(check(Plan{}));
  expect({.tp = 0}, "tp", "expected at least 1, found 0");
  expect({.microbatches = -1}, "microbatches", "expected at least 1, found -1");
  expect({.bucket_mb = 0}, "bucket_mb", "expected a number above 0, found 0");
  expect({.timeout = std::nan("")}, "timeout", "expected a number above 0");
  expect({.dp = 2, .dp_mode = DataMode::ps_sync, .servers = 3}, "servers", "expected at most the 2 ranks, found 3");
  expect({.staleness = 2}, "staleness", "goes with `dp_mode` ps-async, found ddp; expected 1 beside it");
  expect({.zero = ZeroStage::two, .dp_mode = DataMode::ps_sync}, "zero", "2 goes with `dp_mode` ddp, found ps-sync");
  expect({.tp = 2, .dp_mode = DataMode::ps_sync}, "dp_mode", "ps-sync is for data-parallel ranks alone");
  expect({.all_reduce = Algorithm::native}, "all_reduce", "expected direct, ring, tree or root");
  expect({.record = "x"}, "record", "goes with `dp_mode` ps-async, found ddp");
  expect({.chunks = 2}, "chunks", "goes with `schedule` interleaved, found 1f1b");
  expect({.pp = 2, .schedule = ScheduleKind::interleaved, .microbatches = 3}, "schedule", "3 micro-batches");
  expect({.backend = Backend::nccl}, "backend", "expected `device` cuda beside it, found cpu");
}

TEST(Job, ACheckNamesTheFieldAndTheNearestThatCan) {
  const auto expect = [](const Job& job, const char* field, const char* words) {
    expect_field([&] { check(job); }, field, words);
  };
  EXPECT_NO_THROW(check(Job{}));
  expect({.model = {.heads = 3}}, "heads", "3 heads do not divide 128 channels");
  expect({.plan = {.microbatches = 5}}, "microbatches", "5 do not divide a batch of 12; the nearest that does: 4 or 6");
  expect({.plan = {.dp = 5}}, "batch", "the nearest that can: 10 or 15");
  expect({.plan = {.tp = 3}}, "tp", "3 does not divide the 4 heads; the nearest that does: 2 or 4");
  expect({.plan = {.cp = 3}}, "cp", "the nearest `context` that can be cut: 60 or 66");
  expect({.plan = {.pp = 8}}, "pp", "8 ranks make 8 stages, more than the 4 layers");
  expect({.model = {.context = 7}, .plan = {.tp = 2, .sp = true}}, "sp", "the nearest that does: `tp` 1 or 7");
}

// A program of one's own, with no word of options.
TEST(Job, TrainsTheSameUnderEveryPlan) {
  const auto losses = [](const Plan& plan) {
    const Job job{.model = {.layers = 2, .heads = 2, .channels = 16, .context = 8, .vocab = 20},
                  .optim = {.optimizer = OptimizerKind::sgd, .lr = 0.1, .warmup = 0, .steps = 3, .batch = 4},
                  .plan = plan};
    check(job);
    std::vector<double> out;
    launch(launch_options(plan), [&](Communicator& world) {
      Trainer trainer(job, counted_sequences(20, 8, 4, 1), world);
      EXPECT_EQ(trainer.job().plan, plan);
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

TEST(Plan, RanksThatNobodyStartedAreRefused) {
  expect_field([] { check(Plan{.dp = 2, .backend = Backend::mpi}); }, "backend", "mpirun, which did not start this");
}

// A program of somebody's own may hand each rank another job; in every field that changes the run.
TEST(JobOfAllRanks, OnesThatDifferAreRefusedByField) {
  const Job same{
      .model = {.layers = 1, .channels = 8, .context = 4, .vocab = 5}, .optim = {.batch = 4}, .plan = {.dp = 2}};
  const auto refusal = [&](const std::function<void(Job&)>& change) {
    return error_of(
        [&] {
          launch({.ranks = 2, .timeout_s = 20}, [&](Communicator& world) {
            Job job = same;
            if (world.rank() == 1) change(job);
            if (job.plan.dp_mode == DataMode::ps_async)
              const AsyncTrainer trainer(job, counted_sequences(5, 4, 4, 1), world);
            else
              const Trainer trainer(job, counted_sequences(5, 4, 4, 1), world);
          });
        },
        Status::usage);
  };
  const auto expect = [&](const std::function<void(Job&)>& change, const std::string& words) {
    EXPECT_NE(refusal(change).find("ranks do not agree: " + words), std::string::npos) << refusal(change);
  };
  expect([](Job& job) { job.optim.lr = 0.5; }, "`lr` is 0.001 on rank 0 and 0.5 on rank 1");
  expect([](Job& job) { job.model.channels = 16; }, "`channels` is 8 on rank 0 and 16 on rank 1");
  expect([](Job& job) { job.plan = {.pp = 2}; }, "`dp` is 2 on rank 0 and 1 on rank 1");
  expect([](Job& job) { job.plan.zero = ZeroStage::three; }, "`zero` is ");
  expect([](Job& job) { job.plan.dp_mode = DataMode::ps_async; }, "`dp_mode` is ");
}

}  // namespace
}  // namespace tessera
