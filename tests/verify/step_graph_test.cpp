// Steps that the host only begins and ends, of one rank and of several over NCCL, real or emulated: captured and
// launched again, queued anew, or made by halves with a look at the gradients, they leave the same bits; they wait
// once; what is not finite leaves everything as it was; they end on all ranks when they end on one.
#include <limits>
#include <tuple>

#include "tests/support/draw.h"
#include "tests/support/errors.h"
#include "tests/support/gpus.h"
#include "tests/verify/plans.h"
#include "train/trainer.h"

namespace tessera {
namespace {

using Bytes = std::vector<std::byte>;

TrainOptions over_nccl(int64_t ranks, std::string_view words) {
  TrainOptions o = test::small_plan();
  o.ranks = ranks;
  // Some of these steps are clipped.
  say(o,
      "backend=nccl device=cuda all_reduce=native dropout=0.2 channels=16 context=8 batch=8 microbatches=2 steps=8 "
      "warmup=3 clip=0.5 bucket_mb=0.002");
  say(o, words);
  return o;
}

struct NcclPlan {
  std::string name;
  TrainOptions options;
};

std::vector<NcclPlan> all_nccl_plans() {
  const auto with = [](const char* name, int64_t ranks, std::string_view words) {
    return NcclPlan{name, over_nccl(ranks, words)};
  };
  return {with("ddp", 2, ""),
          with("ddp, bf16", 4, "dtype=bf16 grad_dtype=bf16 optimizer=adam"),
          with("zero 1", 2, "zero=1"),
          with("zero 2", 2, "zero=2"),
          with("zero 3", 3, "zero=3 batch=6 optimizer=sgd"),
          with("zero 3, one micro-batch, blocks again", 2, "zero=3 microbatches=1 recompute=block"),
          with("tp", 2, "tp=2"),
          with("tp and dp", 4, "tp=2"),
          with("tp and zero 2", 4, "tp=2 zero=2"),
          with("sp", 2, "tp=2 sp=true"),
          with("ulysses", 2, "cp=2 cp_mode=ulysses"),
          with("ulysses and zero 3", 4, "cp=2 cp_mode=ulysses zero=3"),
          with("muon", 3, "optimizer=muon batch=6 dtype=bf16"),
          with("muon and tp", 4, "optimizer=muon tp=2"),
          with("two copies of the tied weight", 2, "schedule=interleaved")};
}

// Those of as many ranks at most; with TESSERA_DRAW, a number, every third of all.
std::vector<NcclPlan> nccl_plans(int64_t ranks) {
  std::vector<NcclPlan> out;
  uint64_t number = 0;
  for (NcclPlan& plan : all_nccl_plans())
    if (test::is_drawn(number++, 3) && job_of(plan.options).plan.ranks() <= ranks) out.push_back(std::move(plan));
  return out;
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
// Parameters that the rank updates; it gets the rest of those that it holds from others.
Bytes own_bytes_of(Trainer& trainer) { return bytes_of(trainer, trainer.strategy().shards()); }

Sequences sequences_for(const TrainOptions& o) {
  return counted_sequences(o.sizes.vocab, o.sizes.context, o.optim.batch, 1);
}

void on_ranks(TrainOptions o, bool captured, const Sequences& sequences, const std::function<void(Trainer&)>& f) {
  o["cuda_graph"] = captured ? "on" : "off";
  launch(launch_options(job_of(o).plan), [&](Communicator& world) {
    Trainer trainer(job_of(o), sequences, world);
    f(trainer);
  });
}

void on_ranks(const TrainOptions& o, bool captured, const std::function<void(Trainer&)>& f) {
  on_ranks(o, captured, sequences_for(o), f);
}

// Steps that the host only begins and ends: captured and launched again, queued anew, or made by halves with a look at
// the gradients, they leave the same bits; they wait once; and one that is not finite leaves everything as it was.

using StepGraphGpu = test::OnGpu;
enum class Way { captured, automatic, queued, halves };

Bytes bytes_of(Trainer& trainer) { return bytes_of(trainer, trainer.strategy().residents()); }

TrainOptions one_rank(std::string_view words) {
  TrainOptions o =
      test::small_plan("ranks=1 device=cuda dropout=0.2 channels=16 context=8 batch=6 microbatches=3 steps=8 warmup=3");
  o["clip"] = 0.5;  // clips some of these steps
  say(o, words);
  return o;
}

std::vector<TrainOptions> plans() {
  const std::string widest = test::no_float64().empty() ? "dtype=fp64" : "dtype=fp32";
  return {one_rank(""), one_rank("dtype=bf16 zero=2"), one_rank("optimizer=sgd zero=3 microbatches=1"),
          one_rank("optimizer=adam recompute=block grad_dtype=bf16"), one_rank("optimizer=muon dtype=bf16"),
          // Two stages, both here, and two copies of the tied weight.
          one_rank("schedule=interleaved " + widest),
          // Documents begin elsewhere in every step.
          one_rank("family=llama document_mask=true vocab=12 recompute=attention")};
}

void on_one_rank(TrainOptions o, Way way, const std::function<void(Trainer&)>& f) {
  o["cuda_graph"] = way == Way::captured ? "on" : way == Way::automatic ? "auto" : "off";
  const Sequences sequences = counted_sequences(o.sizes.vocab, o.sizes.context, o.optim.batch, 1);
  launch(launch_options(job_of(o).plan), [&](Communicator& world) {
    Trainer trainer(job_of(o), sequences, world);
    f(trainer);
  });
}

StepReport step_of(Trainer& trainer, Way way) {
  if (way != Way::halves) return trainer.step();
  const StepReport report = trainer.compute_gradients();
  trainer.update(report);
  return report;
}

struct Ran {
  std::vector<double> losses, norms, rates;
  Bytes end;
  int64_t replays = 0, clipped = 0;
  bool operator==(const Ran& r) const {
    return losses == r.losses && norms == r.norms && rates == r.rates && end == r.end;
  }
};

Ran run(const TrainOptions& o, Way way, const std::function<void(Trainer&, int64_t step)>& between = {}) {
  Ran ran;
  on_one_rank(o, way, [&](Trainer& trainer) {
    for (int64_t step = 0; step < o.optim.steps; ++step) {
      if (between) between(trainer, step);
      const StepReport report = step_of(trainer, way);
      ran.losses.push_back(report.loss);
      ran.norms.push_back(report.grad_norm);
      ran.rates.push_back(report.lr);
      ran.clipped += report.grad_norm > o.optim.clip;
    }
    ran.end = bytes_of(trainer);
    ran.replays = trainer.step_record().replays;
    EXPECT_EQ(trainer.steps_done(), o.optim.steps);
  });
  return ran;
}

TEST_F(StepGraphGpu, ReplaysHaveTheBitsOfEagerSteps) {
  for (const TrainOptions& o : plans()) {
    const Ran captured = run(o, Way::captured), queued = run(o, Way::queued), halves = run(o, Way::halves);
    EXPECT_TRUE(captured == queued) << test::command_of(o);
    EXPECT_TRUE(queued == halves) << test::command_of(o);
    EXPECT_GE(captured.replays, o.optim.steps - 3) << test::command_of(o);
    EXPECT_EQ(queued.replays, 0);
    EXPECT_GT(captured.clipped, 0) << test::command_of(o);
    EXPECT_NE(captured.losses.front(), captured.losses.back());
  }
}

// The bits depend on what a replay must take from memory: with other numbers of the step they are others.
// Somebody looks at a gradient in the middle of a step, which no capture allows: in the backward pass of one parameter
// or another, with half of the step's state made. The run goes on as if it had been queued from the beginning.
TEST_F(StepGraphGpu, ACaptureThatFailsIsGivenUp) {
  for (const TrainOptions& o : {plans()[0], plans()[5]}) {
    const Ran queued = run(o, Way::queued);
    for (const size_t which : {0, 7, 11}) {
      const auto looks = [&](Trainer& trainer, int64_t step) {
        const bool early = step < 2, late = step + 1 == o.optim.steps;  // between them is the capture
        EXPECT_TRUE(trainer.step_record().given_up.empty() ? !late : !early) << "step " << step;
        if (step > 0) return;
        const auto parameters = trainer.model().parameters();
        Parameter* const seen = parameters[which % parameters.size()];
        seen->var.on_grad([seen] { seen->var.grad().on_host(); });
      };
      const Ran looked = run(o, Way::automatic, looks);
      EXPECT_TRUE(looked == queued) << test::command_of(o);
      EXPECT_EQ(looked.replays, 0);
    }
    const auto looks = [&](Trainer& trainer, int64_t) {
      Parameter* const seen = trainer.model().parameters()[0];
      seen->var.on_grad([seen] { seen->var.grad().on_host(); });
    };
    EXPECT_THROW(run(o, Way::captured, looks), Error) << "--cuda-graph on insists";
  }
}

TEST_F(StepGraphGpu, ReplaysTakeTheirNumbersFromTheStep) {
  const TrainOptions o = one_rank("");
  const Ran usual = run(o, Way::captured);
  for (const std::string_view words : std::vector<std::string_view>{"seed=5", "warmup=6", "clip=0.3", "dropout=0"}) {
    TrainOptions other = o;
    say(other, words);
    EXPECT_FALSE(run(other, Way::captured).end == usual.end) << test::command_of(other);
  }
}

// Memory that others ask for between the steps, and keep, is not written to: the step is captured anew.
TEST_F(StepGraphGpu, OthersMayUseTheArenaBetweenSteps) {
  const TrainOptions o = one_rank("steps=12");
  const Ran usual = run(o, Way::captured);
  std::vector<Tensor> kept;
  const Ran disturbed = run(o, Way::captured, [&](Trainer& trainer, int64_t step) {
    if (step == 4) Tensor::empty({1 << 20}, DType::float32, trainer.arena());  // the arena grows
    if (step == 7) {
      kept.push_back(Tensor::empty({1000}, DType::float32, trainer.arena()));  // among what the graph uses
      kept.back().fill(3);
    }
    if (step == 11) {
      EXPECT_EQ(kept.back().to_vector<float>(), std::vector<float>(1000, 3.0f));
      kept.clear();
    }
  });
  EXPECT_TRUE(disturbed == usual);
  EXPECT_LT(disturbed.replays, usual.replays);
  EXPECT_GE(disturbed.replays, 5);
}

TEST_F(StepGraphGpu, AStepWaitsOnce) {
  if constexpr (kWithCuda)
    for (const Way way : {Way::captured, Way::queued})
      for (const TrainOptions& o : plans())
        on_one_rank(o, way, [&](Trainer& trainer) {
          for (int64_t step = 0; step < 6; ++step) {
            const int64_t before = cuda::synchronizations(*trainer.arena());
            trainer.step();
            const int64_t waits = cuda::synchronizations(*trainer.arena()) - before;
            if (step < 2)
              EXPECT_GE(waits, 1);  // and as often as algorithms are timed
            else
              EXPECT_EQ(waits, 1) << test::command_of(o) << " " << step;
          }
        });
}

TEST_F(StepGraphGpu, AStepThatIsNotFiniteUpdatesNothing) {
  for (const TrainOptions& o : plans())
    for (const int64_t after : {0, 5})  // queued, and launched again
      on_one_rank(o, Way::captured, [&](Trainer& trainer) {
        for (int64_t step = 0; step < after; ++step) trainer.step();
        // A weight of the first norm, which every token passes.
        const std::vector<FlatUnit> units = trainer.strategy().residents();
        const auto block =
            std::find_if(units.begin(), units.end(), [](const FlatUnit& u) { return u.name == "blocks.0"; });
        ASSERT_TRUE(block != units.end());
        block->values.narrow(0, 3, 1).fill(std::numeric_limits<double>::quiet_NaN());
        const Bytes before = bytes_of(trainer);
        expect_error(Status::not_finite, {"step " + std::to_string(after + 1) + ": the loss is nan"},
                     [&] { trainer.step(); });
        EXPECT_TRUE(bytes_of(trainer) == before) << test::command_of(o);
        EXPECT_EQ(trainer.steps_done(), after);
        EXPECT_EQ(trainer.step_record().replays > 0, after > 0);
      });
}

std::string refusal(std::string_view words, int ranks) {
  TrainOptions o = one_rank(words);
  o.ranks = ranks;
  o["cuda_graph"] = "on";
  const std::string refused = error_of([&] { no_graph_because(job_of(o), o.trace); });
  o["cuda_graph"] = "auto";
  EXPECT_TRUE(refused == "nothing was thrown" || has(refused, no_graph_because(job_of(o), o.trace)));
  return refused;
}

TEST(StepGraph, SaysWhyNot) {
  EXPECT_EQ(refusal("", 1), "nothing was thrown");
  EXPECT_TRUE(has(refusal("", 2), "the 2 ranks meet on the host"));
  EXPECT_TRUE(has(refusal("device=cpu", 1), "`device` is cpu"));
  EXPECT_TRUE(has(refusal("trace=true", 1), "`trace`"));
  EXPECT_TRUE(has(refusal("dp_mode=ps-sync", 1), "ps-sync"));
  const std::string owners = "backend=nccl all_reduce=native optimizer=muon";
  EXPECT_EQ(refusal(owners, 2), "nothing was thrown");
  EXPECT_TRUE(has(refusal(owners + " zero=2", 2), "2 owners of matrices of muon get parts"));
  TrainOptions on_cpu = one_rank("device=cpu cuda_graph=on");
  EXPECT_THROW(check_plan(on_cpu), Error);
  on_cpu["cuda_graph"] = "auto";
  EXPECT_NO_THROW(check_plan(on_cpu));
  TrainOptions o = one_rank("cuda_graph=off");
  EXPECT_EQ(no_graph_because(job_of(o), false), "`cuda_graph` off");
}

// The tokens of the next step are read while the GPU is at this one; what cannot be read ends the step that needs it.
TEST_F(StepGraphGpu, TokensAreReadAStepAhead) {
  TrainOptions o = one_rank("cuda_graph=on");
  int64_t last = -1, missing = 1000;
  Sequences sequences = counted_sequences(o.sizes.vocab, o.sizes.context, o.optim.batch, 1);
  sequences.load = [&, load = sequences.load](int64_t step, int64_t first, int64_t count, int32_t* in, int32_t* out) {
    if (step >= missing) throw InputError("the file is gone");
    last = step;
    load(step, first, count, in, out);
  };
  launch(launch_options(job_of(o).plan), [&](Communicator& world) {
    Trainer trainer(job_of(o), sequences, world);
    for (int64_t step = 0; step < 6; ++step) {
      trainer.step();
      EXPECT_EQ(last, step + 1);
    }
    EXPECT_GT(trainer.step_record().replays, 0);
    missing = 7;
    trainer.step();
    EXPECT_EQ(trainer.steps_done(), 7);
    EXPECT_THROW(trainer.step(), InputError);
    EXPECT_EQ(trainer.steps_done(), 7);
  });
}

// Steps of several ranks over NCCL, real or emulated: captured and launched again they leave the bits and the counts of
// those that are queued, and they train like one rank.

using RanksStepGraphGpu = test::OnGpus;

struct OneRank {
  std::vector<double> losses, norms;
  Bytes end;
  std::vector<OpCounts> counts;
  bool operator==(const OneRank&) const = default;
};
struct RanksRan {
  std::vector<OneRank> ranks;
  int64_t replays = 0;
};

RanksRan run(const TrainOptions& o, bool captured, const std::function<void(Trainer&, int64_t step)>& between = {}) {
  RanksRan ran;
  ran.ranks.resize(static_cast<size_t>(job_of(o).plan.ranks()));
  on_ranks(o, captured, [&](Trainer& trainer) {
    OneRank& own = ran.ranks[static_cast<size_t>(trainer.world().rank())];
    for (int64_t step = 0; step < o.optim.steps; ++step) {
      if (between) between(trainer, step);
      const StepReport report = trainer.step();
      own.losses.push_back(report.loss);
      own.norms.push_back(report.grad_norm);
    }
    for (Communicator* c : trainer.communicators()) own.counts.push_back(c->counts());
    own.end = bytes_of(trainer, trainer.strategy().residents());
    if (trainer.world().rank() == 0) ran.replays = trainer.step_record().replays;
    EXPECT_EQ(trainer.steps_done(), o.optim.steps);
  });
  return ran;
}

TEST_F(RanksStepGraphGpu, ReplaysHaveTheBitsAndCountsOfQueuedSteps) {
  for (const auto& [name, o] : nccl_plans(gpus)) {
    const RanksRan captured = run(o, true), queued = run(o, false);
    for (size_t r = 0; r < captured.ranks.size(); ++r) {
      const OneRank &a = captured.ranks[r], &b = queued.ranks[r];
      EXPECT_EQ(a.losses, b.losses) << name << ", rank " << r;
      EXPECT_EQ(a.norms, b.norms) << name << ", rank " << r;
      EXPECT_TRUE(a.end == b.end) << name << ", rank " << r;
      EXPECT_TRUE(a.counts == b.counts) << name << ", rank " << r;
      EXPECT_EQ(a.losses, captured.ranks[0].losses) << name;
      EXPECT_EQ(a.norms, captured.ranks[0].norms) << name;
    }
    EXPECT_GE(captured.replays, o.optim.steps - 4) << name;  // the arena may grow in three steps, and one is captured
    EXPECT_EQ(queued.replays, 0) << name;
    const std::vector<double>& norms = queued.ranks[0].norms;
    EXPECT_GT(*std::max_element(norms.begin(), norms.end()), o.optim.clip) << name;  // some steps are clipped
  }
}

// In float64, where the order of sums shows in the last digits alone.
void expect_like_one(const std::string& name, TrainOptions o, bool captured) {
  if (!test::has_kernels(DType::float64, Device::cuda)) return;
  o["dtype"] = "fp64";
  o["grad_dtype"] = "fp32";  // which is not asked of float64
  o["steps"] = 5;
  TrainOptions one = o;
  one.ranks = 1;
  forget(one, {"tp", "cp", "pp"});
  say(one, "sp=false zero=0");
  const OneRank many = run(o, captured).ranks[0], alone = run(one, true).ranks[0];
  for (size_t step = 0; step < many.losses.size(); ++step) {
    EXPECT_NEAR(many.losses[step], alone.losses[step], 1e-11 * alone.losses[step]) << name;
    EXPECT_NEAR(many.norms[step], alone.norms[step], 1e-9 * alone.norms[step]) << name;
  }
}

TEST_F(RanksStepGraphGpu, RanksTrainLikeOne) {
  for (const auto& [name, plan] : nccl_plans(gpus)) expect_like_one(name, plan, true);
}

// Owners of matrices get what shards have of them, and those of a pipeline its activations: no step is captured.
TEST_F(RanksStepGraphGpu, RanksThatSendMessagesTrainLikeOne) {
  for (const auto& [ranks, zero, tp, pp] : {std::tuple{2, 1, 1, 1}, {3, 2, 1, 1}, {4, 3, 2, 1}, {4, 1, 1, 2}}) {
    if (ranks > gpus) continue;
    TrainOptions o = over_nccl(ranks, "optimizer=muon");
    o["zero"] = zero, o["tp"] = tp, o["pp"] = pp;
    if (ranks == 3) o["batch"] = 6;
    expect_like_one("muon, zero " + std::to_string(zero), o, false);
  }
}

// One rank's arena has another layout: all queue that step, and capture and launch again together.
TEST_F(RanksStepGraphGpu, RanksAgreeOnHowTheyMakeAStep) {
  const TrainOptions o = over_nccl(2, "steps=14");
  const RanksRan usual = run(o, true);
  std::vector<std::vector<Tensor>> kept(2);
  std::vector<int64_t> replays;
  const RanksRan disturbed = run(o, true, [&](Trainer& trainer, int64_t step) {
    const int rank = trainer.world().rank();
    if (rank == 0) replays.push_back(trainer.step_record().replays);
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
    for (const auto& [name, o] : nccl_plans(gpus)) {
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

TEST_F(RanksStepGraphGpu, AWishIsHeardByAll) {
  const TrainOptions o = over_nccl(2, "");
  for (const Wish wish : {Wish::save, Wish::stop})
    on_ranks(o, true, [&](Trainer& trainer) {
      for (int64_t step = 0; step < 6; ++step)
        EXPECT_EQ(trainer.step(step == 4 || (step == 5 && trainer.world().rank() == 1) ? wish : Wish::none).wish,
                  step >= 4 ? wish : Wish::none);
    });
}

// Steps of several ranks over NCCL, real or emulated, that cannot end well: they end on all ranks when they end on one.

// A number on one rank that is none: all leave the step out and end in it, with equal weights.
TEST_F(RanksStepGraphGpu, AStepThatIsNotFiniteOnOneRankUpdatesNothing) {
  for (const auto& [name, o] : nccl_plans(gpus)) {
    for (const int64_t after : {0, 5}) {  // queued, and launched again
      int ended = 0;
      std::mutex counting;
      on_ranks(o, true, [&, &of = name](Trainer& trainer) {
        for (int64_t step = 0; step < after; ++step) trainer.step();
        if (trainer.world().rank() == trainer.world().size() - 1)
          for (const FlatUnit& unit : trainer.strategy().residents())  // stage 3 of ZeRO has its part alone
            if (unit.name == "blocks.0") unit.values.narrow(0, 0, 1).fill(std::numeric_limits<double>::quiet_NaN());
        const Bytes before = own_bytes_of(trainer);
        expect_error(Status::not_finite, {}, [&] { trainer.step(); });
        EXPECT_TRUE(own_bytes_of(trainer) == before) << of << ", rank " << trainer.world().rank();
        EXPECT_EQ(trainer.steps_done(), after);
        EXPECT_EQ(trainer.step_record().replays > 0, after > 0);
        const std::lock_guard lock(counting);
        ++ended;
      });
      EXPECT_EQ(ended, job_of(o).plan.ranks()) << name;
    }
  }
}

// A token that is none, in the last sequence of a step: nobody updates anything, and all end in that step, with the
// cause that those have who were given it.
TEST_F(RanksStepGraphGpu, ATokenOutsideOnOneRankUpdatesNothing) {
  for (const auto& [name, o] : nccl_plans(gpus)) {
    constexpr int64_t kAfter = 5;  // launched again
    Sequences sequences = sequences_for(o);
    sequences.load = [good = sequences.load, context = o.sizes.context, last = o.optim.batch - 1,
                      vocab = o.sizes.vocab](int64_t step, int64_t first, int64_t count, int32_t* inputs,
                                             int32_t* targets) {
      good(step, first, count, inputs, targets);
      if (step == kAfter && first <= last && last < first + count)
        inputs[(last - first) * context] = static_cast<int32_t>(vocab + 3);
    };
    std::atomic<int> ended = 0;
    const std::string cause = error_of([&, &plan = o, &of = name] {
      on_ranks(plan, true, sequences, [&](Trainer& trainer) {
        for (int64_t step = 0; step < kAfter; ++step) trainer.step();
        EXPECT_GT(trainer.step_record().replays, 0) << of;
        const Bytes before = own_bytes_of(trainer);
        try {
          trainer.step();
        } catch (const Error&) {
          EXPECT_TRUE(own_bytes_of(trainer) == before) << of << ", rank " << trainer.world().rank();
          EXPECT_EQ(trainer.steps_done(), kAfter) << of << ", rank " << trainer.world().rank();
          ++ended;
          throw;
        }
      });
    });
    EXPECT_EQ(ended, job_of(o).plan.ranks()) << name;
    EXPECT_TRUE(has(cause, std::to_string(o.sizes.vocab + 3) + " ")) << name;
    EXPECT_TRUE(has(cause, "is outside [0, ")) << name;
  }
}

std::string failure(const TrainOptions& o, const std::function<void(Trainer&)>& f) {
  return error_of([&] { on_ranks(o, true, f); }, Status::communication);
}

// A rank that fails before the meeting, and one that has agreed to a launch and then does not make it.
TEST_F(RanksStepGraphGpu, ARankThatFailsEndsTheOthers) {
  const TrainOptions o = over_nccl(2, "tp=2");
  for (const bool agreed : {false, true}) {
    const std::string what = failure(o, [&](Trainer& trainer) {
      for (int64_t step = 0; step < 5; ++step) trainer.step();
      EXPECT_GT(trainer.step_record().replays, 0);
      if (trainer.world().rank() == 1) {
        if (agreed) StepRanks(trainer.world(), {}).agree(Wish::none, true, true);
        throw CommError("the cause");
      }
      trainer.step();
    });
    EXPECT_EQ(what, "[rank 1] the cause");
  }
  TrainOptions hasty = o;
  hasty["timeout"] = 1;
  const std::string what = failure(hasty, [&](Trainer& trainer) {
    for (int64_t step = 0; step < 5; ++step) trainer.step();
    if (trainer.world().rank() == 0) return void(trainer.step());
    StepRanks(trainer.world(), {}).agree(Wish::none, true, true);
    std::this_thread::sleep_for(std::chrono::milliseconds(1300));
  });
  EXPECT_TRUE(has(what, "step: NCCL did not end it within 1 s"));
}

std::string reason(int64_t ranks, std::string_view words) {
  TrainOptions o = over_nccl(ranks, words);
  o["cuda_graph"] = "auto";
  std::string why = no_graph_because(job_of(o), o.trace);
  o["cuda_graph"] = "on";
  if (why.empty())
    EXPECT_EQ(no_graph_because(job_of(o), o.trace), "");
  else
    EXPECT_THROW(no_graph_because(job_of(o), o.trace), Error);
  return why;
}

TEST(RanksStepGraph, SaysWhyNot) {
  EXPECT_EQ(reason(2, ""), "");
  EXPECT_EQ(reason(2, "backend=threads"), "the 2 ranks meet on the host within a step");
  EXPECT_EQ(reason(2, "pp=2"), "the 2 ranks of `pp` send each other messages");
  EXPECT_EQ(reason(2, "cp=2"), "the ranks of `cp_mode` ring send each other messages");
  EXPECT_EQ(reason(2, "trace=true"), "`trace` looks at each pass of a step");
  EXPECT_EQ(reason(2, "offload=optimizer"), "`offload` optimizer moves state through the host");
}

}  // namespace
}  // namespace tessera
