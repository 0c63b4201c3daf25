// Failures during training: the run ends on every rank promptly, with the cause and the failed rank; and delayed ranks
// do not affect results.

#include <chrono>
#include <cstdint>
#include <limits>
#include <regex>
#include <string>
#include <vector>

#include "models/decoder.h"
#include "tests/support/errors.h"
#include "tests/verify/plans.h"
#include "train/checkpoint/full_state.h"
#include "verify/defects/transports.h"

namespace tessera {
namespace {

using test::make_command;

#ifdef __SANITIZE_THREAD__
constexpr int kFailures = 2, kLate = 1;  // trials of each plan (and rank)
#else
constexpr int kFailures = 5, kLate = 3;
#endif

std::vector<TypedOptions> plans() {
  std::vector<TypedOptions> out;
  for (const std::string how :
       {"zero=0", "zero=1", "zero=2", "zero=3", "dp_mode=dataparallel", "dp_mode=ps-sync servers=2"})
    out.push_back(test::small_plan("steps=4 ranks=3 batch=12 microbatches=2 bucket_mb=0.005 " + how));
  return out;
}

// Final parameters, on rank 0.
std::string train(const TypedOptions& o, const Faults& faults, const Sequences& sequences) {
  std::string out;
  LaunchOptions how = launch_options(resolve(o).plan);
  how.around = with_faults(faults);
  launch(how, [&](Communicator& world) {
    Trainer trainer(resolve(o), sequences, world);
    while (trainer.state().steps_done() < o.optim.steps) trainer.step();
    for (const NamedTensor& t : full_values(trainer.state()))
      out.append(reinterpret_cast<const char*>(t.tensor.raw()), static_cast<size_t>(t.tensor.nbytes()));
  });
  return out;
}

Sequences synthetic(const TypedOptions& o) { return test::synthetic(resolve(o), o.optim.seed); }

struct Failure {
  std::string what = "nothing was thrown";
  Status status{};
  double seconds = 0;
};
Failure failure(const TypedOptions& o, const Faults& faults, const Sequences& sequences) {
  Failure f;
  const auto begin = std::chrono::steady_clock::now();
  try {
    train(o, faults, sequences);
  } catch (const Error& e) {
    f.what = e.what();
    f.status = e.status();
  }
  f.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  return f;
}

TEST(Faults, ReportsFailingRankAndCauseAtAnyCall) {
  const Philox random(3);
  uint64_t trial = 0;
  for (const TypedOptions& o : plans())
    for (int guilty = 0; guilty < 3; ++guilty)
      for (int round = 0; round < kFailures; ++round, ++trial) {
        const auto call = static_cast<int64_t>(random.below(24, trial));
        const Failure f = failure(o, {{guilty, {{.kind = Fault::Kind::fail, .call = call}}}}, synthetic(o));
        const std::string cause = "an injected fault at call " + std::to_string(call);
        EXPECT_TRUE(f.what.starts_with("[rank " + std::to_string(guilty) + "] ") && f.what.ends_with(cause))
            << make_command(o) << ", " << cause << ": " << f.what;
        EXPECT_EQ(f.status, Status::communication);
        EXPECT_LT(f.seconds, o.plan.timeout / 2) << make_command(o) << ", " << cause;
      }
}

// A rank fails between communication calls, because its data cannot be read.
TEST(Faults, DataErrorOnOneRankStopsOtherRanks) {
  for (const TypedOptions& o : plans()) {
    const int64_t part = o.optim.batch / 3;
    const int guilty = value_name(o.plan.dp_mode) == "dataparallel" ? 0 : 1;
    Sequences sequences = synthetic(o);
    sequences.load = [=, load = sequences.load](int64_t step, int64_t first, int64_t count, int32_t* in, int32_t* out) {
      if (step == 2 && first / part == 1) throw InputError("the file is gone");
      load(step, first, count, in, out);
    };
    const Failure f = failure(o, {}, sequences);
    EXPECT_EQ(f.what, "[rank " + std::to_string(guilty) + "] the file is gone") << make_command(o);
    EXPECT_EQ(f.status, Status::input);
    EXPECT_LT(f.seconds, o.plan.timeout / 2);
  }
}

// The loss is non-finite on one rank, and all ranks learn of it before any update.
TEST(Faults, NonFiniteLossOnOneRankStopsAllRanksInSameStep) {
  for (const TypedOptions& o : plans()) {
    std::vector<int64_t> done(3, -1);
    const auto run_all_steps = [&](Trainer& trainer) {
      int64_t& steps = done[static_cast<size_t>(trainer.state().groups.world.rank())];
      for (steps = 0;; ++steps) {
        const Tensor& values = trainer.state().strategy().resident_units()[0].values;
        if (steps == 2 && trainer.state().groups.world.rank() == 1)
          values.narrow(0, 0, values.numel()).fill(std::numeric_limits<double>::quiet_NaN());
        trainer.step();
      }
    };
    expect_error(Status::not_finite, {"step 3: the loss is nan"},
                 [&] { test::on_ranks(resolve(o), synthetic(o), run_all_steps); });
    EXPECT_EQ(done, std::vector<int64_t>(3, 2)) << make_command(o);
  }
}

// One rank's gradient overflows while every loss is finite: a matrix of the last block, on which no other gradient
// depends, and which tensor ranks shard.
TEST(Faults, NonFiniteGradientNormOnOneRankStopsAllRanksInSameStep) {
  std::vector<TypedOptions> all = plans();
  for (const std::string how : {"ranks=3 dp_mode=diloco sync_every=2", "pp=3 layers=3", "tp=2", "tp=2 sp=true", "cp=2"})
    all.push_back(test::small_plan("steps=4 batch=12 microbatches=2 " + how));
  for (const TypedOptions& o : all) {
    std::vector<int64_t> done(static_cast<size_t>(resolve(o).plan.ranks()), -1);
    const int guilty = static_cast<int>(done.size()) - 1;
    const auto run_all_steps = [&](Trainer& trainer) {
      int64_t& steps = done[static_cast<size_t>(trainer.state().groups.world.rank())];
      const auto overflow = [&](const Var& parameter) {
        if (parameter.shape().ndim() < 2) return parameter;
        return record_one("overflow", parameter.value(), {parameter}, [&](Grads& g) {
          Tensor gradient = g.output().clone();
          if (steps == 2) gradient.fill(std::numeric_limits<double>::infinity());
          g.set(0, gradient);
        });
      };
      if (trainer.state().groups.world.rank() == guilty)
        trainer.state().model().all<Linear>().back()->transform(overflow);
      for (steps = 0;; ++steps) trainer.step();
    };
    const std::string what =
        error_message([&] { test::on_ranks(resolve(o), synthetic(o), run_all_steps); }, Status::not_finite);
    const std::regex expected("(\\[rank [0-9]\\] )?step 3: the loss is [0-9.]+ and the gradient norm inf; .*");
    EXPECT_TRUE(std::regex_match(what, expected)) << make_command(o) << ": " << what;
    EXPECT_EQ(done, std::vector<int64_t>(done.size(), 2)) << make_command(o);
  }
}

TEST(Faults, LostCallFailsWithoutHang) {
  for (TypedOptions o : plans()) {
    o["timeout"] = 0.5;
    for (const int64_t call : {2, 9}) {
      const Failure f = failure(o, {{1, {{.kind = Fault::Kind::drop, .call = call}}}}, synthetic(o));
      EXPECT_NE(f.what, "nothing was thrown") << make_command(o) << ", call " << call;
      EXPECT_EQ(f.status, Status::communication) << f.what;
      EXPECT_LT(f.seconds, 10);
    }
  }
}

TEST(Faults, DelayedRanksDoNotAffectResults) {
  const Philox random(4);
  uint64_t sample = 0;
  for (const TypedOptions& o : plans()) {
    const std::string undisturbed = train(o, {}, synthetic(o));
    ASSERT_FALSE(undisturbed.empty());
    for (int round = 0; round < kLate; ++round) {
      Faults faults;
      for (int rank = 0; rank < 3; ++rank)
        for (int k = 0; k < 6; ++k, sample += 2)
          faults[rank].push_back({.kind = Fault::Kind::delay,
                                  .call = static_cast<int64_t>(random.below(60, sample)),
                                  .seconds = 0.001 * static_cast<double>(random.below(20, sample + 1))});
      EXPECT_TRUE(train(o, faults, synthetic(o)) == undisturbed) << make_command(o);
    }
  }
}

}  // namespace
}  // namespace tessera
