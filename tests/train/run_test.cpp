// Runs of the library: synchronous ranks, DiLoCo and asynchronous workers are saved, stopped and resumed in the same
// way.
#include "train/run/run.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <filesystem>
#include <iostream>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string>
#include <tuple>
#include <utility>

#include "base/files.h"
#include "base/write_file.h"
#include "train/check.h"
#include "train/config_file.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;

// Requests a stop so that the run ends after `last` steps, and a checkpoint after the first step.
class Wishes final : public RunObserver {
 public:
  explicit Wishes(int64_t last) : last_(last) {}
  bool wants_stop() override { return step_ + 1 >= last_; }  // sent with the next step
  bool wants_save() override { return step_ == 1 && !std::exchange(asked_, true); }
  void step(const StepReport& report, const std::string&) override { step_ = report.step; }
  void saved(int64_t step) override { saved_ = step; }
  int64_t saved_step() const { return saved_; }

 private:
  int64_t last_, step_ = 0, saved_ = 0;
  bool asked_ = false;
};

class RunTest : public testing::Test {
 protected:
  fs::path path(const std::string& name) const { return directory_.path() / name; }

  TrainConfig config(const std::string& name, const Plan& plan) const {
    TrainConfig c{.model = {.layers = 2, .heads = 2, .channels = 16, .context = 8, .vocab = 32, .tied = false},
                  .optim = {.lr = 1e-2, .warmup = 2, .steps = 8, .batch = 8},
                  .plan = plan,
                  .run = {.out = path(name).string(), .resume = fs::exists(path(name)), .save_every = 4, .keep = 9}};
    c.plan.threads_per_rank = 1;
    c.plan.timeout = 60;
    return c;
  }

  RunResult train(const std::string& name, const Plan& plan, int64_t last = 1000) {
    const TrainConfig c = config(name, plan);
    check(c);
    const Sequences sequences = synthetic_sequences(c.model.vocab, c.model.context, c.optim.batch, 1);
    const RunDirectory directory(c.run);
    RunResult result;
    launch(launch_options(c.plan), [&](Communicator& world) {
      Wishes wishes(last);
      tessera::Run run({.config = c, .directory = directory, .sequences = sequences}, world, &wishes);
      const RunResult one = run.train();
      if (world.rank() == 0) result = one, saved_ = wishes.saved_step();
    });
    return result;
  }

  std::string parameters(const std::string& name, int64_t step) const {
    return read_file(path(name) / "checkpoints" / ("step-" + std::to_string(step)) / "model.safetensors");
  }

  // Every step is recorded exactly once.
  void expect_records(const std::string& name) const {
    std::istringstream lines(read_file(path(name) / "metrics.jsonl"));
    int64_t steps = 0;
    for (std::string line; std::getline(lines, line);)
      EXPECT_EQ(nlohmann::json::parse(line).at("step"), ++steps) << line;
    EXPECT_EQ(steps, 8);
  }

  TemporaryDirectory directory_{fs::temp_directory_path() / "tessera-run-"};
  int64_t saved_ = 0;
};

TEST_F(RunTest, ResumesUnderAnotherLayout) {
  EXPECT_EQ(train("whole", {.dp = 2}).steps, 8);
  EXPECT_EQ(saved_, 2);  // requested with the second step
  const RunResult stopped = train("resumed", {.dp = 2, .zero = ZeroStage::two}, 3);
  EXPECT_TRUE(stopped.stopped && !stopped.in_validation);
  EXPECT_EQ(stopped.steps, 3);
  EXPECT_FALSE(train("resumed", {.pp = 2, .microbatches = 2}).stopped);
  EXPECT_TRUE(parameters("resumed", 8) == parameters("whole", 8));
  expect_records("resumed");
}

TEST_F(RunTest, LocalUpdatesAndAsynchronousWorkersHaveTheSameLifeCycle) {
  for (const Plan& plan : {Plan{.dp = 2, .dp_mode = DataMode::diloco, .sync_every = 3},
                           Plan{.dp = 2, .dp_mode = DataMode::ps_async, .servers = 1}}) {
    const std::string name(value_name(plan.dp_mode));
    const RunResult stopped = train(name, plan, 2);
    EXPECT_TRUE(stopped.stopped) << name;
    EXPECT_GE(stopped.steps, 2) << name;
    const RunResult ended = train(name, plan);
    EXPECT_EQ(std::tuple(ended.stopped, ended.steps), std::tuple(false, 8)) << name;
    EXPECT_EQ(ended.note.empty(), plan.dp_mode == DataMode::diloco);
    EXPECT_TRUE(fs::exists(path(name) / "checkpoints/step-8/manifest.json")) << name;
    expect_records(name);
  }
}

TEST_F(RunTest, RejectsFewerStepsThanCompleted) {
  train("run", {});
  TrainConfig shorter = config("run", {});
  shorter.optim.steps = 5;
  const Sequences sequences = synthetic_sequences(32, 8, 8, 1);
  const RunDirectory directory(shorter.run);
  launch(launch_options(shorter.plan), [&](Communicator& world) {
    EXPECT_THROW(tessera::Run({.config = shorter, .directory = directory, .sequences = sequences}, world), FieldError);
  });
}

TEST_F(RunTest, RejectsUnresolvedEpochs) {
  const Sequences sequences = synthetic_sequences(32, 8, 8, 1);
  for (const int64_t field : {0, 1, 2}) {
    TrainConfig c = config("run", {});
    c.run.resume = false;
    if (field == 0) c.run.epochs = 1;
    (field == 1 ? c.run.save_fraction : c.run.eval_fraction) = field == 0 ? 0 : 0.5;
    const RunDirectory directory(c.run);
    launch(launch_options(c.plan), [&](Communicator& world) {
      EXPECT_THROW(tessera::Run({.config = c, .directory = directory, .sequences = sequences}, world), FieldError);
    });
  }
}

TEST_F(RunTest, WritesConfigurationsThatAreComplete) {
  TrainConfig c = config("run", {.dp = 2, .zero = ZeroStage::one});
  c.model.family = Family::llama;
  c.model.experts = {.count = 4};
  TrainConfig back;
  apply_config(back, to_toml(c), "config.toml");
  EXPECT_EQ(back.plan, c.plan);
  EXPECT_EQ(back.optim, c.optim);
  EXPECT_EQ(back.preset, plain_preset(c.model.family));
  EXPECT_EQ(config_values(back), config_values(c));
}

}  // namespace
}  // namespace tessera
