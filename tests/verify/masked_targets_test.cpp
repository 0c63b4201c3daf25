// Where not all targets are trained, every plan takes the mean over those of the whole batch, as one rank does.

#include "tests/support/gpu.h"
#include "tests/support/masked_sequences.h"
#include "tests/verify/plans.h"
#include "verify/reference.h"
#include "verify/verify.h"

namespace tessera {
namespace {

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

}  // namespace
}  // namespace tessera
