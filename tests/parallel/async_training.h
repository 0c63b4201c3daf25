// A tiny GPT trained by the asynchronous parameter server, for its tests.
#pragma once
#include <gtest/gtest.h>
#include <unistd.h>

#include "parallel/async/server.h"
#include "parallel/comm/launch.h"
#include "tests/parallel/tiny_gpt.h"

namespace tessera::test {

inline constexpr uint64_t kSeed = 5;

struct AsyncPlan {
  int ranks = 3, servers = 1;
  int64_t staleness = 1, steps = 8, sequences = 2;  // `sequences` are in a worker's batch
  OptimizerKind optimizer = OptimizerKind::adamw;
  DType dtype = DType::float32;
  double dropout = 0.1;
  double rate = 0.003;
  std::string record = {}, replay = {};
  std::function<void(int worker, int64_t clock)> before = {};
  std::function<bool(int worker)> wish = {};  // to stop
  std::vector<int64_t> stops = {};            // steps at which it is stopped, to go on at once
};

struct AsyncTraining {
  AsyncSummary summary;
  std::vector<int64_t> stopped;                              // steps done at each stop and at the end, of rank 0
  std::vector<AppliedPush> pushes;                           // as rank 0 heard of them
  std::vector<std::vector<std::byte>> values, state;         // units at the end, and optimizer state
  std::vector<int64_t> pushed, pulled, parameters, moments;  // bytes, by rank
};

inline std::vector<std::byte> parameters_of(Module& model) {
  std::vector<std::byte> out;
  for (const Parameter* p : model.parameters()) {
    const std::vector<std::byte> one = bytes(p->var.value());
    out.insert(out.end(), one.begin(), one.end());
  }
  return out;
}

inline void train_rank(const AsyncPlan& plan, Communicator& world, AsyncTraining& out, std::vector<std::byte>& values) {
  const ArenaPtr arena = make_arena();
  Decoder model(tiny_gpt(plan.dropout));
  AsyncServer server(model, world, arena,
                     {.mode = DataMode::ps_async, .servers = plan.servers, .dtype = plan.dtype, .seed = kSeed},
                     {.steps = plan.steps,
                      .staleness = plan.staleness,
                      .clip = 1,
                      .optimizer = [&](const auto& units) { return make_optimizer(plan.optimizer, units, {}); },
                      .lr = [&](int64_t applied) { return plan.rate / (1 + 0.001 * static_cast<double>(applied)); },
                      .record = plan.record,
                      .replay = plan.replay});
  const auto rank = static_cast<size_t>(world.rank());
  out.parameters[rank] = arena->usage(Category::parameters).live;
  out.moments[rank] = arena->usage(Category::optimizer).live;
  const int64_t tokens = plan.sequences * model.config.context;
  const AsyncServer::Hooks hooks{
      .step =
          [&](int worker, int64_t clock) {
            if (plan.before) plan.before(worker, clock);
            const int64_t first = worker * plan.sequences;
            return learn(model, sequences(model.config, clock, first, plan.sequences, arena),
                         {.seed = kSeed, .step = clock, .first_sequence = first, .training = true}, tokens) /
                   static_cast<double>(tokens);
          },
      .on_push = [&](const AppliedPush& push) { out.pushes.push_back(push); },
      .wish = [&] { return plan.wish && plan.wish(world.rank()); }};
  const auto run = [&](int64_t steps) {
    server.run(steps, hooks);
    if (rank == 0) out.stopped.push_back(server.steps());
  };
  for (const int64_t steps : plan.stops) run(steps);
  run(plan.steps);
  const AsyncSummary summary = server.finish();
  if (rank == 0) out.summary = summary;
  values = parameters_of(model);
  for (size_t i = 0; server.optimizer() && plan.servers == 1 && i < server.optimizer()->state().size(); ++i)
    out.state.push_back(bytes(server.optimizer()->state()[i].tensor));
  out.pushed[rank] = server.pushed_bytes();
  out.pulled[rank] = server.pulled_bytes();
}

inline AsyncTraining train(const AsyncPlan& plan) {
  AsyncTraining out;
  const auto ranks = static_cast<size_t>(plan.ranks);
  out.values.resize(ranks);
  out.pushed = out.pulled = out.parameters = out.moments = std::vector<int64_t>(ranks);
  launch({.ranks = plan.ranks, .threads_per_rank = 1, .timeout_s = 30},
         [&](Communicator& world) { train_rank(plan, world, out, out.values[static_cast<size_t>(world.rank())]); });
  for (const std::vector<std::byte>& values : out.values) EXPECT_TRUE(values == out.values[0]);
  return out;
}

inline void sleep_ms(int64_t ms) { std::this_thread::sleep_for(std::chrono::milliseconds(ms)); }

struct Scratch {
  std::filesystem::path path = std::filesystem::temp_directory_path() / ("tessera_async_" + std::to_string(getpid()));
  Scratch() { std::filesystem::create_directories(path); }
  ~Scratch() { std::filesystem::remove_all(path); }
  std::string file(const std::string& name) const { return (path / name).string(); }
};

}  // namespace tessera::test
