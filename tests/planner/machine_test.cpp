// Measurement of a machine: fitted constants, the measurement file, and ranks that share CPU cores.
#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/files.h"
#include "bench/calibrate.h"
#include "planner/measured.h"
#include "planner/memory.h"
#include "planner/prices.h"
#include "tests/support/errors.h"
#include "tests/support/planted_machine.h"

namespace tessera::planner {
namespace {

TEST(Fit, RecoversNonNegativeConstants) {
  const Cost exact = {2e-6, 4e-12, 0, 1.5e-10, 3e-10};
  std::vector<Timed> timed;
  for (const Sizes& sizes : {matmul_sizes(64, 64, 64), matmul_sizes(768, 384, 128), matmul_sizes(768, 128, 512),
                             matmul_sizes(48, 1024, 64), matmul_sizes(2048, 65, 256), matmul_sizes(256, 2048, 512)})
    timed.push_back({sizes, seconds(exact, sizes)});
  const Cost found = fit(timed);
  for (size_t i = 0; i < kSizes; ++i) EXPECT_NEAR(found[i], exact[i], 1e-3 * exact[i] + 1e-15) << i;
  // Times that decrease with the number of rows would require a negative constant.
  const Cost falling = fit({{row_sizes(1, 100), 2e-6}, {row_sizes(2, 100), 1.9e-6}, {row_sizes(4, 100), 1.8e-6}});
  for (const double c : falling) EXPECT_GE(c, 0);
  EXPECT_THROW(fit({}), Error);
  EXPECT_THROW(fit({{row_sizes(1, 1), 0}}), Error);
}

TEST(Fit, RecoversLatencyAndBandwidth) {
  std::vector<Timed> timed;
  for (const double bytes : {256.0, 8192.0, 65536.0, 4194304.0}) timed.push_back({{1, bytes}, 5e-6 + bytes * 2e-11});
  const Cost found = fit(timed);
  EXPECT_NEAR(found[0], 5e-6, 1e-9);
  EXPECT_NEAR(found[1], 2e-11, 1e-14);
}

class MachineFile : public testing::Test {
 protected:
  MachineFile() { ::setenv("TESSERA_CACHE", directory_.path().c_str(), 1); }
  ~MachineFile() override { ::unsetenv("TESSERA_CACHE"); }
  void write(const std::string& text) const { std::ofstream(machine_file(machine_.identity)) << text; }

  const TemporaryDirectory directory_{temporary_directory() / "tessera-machine"};
  Machine machine_ = test::synthetic_machine(2);
};

TEST_F(MachineFile, RoundTrips) {
  EXPECT_FALSE(load_machine(machine_.identity));
  machine_.costs[1][0][3] = {1.25e-6, 3e-10, 4.5e-12, 1e-9};
  machine_.links[4][2] = {7e-6, 2.5e-10};
  save_machine(machine_);
  const std::optional<Machine> loaded = load_machine(machine_.identity);
  ASSERT_TRUE(loaded);
  EXPECT_EQ(*loaded, machine_);
  Identity newer = machine_.identity;
  newer.version = "next";
  EXPECT_FALSE(load_machine(newer)) << "each version has its own file";
}

TEST_F(MachineFile, RejectsDamagedFilesWithOneLineError) {
  const std::string good = to_text(machine_);
  const auto with = [&](const std::string& from, const std::string& to) {
    std::string text = good;
    return text.replace(text.find(from), from.size(), to);
  };
  const std::vector<std::pair<std::string, std::string>> table = {
      {"", "missing line; expected format = VALUE"},
      {good.substr(0, good.size() / 2), "expected"},
      {good + "more = 1\n", "unknown key more"},
      {with("format = 1", "format = 2"), "format: expected 1, got 2"},
      {with("alone_fp32_update_call = 0.001", "alone_fp32_update_call = -1"),
       "alone_fp32_update_call: expected a number"},
      {with("alone_fp32_update_call = 0.001", "alone_fp32_update_call = true"),
       "expected a number of at least 0, got true"},
      {with("processors = 2", "processors = 0"), "processors: expected a number of at least 1"},
      {with("ranks = \"2 4\"", "ranks = \"2 x\""), "ranks: expected integers"},
      {with("processors = 2", "processors = 3"), "3 cores"},
      {with("version = \"test\"", "version = \"other\""), "version other"}};
  for (const auto& [text, message] : table) {
    write(text);
    expect_error(Status::input, {message, machine_file(machine_.identity).string()},
                 [&] { load_machine(machine_.identity); });
  }
}

TEST(SharedCores, RanksOnOneCoreShareItsTime) {
  const Machine one = test::synthetic_machine(1), two = test::synthetic_machine(2);
  const Sizes call = row_sizes(1, 1);
  for (const double busy : {1.0, 2.0, 3.0}) {
    EXPECT_DOUBLE_EQ(one.seconds(Kernel::add, call, DType::float32, 1, busy), busy * 1e-3);
    EXPECT_DOUBLE_EQ(two.seconds(Kernel::add, call, DType::float32, 1, busy), std::max(1.0, busy / 2) * 1e-3);
  }
  // Two ranks with two threads each on two cores.
  EXPECT_DOUBLE_EQ(two.seconds(Kernel::add, call, DType::float32, 2, 2), 2e-3);
}

TEST(SharedCores, InterpolatesMeasuredSlowdown) {
  Machine m = test::synthetic_machine(4);
  m.costs[static_cast<size_t>(MachineLoad::together)][0][static_cast<size_t>(Kernel::add)] = {1.6e-3};
  const auto at = [&](double busy) { return m.seconds(Kernel::add, row_sizes(1, 1), DType::float32, 1, busy); };
  EXPECT_NEAR(at(1), 1.0e-3, 1e-12);
  EXPECT_NEAR(at(2), 1.2e-3, 1e-12);
  EXPECT_NEAR(at(4), 1.6e-3, 1e-12);
  EXPECT_NEAR(at(8), 3.2e-3, 1e-12);
}

TEST(SharedCores, OneCorePerRankMatchesSimulator) {
  const Times times{.stages = {{.forward = 1, .backward = 2.5, .input = 1.5, .weight = 1}}};
  for (const Schedule& s : {one_f_one_b(3, 5), gpipe(2, 3), zb_h1(3, 4), zb_v(2, 4), interleaved(2, 4, 2)}) {
    const Simulation alone = simulate(s, times),
                     shared = simulate_shared(s, [](const Action&a, int) {
                       return a.what == PassKind::F ? 1 : a.what == PassKind::B ? 2.5 : a.what == PassKind::I ? 1.5 : 1;
                     });
    EXPECT_NEAR(shared.makespan, alone.makespan, 1e-6) << s.name;
    EXPECT_NEAR(shared.bubble_fraction(), alone.bubble_fraction(), 1e-6) << s.name;
  }
}

TEST(SharedCores, OneCoreHasNoIdleTime) {
  for (const Schedule& s : {one_f_one_b(3, 5), gpipe(4, 4), zb_h2(3, 5)}) {
    double work = 0;
    for (const auto& list : s.actions)
      for (const Action& a : list) work += a.what == PassKind::B ? 2 : 1;
    const Simulation sim =
        simulate_shared(s, [](const Action& a, int working) { return (a.what == PassKind::B ? 2.0 : 1.0) * working; });
    EXPECT_NEAR(sim.makespan, work, 1e-6) << s.name;
  }
}

Prediction on(const std::shared_ptr<const Machine>& machine, const Plan& plan) {
  Case c{.model = ModelShape(*preset("gpt-nano")),
         .layout = {.plan = plan, .sequences = 8 / (plan.dp * plan.microbatches)},
         .hardware = find_hardware(machine, DType::float32),
         .software = own_software(DType::float32, DType::float32)};
  c.model.vocab = 65;
  return predict(c);
}

TEST(MeasuredStep, TwoRanksOnOneCoreTakeTwiceTheTime) {
  Machine m = test::synthetic_machine(1);
  for (auto& links : m.links) links = {{2, {}}, {4, {}}};
  const auto one = std::make_shared<const Machine>(m);
  m.identity.cores = 2;
  const auto two = std::make_shared<const Machine>(m);
  EXPECT_NEAR(on(one, {.dp = 2}).step_s, 2 * on(two, {.dp = 2}).step_s, 1e-9);
  EXPECT_NEAR(on(two, {.dp = 4}).step_s, 2 * on(two, {.dp = 2}).step_s, 1e-9);
  // A pipeline on one core has no bubble: its time is that of its passes.
  const Prediction pipe = on(one, {.pp = 2, .microbatches = 4}), pipe_of_two = on(two, {.pp = 2, .microbatches = 4});
  EXPECT_GT(pipe_of_two.bubble, 0.1);
  EXPECT_LT(pipe_of_two.step_s, pipe.step_s);
  EXPECT_GT(pipe_of_two.step_s, pipe.step_s / 2);
}

TEST(MeasuredStep, PartsSumToStepTime) {
  const auto machine = std::make_shared<const Machine>(test::synthetic_machine(2));
  for (const Plan& plan : {Plan{}, Plan{.dp = 2, .zero = ZeroStage::three}, Plan{.tp = 2, .sp = true}, Plan{.cp = 2},
                           Plan{.pp = 2, .schedule = ScheduleKind::zb_h1, .microbatches = 4},
                           Plan{.dp = 2, .tp = 2, .recompute = Recompute::block}}) {
    const Prediction p = on(machine, plan);
    EXPECT_NEAR(p.parts.sum(), p.step_s, 0.02 * p.step_s) << to_text(plan);
    EXPECT_EQ(p.parts.tp > 0, plan.tp > 1) << to_text(plan);
    EXPECT_EQ(p.parts.cp > 0, plan.cp > 1) << to_text(plan);
    EXPECT_EQ(p.parts.recompute > 0, plan.recompute != Recompute::none) << to_text(plan);
    EXPECT_EQ(p.fastest_s, p.slowest_s);
    EXPECT_GT(p.memory[p.peak_rank].peak(), 0);
  }
}

// A part is inaccurate if it differs by more than 15% and by more than 1% of the step (here 100 s).
TEST(MeasuredStep, MarksInaccurateParts) {
  Prediction p{.memory = {{}}};
  Measured m{.step_s = 100, .memory = {.parameters = 100}};
  const auto off = [&](const std::string& part) {
    const std::vector<Compared> all = compare(p, m);
    return std::ranges::find(all, part, &Compared::part)->off;
  };
  for (const double seconds : {84.9, 85.0, 115.0, 115.1}) {
    p.step_s = seconds, p.memory[0].parameters = seconds;
    EXPECT_EQ(off("step"), seconds < 85 || seconds > 115) << seconds;
    EXPECT_EQ(off("memory, parameters"), seconds < 85 || seconds > 115) << seconds;
  }
  for (const auto& [predicted, measured] : {std::pair{2, 1}, {3, 1}, {0, 1}, {0, 2}, {1, 0}, {2, 0}}) {
    p.parts.tp = predicted, m.parts.tp = measured;
    EXPECT_EQ(off("tp exposed"), std::abs(predicted - measured) == 2) << predicted << " " << measured;
  }
}

TEST(Calibrate, MeasuresKernelsAndExchanges) {
  launch({.ranks = 2, .threads_per_rank = 1}, [](Communicator& world) {
    const bench::Calibration quick{.seconds_of_case = 0, .rounds = 3, .bytes = 1 << 16};
    const LinkCost link = bench::measure_exchange(Exchange::all_reduce, quick, world);
    EXPECT_GT(link.s_per_byte, 0);
    EXPECT_LT(link.latency_s, 1);
    const Machine::Costs costs = bench::measure_kernels(DType::float32, quick, world);
    for (size_t k = 0; k < kKernels; ++k) {
      const auto kernel = static_cast<Kernel>(k);
      const bool product = kernel <= Kernel::matmul_weight, attends = !product && kernel <= Kernel::attention_backward;
      const double small = seconds(costs[k], product   ? matmul_sizes(64, 64, 64)
                                             : attends ? attention_sizes(4, 64, 32, 32)
                                                       : row_sizes(4, 256)),
                   large = seconds(costs[k], product   ? matmul_sizes(1024, 512, 512)
                                             : attends ? attention_sizes(8, 512, 256, 64)
                                                       : row_sizes(4096, 1024));
      EXPECT_GT(small, 0) << kKernelNames[k];
      EXPECT_GT(large, 3 * small) << kKernelNames[k];
    }
  });
}

}  // namespace
}  // namespace tessera::planner
