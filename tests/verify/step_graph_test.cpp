// Steps that the host only begins and ends: captured and launched again, queued anew, or made by halves with a look at
// the gradients, they leave the same bits; they wait once; and one that is not finite leaves everything as it was.

#include <limits>

#include "tests/support/errors.h"
#include "tests/support/gpu.h"
#include "tests/verify/plans.h"
#include "train/trainer.h"

namespace tessera {
namespace {

using StepGraphGpu = test::OnGpu;
using Bytes = std::vector<std::byte>;
enum class Way { captured, automatic, queued, halves };

Bytes bytes_of(Trainer& trainer) {
  Bytes out;
  const auto add = [&](const Tensor& t) {
    const Tensor here = t.on_host();
    out.insert(out.end(), here.raw(), here.raw() + here.nbytes());
  };
  for (const FlatUnit& unit : trainer.strategy().residents()) add(unit.values);
  for (const NamedTensor& t : trainer.optimizer().state()) add(t.tensor);
  return out;
}

TrainOptions one_rank(std::string_view words) {
  TrainOptions o = test::small_plan();
  say(o, "ranks=1 device=cuda dropout=0.2 channels=16 context=8 batch=6 microbatches=3 steps=8 warmup=3");
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
  try {
    no_graph_because(job_of(o), o.trace);
  } catch (const Error& e) {
    EXPECT_EQ(e.status(), Status::usage);
    o["cuda_graph"] = "auto";
    EXPECT_NE(std::string(e.what()).find(no_graph_because(job_of(o), o.trace)), std::string::npos) << e.what();
    return e.what();
  }
  return "";
}

TEST(StepGraph, SaysWhyNot) {
  EXPECT_EQ(refusal("", 1), "");
  EXPECT_NE(refusal("", 2).find("the 2 ranks meet on the host"), std::string::npos);
  EXPECT_NE(refusal("device=cpu", 1).find("`device` is cpu"), std::string::npos);
  EXPECT_NE(refusal("trace=true", 1).find("`trace`"), std::string::npos);
  EXPECT_NE(refusal("dp_mode=ps-sync", 1).find("ps-sync"), std::string::npos);
  const std::string owners = "backend=nccl all_reduce=native optimizer=muon";
  EXPECT_EQ(refusal(owners, 2), "");
  EXPECT_NE(refusal(owners + " zero=2", 2).find("2 owners of matrices of muon get parts"), std::string::npos);
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

}  // namespace
}  // namespace tessera
