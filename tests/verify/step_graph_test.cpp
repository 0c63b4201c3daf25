// Steps that the host only launches and awaits, on one rank and on several over NCCL, real or emulated. Captured and
// replayed, queued, or split into halves with access to gradients, they are bitwise identical; they synchronize once;
// non-finite results change nothing; and failures end the run on all ranks.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <initializer_list>
#include <limits>
#include <map>
#include <string>
#include <string_view>
#include <thread>
#include <tuple>
#include <vector>

#include "tests/support/draw.h"
#include "tests/support/errors.h"
#include "tests/support/gpus.h"
#include "tests/verify/plans.h"

namespace tessera {
namespace {

using Bytes = std::vector<std::byte>;
using test::make_command;
using StepGraphGpu = test::OnGpu;
using RanksStepGraphGpu = test::OnGpus;

enum class Mode { captured, automatic, queued, halves };

// Some steps are clipped.
TypedOptions one_rank(std::string_view options) {
  TypedOptions o = test::small_plan(
      "ranks=1 device=cuda dropout=0.2 channels=16 context=8 batch=6 microbatches=3 steps=8 warmup=3 clip=0.5");
  say(o, options);
  return o;
}
TypedOptions over_nccl(int64_t ranks, std::string_view options) {
  TypedOptions o = one_rank("backend=nccl all_reduce=native batch=8 microbatches=2 bucket_mb=0.002");
  o.ranks = ranks;
  say(o, options);
  return o;
}

std::vector<TypedOptions> plans() {
  const std::string widest = test::no_float64().empty() ? "dtype=fp64" : "dtype=fp32";
  return {one_rank(""), one_rank("dtype=bf16 zero=2"), one_rank("optimizer=sgd zero=3 microbatches=1"),
          one_rank("optimizer=adam recompute=block grad_dtype=bf16"), one_rank("optimizer=muon dtype=bf16"),
          // This rank has two stages and two copies of the tied weight.
          one_rank("schedule=interleaved " + widest),
          // Document boundaries differ in every step.
          one_rank("family=llama document_mask=true vocab=12 recompute=attention")};
}

// Plans with at most `max_ranks` ranks; with TESSERA_DRAW=n, every third.
std::vector<TypedOptions> nccl_plans(int64_t max_ranks) {
  const std::pair<int64_t, const char*> all[] = {{2, ""},
                                                 {4, "dtype=bf16 grad_dtype=bf16 optimizer=adam"},
                                                 {2, "zero=1"},
                                                 {2, "zero=2"},
                                                 {3, "zero=3 batch=6 optimizer=sgd"},
                                                 {2, "zero=3 microbatches=1 recompute=block"},
                                                 {2, "tp=2"},
                                                 {4, "tp=2"},
                                                 {4, "tp=2 zero=2"},
                                                 {2, "tp=2 sp=true"},
                                                 {2, "cp=2 cp_mode=ulysses"},
                                                 {4, "cp=2 cp_mode=ulysses zero=3"},
                                                 {3, "optimizer=muon batch=6 dtype=bf16"},
                                                 {4, "optimizer=muon tp=2"},
                                                 {2, "schedule=interleaved"}};  // two copies of the tied weight
  std::vector<TypedOptions> out;
  uint64_t number = 0;
  for (const auto& [ranks, options] : all)
    if (test::is_selected(number++, 3) && ranks <= max_ranks) out.push_back(over_nccl(ranks, options));
  return out;
}

Bytes as_bytes(Trainer& trainer, const std::vector<FlatUnit>& units) {
  Bytes out;
  const auto add = [&](const Tensor& t) {
    const Tensor here = t.on_host();
    out.insert(out.end(), here.raw(), here.raw() + here.nbytes());
  };
  for (const FlatUnit& unit : units) add(unit.values);
  for (const NamedTensor& t : trainer.state().optimizer().state()) add(t.tensor);
  return out;
}
Bytes as_bytes(Trainer& trainer) { return as_bytes(trainer, trainer.state().strategy().resident_units()); }
// The parameters that this rank updates; it receives the others from their owners.
Bytes own_bytes(Trainer& trainer) { return as_bytes(trainer, trainer.state().strategy().shards()); }

void on_ranks(TypedOptions o, Mode mode, const Sequences& sequences, const std::function<void(Trainer&)>& f) {
  o["cuda_graph"] = mode == Mode::captured ? "on" : mode == Mode::automatic ? "auto" : "off";
  test::on_ranks(resolve(o), sequences, f);
}
void on_ranks(const TypedOptions& o, Mode mode, const std::function<void(Trainer&)>& f) {
  on_ranks(o, mode, test::synthetic(resolve(o)), f);
}

StepReport run_step(Trainer& trainer, Mode mode) {
  if (mode != Mode::halves) return trainer.step();
  const StepReport report = trainer.compute_gradients();
  trainer.update(report);
  return report;
}

struct OneRank {
  std::vector<double> losses, norms, rates;
  Bytes end;
  std::vector<OpCounts> counts;
  bool operator==(const OneRank&) const = default;
};
struct Ran {
  std::vector<OneRank> ranks;
  int64_t replays = 0;
};

Ran run(const TypedOptions& o, Mode mode, const std::function<void(Trainer&, int64_t step)>& between = {}) {
  Ran ran;
  ran.ranks.resize(static_cast<size_t>(resolve(o).plan.ranks()));
  on_ranks(o, mode, [&](Trainer& trainer) {
    OneRank& own = ran.ranks[static_cast<size_t>(trainer.state().groups.world.rank())];
    for (int64_t step = 0; step < o.optim.steps; ++step) {
      if (between) between(trainer, step);
      const StepReport report = run_step(trainer, mode);
      own.losses.push_back(report.loss);
      own.norms.push_back(report.grad_norm);
      own.rates.push_back(report.lr);
    }
    for (Communicator* c : trainer.state().communicators()) own.counts.push_back(c->counts());
    own.end = as_bytes(trainer);
    if (trainer.state().groups.world.rank() == 0) ran.replays = trainer.step_record().replays;
    EXPECT_EQ(trainer.state().steps_done(), o.optim.steps);
  });
  return ran;
}

// Replays match eager steps in bits and counts.
void expect_same_steps(const TypedOptions& o, std::initializer_list<Mode> eager, int64_t max_queued) {
  SCOPED_TRACE(make_command(o));
  const Ran captured = run(o, Mode::captured);
  const OneRank& first = captured.ranks[0];
  for (const Mode mode : eager) {
    const Ran other = run(o, mode);
    for (size_t r = 0; r < captured.ranks.size(); ++r) {
      SCOPED_TRACE(fmt::format("rank {}, {}", r, mode == Mode::halves ? "by halves" : "queued"));
      EXPECT_EQ(captured.ranks[r].losses, other.ranks[r].losses);
      EXPECT_EQ(captured.ranks[r].norms, other.ranks[r].norms);
      EXPECT_TRUE(captured.ranks[r].counts == other.ranks[r].counts);
      EXPECT_TRUE(captured.ranks[r] == other.ranks[r]);
      EXPECT_EQ(captured.ranks[r].losses, first.losses);
      EXPECT_EQ(captured.ranks[r].norms, first.norms);
    }
    EXPECT_EQ(other.replays, 0);
  }
  EXPECT_GE(captured.replays, o.optim.steps - max_queued);
  EXPECT_GT(*std::ranges::max_element(first.norms), o.optim.clip);  // some steps are clipped
  EXPECT_NE(first.losses.front(), first.losses.back());
}

TEST_F(StepGraphGpu, ReplaysMatchEagerStepsBitwise) {
  for (const TypedOptions& o : plans()) expect_same_steps(o, {Mode::queued, Mode::halves}, 3);
}
TEST_F(RanksStepGraphGpu, ReplaysAndCountsMatchQueuedStepsBitwise) {
  // At most four steps are queued: three in which the arena may grow, and the captured one.
  for (const TypedOptions& o : nccl_plans(gpus)) expect_same_steps(o, {Mode::queued}, 4);
}

// When one parameter's gradient is complete, in the middle of the backward pass, the test copies it to the host, which
// is illegal during a capture. The run continues as if it had been queued from the beginning.
TEST_F(StepGraphGpu, FailedCaptureFallsBackToQueuedSteps) {
  for (const TypedOptions& o : {plans()[0], plans()[5]}) {
    const auto look = [](Trainer& trainer, size_t which) {
      const auto parameters = trainer.state().model().parameters();
      Parameter* const seen = parameters[which % parameters.size()];
      seen->var.on_grad([seen] { seen->var.grad().on_host(); });
    };
    const Ran queued = run(o, Mode::queued);
    for (const size_t which : {0, 7, 11}) {
      const Ran looked = run(o, Mode::automatic, [&](Trainer& trainer, int64_t step) {
        const bool early = step < 2, late = step + 1 == o.optim.steps;  // the capture happens in between
        EXPECT_TRUE(trainer.step_record().given_up.empty() ? !late : !early) << "step " << step;
        if (step == 0) look(trainer, which);
      });
      EXPECT_TRUE(looked.ranks == queued.ranks) << make_command(o);
      EXPECT_EQ(looked.replays, 0);
    }
    EXPECT_THROW(run(o, Mode::captured, [&](Trainer& trainer, int64_t) { look(trainer, 0); }), Error)
        << "--cuda-graph on insists";
  }
}

// Replays read the step's scalars from memory, and results depend on them.
TEST_F(StepGraphGpu, ReplaysReadScalarsOfCurrentStep) {
  const Ran undisturbed = run(one_rank(""), Mode::captured);
  for (const char* options : {"seed=5", "warmup=6", "clip=0.3", "dropout=0"})
    EXPECT_FALSE(run(one_rank(options), Mode::captured).ranks[0].end == undisturbed.ranks[0].end) << options;
}

// Memory that other code allocates between steps is not overwritten: the step is captured again.
TEST_F(StepGraphGpu, AllocationBetweenStepsTriggersRecapture) {
  const TypedOptions o = one_rank("steps=12");
  const Ran undisturbed = run(o, Mode::captured);
  std::vector<Tensor> retained;
  const Ran disturbed = run(o, Mode::captured, [&](Trainer& trainer, int64_t step) {
    if (step == 4) Tensor::empty({1 << 20}, DType::float32, trainer.state().arena);  // the arena grows
    if (step == 7) {
      retained.push_back(Tensor::empty({1000}, DType::float32, trainer.state().arena));  // within the graph's memory
      retained.back().fill(3);
    }
    if (step == 11) {
      EXPECT_EQ(retained.back().to_vector<float>(), std::vector<float>(1000, 3.0f));
      retained.clear();
    }
  });
  EXPECT_TRUE(disturbed.ranks == undisturbed.ranks);
  EXPECT_LT(disturbed.replays, undisturbed.replays);
  EXPECT_GE(disturbed.replays, 5);
}

void expect_one_synchronization(const TypedOptions& o, Mode mode) {
  if constexpr (kWithCuda)
    on_ranks(o, mode, [&](Trainer& trainer) {
      for (int64_t step = 0; step < 6; ++step) {
        const int64_t before = cuda::synchronizations(*trainer.state().arena);
        trainer.step();
        const int64_t waits = cuda::synchronizations(*trainer.state().arena) - before;
        if (step < 2)
          EXPECT_GE(waits, 1);  // more while algorithms are timed
        else
          EXPECT_EQ(waits, 1) << make_command(o) << " " << step;
      }
    });
}

TEST_F(StepGraphGpu, StepSynchronizesWithHostOnce) {
  for (const Mode mode : {Mode::captured, Mode::queued})
    for (const TypedOptions& o : plans()) expect_one_synchronization(o, mode);
}
TEST_F(RanksStepGraphGpu, StepSynchronizesWithHostOnce) {
  for (const TypedOptions& o : nccl_plans(gpus)) expect_one_synchronization(o, Mode::captured);
}

// A weight of the first norm, which every token passes, becomes non-finite on the last rank: all ranks skip the update
// and end in that step, with equal weights.
void expect_nothing_updated(const TypedOptions& o) {
  for (const int64_t after : {0, 5}) {  // queued, and replayed
    std::atomic<int> ended = 0;
    on_ranks(o, Mode::captured, [&](Trainer& trainer) {
      SCOPED_TRACE(make_command(o));
      for (int64_t step = 0; step < after; ++step) trainer.step();
      const bool last = trainer.state().groups.world.rank() == trainer.state().groups.world.size() - 1;
      for (const FlatUnit& unit : trainer.state().strategy().resident_units())  // ZeRO-3 has only its shard
        if (last && unit.name == "blocks.0") unit.values.narrow(0, 0, 1).fill(std::numeric_limits<double>::quiet_NaN());
      const Bytes before = own_bytes(trainer);
      expect_error(Status::not_finite, {"step " + std::to_string(after + 1) + ": the loss is nan"},
                   [&] { trainer.step(); });
      EXPECT_TRUE(own_bytes(trainer) == before) << "rank " << trainer.state().groups.world.rank();
      EXPECT_EQ(trainer.state().steps_done(), after);
      EXPECT_EQ(trainer.step_record().replays > 0, after > 0);
      ++ended;
    });
    EXPECT_EQ(ended, resolve(o).plan.ranks()) << make_command(o);
  }
}

TEST_F(StepGraphGpu, NonFiniteStepUpdatesNothing) {
  for (const TypedOptions& o : plans()) expect_nothing_updated(o);
}
TEST_F(RanksStepGraphGpu, NonFiniteStepOnOneRankUpdatesNothing) {
  for (const TypedOptions& o : nccl_plans(gpus)) expect_nothing_updated(o);
}

TEST(StepGraph, ReportsReasonForMissingGraph) {
  const std::string owners = "backend=nccl all_reduce=native optimizer=muon";
  const std::pair<TypedOptions, std::string> cases[] = {
      {one_rank(""), ""},
      {one_rank("ranks=2"), "the 2 ranks synchronize on the host within a step"},
      {one_rank("device=cpu"), "`device` is cpu"},
      {one_rank("trace=true"), "`trace` records each pass of a step"},
      {one_rank("dp_mode=ps-sync"), "`dp_mode` ps-sync reduces on the host"},
      {one_rank(owners + " ranks=2"), ""},
      {one_rank(owners + " ranks=2 zero=2"),
       "the 2 owners of muon's matrices receive shards in point-to-point messages"},
      {over_nccl(2, ""), ""},
      {over_nccl(2, "backend=threads"), "the 2 ranks synchronize on the host within a step"},
      {over_nccl(2, "pp=2"), "the 2 ranks of `pp` exchange point-to-point messages"},
      {over_nccl(2, "cp=2"), "the ranks of `cp_mode` ring exchange point-to-point messages"},
      {over_nccl(2, "trace=true"), "`trace` records each pass of a step"},
      {over_nccl(2, "offload=optimizer"), "`offload` optimizer moves state through the host"}};
  for (auto [o, why] : cases) {
    SCOPED_TRACE(make_command(o));
    o["cuda_graph"] = "auto";
    EXPECT_EQ(no_graph_because(resolve(o), o.own.trace), why);
    o["cuda_graph"] = "on";
    const std::string refused = error_message([&o = o] { EXPECT_EQ(no_graph_because(resolve(o), o.own.trace), ""); });
    EXPECT_TRUE(has(refused, why.empty() ? "nothing was thrown" : why));
  }
  EXPECT_THROW(checked(one_rank("device=cpu cuda_graph=on")), Error);
  EXPECT_NO_THROW(checked(one_rank("device=cpu cuda_graph=auto")));
  EXPECT_EQ(no_graph_because(resolve(one_rank("cuda_graph=off")), false), "`cuda_graph` off");
}

// Tokens of the next step are read during the current one; read errors end the step that needs them.
TEST_F(StepGraphGpu, PrefetchesTokensOfNextStep) {
  const TypedOptions o = one_rank("");
  int64_t last = -1, missing = 1000;
  Sequences sequences = test::synthetic(resolve(o));
  sequences.load = [&, load = sequences.load](int64_t step, int64_t first, int64_t count, int32_t* in, int32_t* out) {
    if (step >= missing) throw InputError("the file is gone");
    last = step;
    load(step, first, count, in, out);
  };
  on_ranks(o, Mode::captured, sequences, [&](Trainer& trainer) {
    for (int64_t step = 0; step < 6; ++step) {
      trainer.step();
      EXPECT_EQ(last, step + 1);
    }
    EXPECT_GT(trainer.step_record().replays, 0);
    missing = 7;
    trainer.step();
    EXPECT_EQ(trainer.state().steps_done(), 7);
    EXPECT_THROW(trainer.step(), InputError);
    EXPECT_EQ(trainer.state().steps_done(), 7);
  });
}

// Float64, where summation order affects only the last digits.
void expect_like_one_rank(TypedOptions o, Mode mode) {
  if (!test::has_kernels(DType::float64, Device::cuda)) return;
  say(o, "dtype=fp64 grad_dtype=fp32 steps=5");  // bf16 is not supported with float64
  TypedOptions one = o;
  one.ranks = 1;
  forget(one, {"tp", "cp", "pp"});
  say(one, "sp=false zero=0");
  const OneRank many = run(o, mode).ranks[0], alone = run(one, Mode::captured).ranks[0];
  for (size_t step = 0; step < many.losses.size(); ++step) {
    EXPECT_NEAR(many.losses[step], alone.losses[step], 1e-11 * alone.losses[step]) << make_command(o);
    EXPECT_NEAR(many.norms[step], alone.norms[step], 1e-9 * alone.norms[step]) << make_command(o);
  }
}

TEST_F(RanksStepGraphGpu, RanksTrainLikeOneRank) {
  for (const TypedOptions& o : nccl_plans(gpus)) expect_like_one_rank(o, Mode::captured);
}

// Owners of matrices receive shards, and pipeline ranks activations, in messages: steps are not captured.
TEST_F(RanksStepGraphGpu, RanksWithMessagesTrainLikeOneRank) {
  for (const auto& [ranks, options] :
       {std::pair{2, "zero=1"}, {3, "zero=2 batch=6"}, {4, "zero=3 tp=2"}, {4, "zero=1 pp=2"}})
    if (ranks <= gpus) expect_like_one_rank(over_nccl(ranks, std::string("optimizer=muon ") + options), Mode::queued);
}

// One rank's arena has another layout: all ranks queue that step, then capture and replay together again.
TEST_F(RanksStepGraphGpu, RanksAgreeOnStepMode) {
  const TypedOptions o = over_nccl(2, "steps=14");
  const Ran undisturbed = run(o, Mode::captured);
  std::vector<Tensor> retained;
  std::vector<int64_t> replays;
  const Ran disturbed = run(o, Mode::captured, [&](Trainer& trainer, int64_t step) {
    const int rank = trainer.state().groups.world.rank();
    if (rank == 0) replays.push_back(trainer.step_record().replays);
    if (rank == 1 && step == 5)
      retained.push_back(Tensor::empty({1000}, DType::float32, trainer.state().arena));  // within the graph's memory
    if (rank == 0 && step == 9) Tensor::empty({1 << 20}, DType::float32, trainer.state().arena);  // the arena grows
    if (rank == 1 && step == 13) retained.clear();
  });
  EXPECT_TRUE(disturbed.ranks == undisturbed.ranks);
  EXPECT_LT(disturbed.replays, undisturbed.replays);
  EXPECT_GE(disturbed.replays, 6);
  EXPECT_EQ(replays[6], replays[5]);  // the fifth was queued on rank 0 too
}

TEST_F(RanksStepGraphGpu, StepRequestReachesAllRanks) {
  const TypedOptions o = over_nccl(2, "");
  for (const StepRequest r : {StepRequest::save, StepRequest::stop})
    on_ranks(o, Mode::captured, [&](Trainer& trainer) {
      for (int64_t step = 0; step < 6; ++step)
        EXPECT_EQ(
            trainer.step(step == 4 || (step == 5 && trainer.state().groups.world.rank() == 1) ? r : StepRequest::none)
                .request,
            step >= 4 ? r : StepRequest::none);
    });
}

// An invalid token in the last sequence of a step: no rank updates, and all end in that step, with the cause on the
// ranks that had the token.
TEST_F(RanksStepGraphGpu, TokenOutOfBoundsOnOneRankUpdatesNothing) {
  for (const TypedOptions& o : nccl_plans(gpus)) {
    SCOPED_TRACE(make_command(o));
    constexpr int64_t kAfter = 5;  // replayed
    Sequences sequences = test::synthetic(resolve(o));
    sequences.load = [&o, good = sequences.load](int64_t step, int64_t first, int64_t count, int32_t* inputs,
                                                 int32_t* targets) {
      const int64_t last = o.optim.batch - 1;
      good(step, first, count, inputs, targets);
      if (step == kAfter && first <= last && last < first + count)
        inputs[(last - first) * o.model.context] = static_cast<int32_t>(o.model.vocab + 3);
    };
    std::atomic<int> ended = 0;
    const std::string cause = error_message([&] {
      on_ranks(o, Mode::captured, sequences, [&](Trainer& trainer) {
        SCOPED_TRACE(fmt::format("{}, rank {}", make_command(o), trainer.state().groups.world.rank()));
        for (int64_t step = 0; step < kAfter; ++step) trainer.step();
        EXPECT_GT(trainer.step_record().replays, 0);
        const Bytes before = own_bytes(trainer);
        try {
          trainer.step();
        } catch (const Error&) {
          EXPECT_TRUE(own_bytes(trainer) == before);
          EXPECT_EQ(trainer.state().steps_done(), kAfter);
          ++ended;
          throw;
        }
      });
    });
    EXPECT_EQ(ended, resolve(o).plan.ranks());
    EXPECT_TRUE(has(cause, std::to_string(o.model.vocab + 3) + " "));
    EXPECT_TRUE(has(cause, "is outside [0, "));
  }
}

// Runs five steps on two ranks; returns the cause of the end.
std::string failure(std::string_view options, const std::function<void(Trainer&)>& f) {
  const auto after_five = [&](Trainer& trainer) {
    for (int64_t step = 0; step < 5; ++step) trainer.step();
    EXPECT_GT(trainer.step_record().replays, 0);
    f(trainer);
  };
  return error_message([&] { on_ranks(over_nccl(2, options), Mode::captured, after_five); }, Status::communication);
}

// A rank fails before the ranks agree on a step, or after that without launching it.
TEST_F(RanksStepGraphGpu, FailingRankStopsOtherRanks) {
  for (const bool agreed : {false, true}) {
    const std::string what = failure("tp=2", [&](Trainer& trainer) {
      if (trainer.state().groups.world.rank() == 1) {
        if (agreed) StepConsensus(trainer.state().groups.world, {}).agree(StepRequest::none, true, true);
        throw CommError("the cause");
      }
      trainer.step();
    });
    EXPECT_EQ(what, "[rank 1] the cause");
  }
  const std::string what = failure("tp=2 timeout=1", [&](Trainer& trainer) {
    if (trainer.state().groups.world.rank() == 0) return void(trainer.step());
    StepConsensus(trainer.state().groups.world, {}).agree(StepRequest::none, true, true);
    std::this_thread::sleep_for(std::chrono::milliseconds(1300));
  });
  EXPECT_TRUE(has(what, "step: NCCL did not complete it within 1 s"));
}

}  // namespace
}  // namespace tessera
