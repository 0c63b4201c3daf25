// Steps of several ranks over NCCL, real or emulated: captured and launched again they leave the bits and the counts of
// those that are queued; they train like one rank; and they end on all ranks when they end on one.
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <functional>
#include <limits>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "app/plan.h"
#include "app/trainer.h"
#include "parallel/comm/launch.h"
#include "tensor/cuda/graph.h"
#include "tests/support/gpus.h"
#include "tests/verify/plans.h"

namespace tessera {
namespace {

using RanksStepGraphGpu = test::OnGpus;
using Bytes = std::vector<std::byte>;

TrainOptions over_nccl(int64_t ranks, const std::function<void(TrainOptions&)>& change) {
  TrainOptions o = test::small_plan();
  o.ranks = ranks;
  o.backend = "nccl";
  o.device = "cuda";
  o.all_reduce = "native";
  o.dropout = 0.2;
  o.channels = 16;
  o.context = 8;
  o.batch = 8;
  o.microbatches = 2;
  o.steps = 8;
  o.warmup = 3;
  o.clip = 0.5;  // clips some of these steps
  o.bucket_mb = 0.002;
  change(o);
  return o;
}

struct Plan {
  std::string name;
  TrainOptions options;
};

std::vector<Plan> plans() {
  const auto with = [](const char* name, int64_t ranks, const std::function<void(TrainOptions&)>& change) {
    return Plan{name, over_nccl(ranks, change)};
  };
  return {with("ddp", 2, [](TrainOptions&) {}),
          with("ddp, bf16", 4,
               [](TrainOptions& o) {
                 o.dtype = o.grad_dtype = "bf16";
                 o.optimizer = "adam";
               }),
          with("zero 1", 2, [](TrainOptions& o) { o.zero = 1; }),
          with("zero 2", 2, [](TrainOptions& o) { o.zero = 2; }),
          with("zero 3", 3,
               [](TrainOptions& o) {
                 o.zero = 3;
                 o.batch = 6;
                 o.optimizer = "sgd";
               }),
          with("zero 3, one micro-batch, blocks again", 2,
               [](TrainOptions& o) {
                 o.zero = 3;
                 o.microbatches = 1;
                 o.recompute = "block";
               }),
          with("tp", 2, [](TrainOptions& o) { o.tp = 2; }),
          with("tp and dp", 4, [](TrainOptions& o) { o.tp = 2; }),
          with("tp and zero 2", 4,
               [](TrainOptions& o) {
                 o.tp = 2;
                 o.zero = 2;
               }),
          with("sp", 2,
               [](TrainOptions& o) {
                 o.tp = 2;
                 o.sp = true;
               }),
          with("ulysses", 2,
               [](TrainOptions& o) {
                 o.cp = 2;
                 o.cp_mode = "ulysses";
               }),
          with("ulysses and zero 3", 4,
               [](TrainOptions& o) {
                 o.cp = 2;
                 o.cp_mode = "ulysses";
                 o.zero = 3;
               }),
          with("two copies of the tied weight", 2, [](TrainOptions& o) { o.schedule = "interleaved"; })};
}

Bytes bytes_of(Trainer& trainer, const std::vector<FlatUnit>& units) {
  Bytes out;
  const auto add = [&](const Tensor& t) {
    const Tensor here = t.on_host();
    out.insert(out.end(), here.raw(), here.raw() + here.nbytes());
  };
  for (const FlatUnit& unit : units) add(unit.values);
  for (const NamedTensor& t : trainer.optimizer().state()) add(t.tensor);
  return out;
}
// What the rank updates; the rest of what it holds it gets from others.
Bytes own_bytes_of(Trainer& trainer) { return bytes_of(trainer, trainer.strategy().shards()); }

void on_ranks(TrainOptions o, bool captured, const std::function<void(Trainer&)>& f) {
  o.cuda_graph = captured ? "on" : "off";
  const Sequences sequences = counted_sequences(*o.vocab, *o.context, o.batch, 1);
  launch(launch_options(o), [&](Communicator& world) {
    Trainer trainer(o, sequences, world);
    f(trainer);
  });
}

struct OneRank {
  std::vector<double> losses, norms;
  Bytes end;
  std::vector<OpCounts> counts;
  bool operator==(const OneRank&) const = default;
};
struct Ran {
  std::vector<OneRank> ranks;
  int64_t replays = 0;
};

Ran run(const TrainOptions& o, bool captured, const std::function<void(Trainer&, int64_t step)>& between = {}) {
  Ran ran;
  ran.ranks.resize(static_cast<size_t>(ranks_of(o)));
  on_ranks(o, captured, [&](Trainer& trainer) {
    OneRank& own = ran.ranks[static_cast<size_t>(trainer.world().rank())];
    for (int64_t step = 0; step < o.steps; ++step) {
      if (between) between(trainer, step);
      const StepReport report = trainer.step();
      own.losses.push_back(report.loss);
      own.norms.push_back(report.grad_norm);
    }
    for (Communicator* c : trainer.communicators()) own.counts.push_back(c->counts());
    own.end = bytes_of(trainer, trainer.strategy().residents());
    if (trainer.world().rank() == 0) ran.replays = trainer.replays();
    EXPECT_EQ(trainer.steps_done(), o.steps);
  });
  return ran;
}

TEST_F(RanksStepGraphGpu, ReplaysHaveTheBitsAndCountsOfQueuedSteps) {
  for (const auto& [name, o] : plans()) {
    if (ranks_of(o) > gpus) continue;
    const Ran captured = run(o, true), queued = run(o, false);
    for (size_t r = 0; r < captured.ranks.size(); ++r) {
      const OneRank &a = captured.ranks[r], &b = queued.ranks[r];
      EXPECT_EQ(a.losses, b.losses) << name << ", rank " << r;
      EXPECT_EQ(a.norms, b.norms) << name << ", rank " << r;
      EXPECT_TRUE(a.end == b.end) << name << ", rank " << r;
      EXPECT_TRUE(a.counts == b.counts) << name << ", rank " << r;
      EXPECT_EQ(a.losses, captured.ranks[0].losses) << name;
      EXPECT_EQ(a.norms, captured.ranks[0].norms) << name;
    }
    EXPECT_GE(captured.replays, o.steps - 3) << name;
    EXPECT_EQ(queued.replays, 0) << name;
    const std::vector<double>& norms = queued.ranks[0].norms;
    EXPECT_TRUE(std::any_of(norms.begin(), norms.end(), [&](double norm) { return norm > o.clip; })) << name;
  }
}

// In float64, where the order of sums shows in the last digits alone.
TEST_F(RanksStepGraphGpu, RanksTrainLikeOne) {
  for (const auto& [name, plan] : plans()) {
    if (ranks_of(plan) > gpus) continue;
    TrainOptions o = plan;
    o.dtype = "fp64";
    o.grad_dtype = "fp32";  // which is not asked of float64
    o.steps = 5;
    TrainOptions one = o;
    one.ranks = 1;
    one.tp = one.cp = std::nullopt;
    one.sp = false;
    one.zero = 0;
    const OneRank many = run(o, true).ranks[0], alone = run(one, true).ranks[0];
    for (size_t step = 0; step < many.losses.size(); ++step) {
      EXPECT_NEAR(many.losses[step], alone.losses[step], 1e-11 * alone.losses[step]) << name;
      EXPECT_NEAR(many.norms[step], alone.norms[step], 1e-9 * alone.norms[step]) << name;
    }
  }
}

// One rank's arena has another layout: all queue that step, and capture and launch again together.
TEST_F(RanksStepGraphGpu, RanksAgreeOnHowTheyMakeAStep) {
  const TrainOptions o = over_nccl(2, [](TrainOptions& p) { p.steps = 14; });
  const Ran usual = run(o, true);
  std::vector<std::vector<Tensor>> kept(2);
  std::vector<int64_t> replays;
  const Ran disturbed = run(o, true, [&](Trainer& trainer, int64_t step) {
    const int rank = trainer.world().rank();
    if (rank == 0) replays.push_back(trainer.replays());
    if (rank == 1 && step == 5)
      kept[1].push_back(Tensor::empty({1000}, DType::float32, trainer.arena()));            // among what the graph uses
    if (rank == 0 && step == 9) Tensor::empty({1 << 20}, DType::float32, trainer.arena());  // the arena grows
    if (step == 13) kept[1].clear();
  });
  for (size_t r = 0; r < 2; ++r) EXPECT_TRUE(disturbed.ranks[r] == usual.ranks[r]);
  EXPECT_LT(disturbed.replays, usual.replays);
  EXPECT_GE(disturbed.replays, 6);
  EXPECT_EQ(replays[6], replays[5]);  // the fifth was queued on rank 0 too
}

TEST_F(RanksStepGraphGpu, AStepWaitsOnce) {
  if constexpr (kWithCuda)
    for (const auto& [name, o] : plans()) {
      if (ranks_of(o) > gpus) continue;
      on_ranks(o, true, [&, &of = name](Trainer& trainer) {
        for (int64_t step = 0; step < 6; ++step) {
          const int64_t before = cuda::synchronizations(*trainer.arena());
          trainer.step();
          const int64_t waits = cuda::synchronizations(*trainer.arena()) - before;
          if (step < 2) continue;
          EXPECT_EQ(waits, 1) << of << " " << step;
        }
      });
    }
}

TEST_F(RanksStepGraphGpu, AWishToStopIsHeardByAll) {
  const TrainOptions o = over_nccl(2, [](TrainOptions&) {});
  on_ranks(o, true, [&](Trainer& trainer) {
    for (int64_t step = 0; step < 6; ++step)
      EXPECT_EQ(trainer.step(step == 5 && trainer.world().rank() == 1).stop, step == 5);
  });
}

// A number on one rank that is none: all leave the step out and end in it, with equal weights.
TEST_F(RanksStepGraphGpu, AStepThatIsNotFiniteOnOneRankUpdatesNothing) {
  for (const auto& [name, o] : plans()) {
    if (ranks_of(o) > gpus) continue;
    for (const int64_t after : {0, 5}) {  // queued, and launched again
      int ended = 0;
      std::mutex counting;
      on_ranks(o, true, [&, &of = name](Trainer& trainer) {
        for (int64_t step = 0; step < after; ++step) trainer.step();
        if (trainer.world().rank() == trainer.world().size() - 1)
          for (const FlatUnit& unit : trainer.strategy().residents())  // of which stage 3 of ZeRO has its part alone
            if (unit.name == "blocks.0") unit.values.narrow(0, 0, 1).fill(std::numeric_limits<double>::quiet_NaN());
        const Bytes before = own_bytes_of(trainer);
        try {
          trainer.step();
          ADD_FAILURE() << "nothing was thrown";
        } catch (const Error& e) {
          EXPECT_EQ(e.status(), Status::not_finite) << e.what();
        }
        EXPECT_TRUE(own_bytes_of(trainer) == before) << of << ", rank " << trainer.world().rank();
        EXPECT_EQ(trainer.steps_done(), after);
        EXPECT_EQ(trainer.replays() > 0, after > 0);
        const std::lock_guard lock(counting);
        ++ended;
      });
      EXPECT_EQ(ended, ranks_of(o)) << name;
    }
  }
}

std::string failure(const TrainOptions& o, const std::function<void(Trainer&)>& f) {
  try {
    on_ranks(o, true, f);
  } catch (const Error& e) {
    EXPECT_EQ(e.status(), Status::communication) << e.what();
    return e.what();
  }
  return "nothing was thrown";
}

// A rank that fails before the meeting, and one that has agreed to a launch and then does not make it.
TEST_F(RanksStepGraphGpu, ARankThatFailsEndsTheOthers) {
  const TrainOptions o = over_nccl(2, [](TrainOptions& p) { p.tp = 2; });
  for (const bool agreed : {false, true}) {
    const std::string what = failure(o, [&](Trainer& trainer) {
      for (int64_t step = 0; step < 5; ++step) trainer.step();
      EXPECT_GT(trainer.replays(), 0);
      if (trainer.world().rank() == 1) {
        if (agreed) StepRanks(trainer.world(), {}).agree(false, true, true);
        throw CommError("the cause");
      }
      trainer.step();
    });
    EXPECT_EQ(what, "[rank 1] the cause");
  }
  TrainOptions hasty = o;
  hasty.timeout = 1;
  const std::string what = failure(hasty, [&](Trainer& trainer) {
    for (int64_t step = 0; step < 5; ++step) trainer.step();
    if (trainer.world().rank() == 0) return void(trainer.step());
    StepRanks(trainer.world(), {}).agree(false, true, true);
    std::this_thread::sleep_for(std::chrono::milliseconds(1300));
  });
  EXPECT_NE(what.find("step: NCCL did not end it within 1 s"), std::string::npos) << what;
}

std::string reason(int64_t ranks, const std::function<void(TrainOptions&)>& change) {
  TrainOptions o = over_nccl(ranks, change);
  o.cuda_graph = "auto";
  std::string why = no_graph_because(o, static_cast<int>(ranks));
  o.cuda_graph = "on";
  if (why.empty())
    EXPECT_EQ(no_graph_because(o, static_cast<int>(ranks)), "");
  else
    EXPECT_THROW(no_graph_because(o, static_cast<int>(ranks)), Error);
  return why;
}

TEST(RanksStepGraph, SaysWhyNot) {
  EXPECT_EQ(reason(2, [](TrainOptions&) {}), "");
  EXPECT_EQ(reason(2, [](TrainOptions& o) { o.backend = "threads"; }), "the 2 ranks meet on the host within a step");
  EXPECT_EQ(reason(2, [](TrainOptions& o) { o.pp = 2; }), "the 2 ranks of --pp send each other messages");
  EXPECT_EQ(reason(2, [](TrainOptions& o) { o.cp = 2; }), "the ranks of --cp-mode ring send each other messages");
  EXPECT_EQ(reason(2, [](TrainOptions& o) { o.trace = true; }), "--trace looks at each pass of a step");
  EXPECT_EQ(reason(2, [](TrainOptions& o) { o.offload = "optimizer"; }),
            "--offload optimizer moves state through the host");
}

}  // namespace
}  // namespace tessera
