// The asynchronous parameter server: staleness bound and traffic, bitwise identical replays, and no deadlocks after
// failures or stops.
#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <numeric>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/files.h"
#include "base/write_file.h"
#include "optim/grad_norm.h"
#include "parallel/async/server.h"
#include "parallel/comm/launch.h"
#include "tests/parallel/tiny_gpt.h"
#include "tests/support/errors.h"

namespace tessera {
namespace {

using namespace test;

constexpr uint64_t kSeed = 5;

struct AsyncPlan {
  int ranks = 3, servers = 1;
  int64_t staleness = 1, steps = 8, sequences = 2;  // `sequences` per worker batch
  OptimizerKind optimizer = OptimizerKind::adamw;
  DType dtype = DType::float32;
  double dropout = 0.1;
  double rate = 0.003, timeout = 30;
  std::string record = {}, replay = {};
  std::function<void(int worker, int64_t clock)> before = {};
  std::function<bool(int worker)> wish = {};       // stop request
  std::vector<int64_t> stops = {};                 // steps at which to stop and continue immediately
  std::function<double(int64_t applied)> lr = {};  // overrides `rate`
};

struct AsyncTraining {
  AsyncSummary summary;
  std::vector<int64_t> stopped;                              // steps completed at each stop and at the end, on rank 0
  std::vector<AppliedPush> pushes;                           // as reported to rank 0
  std::vector<Bytes> values;                                 // final parameters, by rank
  Bytes state;                                               // of the optimizer
  std::vector<int64_t> pushed, pulled, parameters, moments;  // bytes, by rank
};

void train_rank(const AsyncPlan& plan, Communicator& world, AsyncTraining& out, Bytes& values) {
  const ArenaPtr arena = make_arena();
  Decoder model(tiny_gpt(plan.dropout));
  AsyncServer server(
      model, world, arena, {.strategy = AsyncServerOptions{plan.servers}, .dtype = plan.dtype, .seed = kSeed},
      {.steps = plan.steps,
       .staleness = plan.staleness,
       .clip = 1,
       .optimizer = [&](const auto& units) { return make_optimizer(plan.optimizer, units, {}); },
       .lr =
           plan.lr ? plan.lr : [&](int64_t applied) { return plan.rate / (1 + 0.001 * static_cast<double>(applied)); },
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
      .wants_stop = [&] { return plan.wish && plan.wish(world.rank()); }};
  const auto run = [&](int64_t steps) {
    server.run(steps, hooks);
    if (rank == 0) out.stopped.push_back(server.steps());
  };
  for (const int64_t steps : plan.stops) run(steps);
  run(plan.steps);
  const AsyncSummary summary = server.finish();
  if (rank == 0) out.summary = summary;
  values = copy_values(model);
  for (size_t i = 0; server.optimizer() && plan.servers == 1 && i < server.optimizer()->state().size(); ++i)
    out.state.push_back(bytes(server.optimizer()->state()[i].tensor));
  out.pushed[rank] = server.pushed_bytes();
  out.pulled[rank] = server.pulled_bytes();
}

AsyncTraining train(const AsyncPlan& plan) {
  AsyncTraining out;
  const auto ranks = static_cast<size_t>(plan.ranks);
  out.values.resize(ranks);
  out.pushed = out.pulled = out.parameters = out.moments = std::vector<int64_t>(ranks);
  launch({.ranks = plan.ranks, .threads_per_rank = 1, .timeout_s = plan.timeout},
         [&](Communicator& world) { train_rank(plan, world, out, out.values[static_cast<size_t>(world.rank())]); });
  for (const Bytes& values : out.values) EXPECT_TRUE(values == out.values[0]);
  return out;
}

void sleep_ms(int64_t ms) { std::this_thread::sleep_for(std::chrono::milliseconds(ms)); }

// Varies the speed of workers.
void uneven(int worker, int64_t clock) { sleep_ms((worker * 7 + clock * 5) % 6); }

TemporaryDirectory scratch_directory() { return TemporaryDirectory(temporary_directory() / "tessera-async"); }

void expect_bitwise_equal(const AsyncTraining& a, const AsyncTraining& b) {
  ASSERT_EQ(a.pushes.size(), b.pushes.size());
  for (size_t i = 0; i < a.pushes.size(); ++i) {
    const AppliedPush &x = a.pushes[i], &y = b.pushes[i];
    EXPECT_EQ(x.push, y.push) << i;
    EXPECT_EQ(x.loss, y.loss) << i;
    EXPECT_EQ(x.grad_norm, y.grad_norm) << i;
    EXPECT_EQ(x.lr, y.lr) << i;
  }
  EXPECT_TRUE(a.values == b.values);
  EXPECT_TRUE(a.state == b.state);
}

// The slow worker prolongs its clock 4 until the others have begun the last clock that the bound permits, and slightly
// longer.
TEST(AsyncServer, StalenessStaysWithinBoundForAnySlowWorker) {
  for (const int64_t staleness : {0, 1, 3})
    for (const int slow : {0, 2}) {
      std::array<std::atomic<int64_t>, 3> begun{};
      const auto before = [&](int worker, int64_t clock) {
        begun[static_cast<size_t>(worker)] = clock;
        if (worker != slow || clock != 4) return;
        for (const std::atomic<int64_t>& other : begun)
          for (int ms = 0; other < 4 + staleness && &other != &begun[static_cast<size_t>(slow)] && ms < 5000; ++ms)
            sleep_ms(1);
        sleep_ms(20);
        for (const std::atomic<int64_t>& other : begun) EXPECT_LE(other, 4 + staleness);
      };
      const AsyncTraining run =
          train({.servers = slow == 0 ? 1 : 2, .staleness = staleness, .steps = 10, .before = before});
      EXPECT_EQ(run.summary.applied, 30);
      EXPECT_EQ(run.summary.max_ahead, staleness);
      EXPECT_LE(run.summary.max_behind, 2 * (2 * staleness + 1));
      std::vector<int64_t> done(3);
      for (const AppliedPush& p : run.pushes) {
        EXPECT_LE(p.push.clock, *std::min_element(done.begin(), done.end()) + staleness);
        EXPECT_EQ(p.push.clock, done[static_cast<size_t>(p.push.worker)]++);
        EXPECT_LE(p.applied - p.push.version, run.summary.max_behind);
      }
    }
}

TEST(AsyncServer, ZeroStalenessProceedsInRounds) {
  const AsyncTraining run = train({.ranks = 3, .servers = 2, .staleness = 0, .steps = 10});
  ASSERT_EQ(run.pushes.size(), 30U);
  for (size_t i = 0; i < 30; ++i) {
    EXPECT_EQ(run.pushes[i].push.clock, static_cast<int64_t>(i / 3));
    EXPECT_GE(run.pushes[i].push.version, static_cast<int64_t>(i / 3 * 3));
    EXPECT_EQ(run.pushes[i].applied, static_cast<int64_t>(i));
  }
}

// With a single worker, training is synchronous: bitwise identical to the plain loop.
TEST(AsyncServer, OneWorkerMatchesSerialTraining) {
  for (const DType dtype : {DType::float32, DType::bfloat16}) {
    const AsyncPlan plan{.ranks = 1, .staleness = 0, .steps = 12, .dtype = dtype};
    const AsyncTraining run = train(plan);
    launch({.ranks = 1, .threads_per_rank = 1}, [&](Communicator&) {
      const ArenaPtr arena = make_arena();
      Decoder model(tiny_gpt(plan.dropout));
      model.materialize(kSeed, arena, dtype, DType::float32);
      const auto optimizer = make_optimizer(plan.optimizer, model.units(), {});
      const int64_t tokens = plan.sequences * model.config.context;
      for (int64_t step = 0; step < plan.steps; ++step) {
        model.clear_gradients();
        learn(model, sequences(model.config, step, 0, plan.sequences, arena),
              {.seed = kSeed, .step = step, .first_sequence = 0, .training = true}, tokens);
        model.zero_missing_gradients();
        optimizer->step(plan.rate / (1 + 0.001 * static_cast<double>(step)), clip_factor(grad_norm(model.units()), 1));
      }
      EXPECT_TRUE(copy_values(model) == run.values[0]);
    });
  }
}

TEST(AsyncServer, ReplayOfRecordedOrderMatchesRunBitwise) {
  const TemporaryDirectory scratch = scratch_directory();
  const std::string record = scratch.path() / "record", again = scratch.path() / "again";
  for (const int servers : {1, 2, 3})
    for (const DType dtype : {DType::float32, DType::bfloat16}) {
      AsyncPlan plan{.servers = servers,
                     .staleness = 2,
                     .optimizer = servers == 1 ? OptimizerKind::sgd : OptimizerKind::adamw,
                     .dtype = dtype};
      plan.record = record;
      plan.before = uneven;
      const AsyncTraining first = train(plan);
      plan.record = again;
      plan.replay = record;
      plan.before = [](int worker, int64_t clock) {
        sleep_ms((worker * 4 + clock * 3) % 7);
      };  // in the replay, different workers are slow
      const AsyncTraining second = train(plan);
      expect_bitwise_equal(first, second);
      EXPECT_EQ(read_full(record), read_full(again));
    }
}

// Of two servers on three ranks, each stores half of the state; a worker transfers all but its own server's shard.
TEST(AsyncServer, TrafficAndAllocationsMatchFormulas) {
  const AsyncTraining run = train({.servers = 2, .steps = 5});
  Decoder model(tiny_gpt(0));
  int64_t all = 0;
  std::vector<int64_t> served(3);
  for (const Module::Unit& unit : model.layout()) {
    all += unit.size;
    const int64_t first = std::min(unit.size, (unit.size / 2 + 255) / 256 * 256);  // sizes are even
    served[0] += first;
    served[1] += unit.size - first;
  }
  int64_t moved = 0;
  for (size_t r = 0; r < 3; ++r) {
    EXPECT_EQ(run.parameters[r], 4 * (all + served[r]));
    EXPECT_EQ(run.moments[r], 8 * served[r]);
    EXPECT_EQ(run.pushed[r], 5 * 4 * (all - served[r]));
    EXPECT_EQ(run.pulled[r], 2 * (5 + 1) * 4 * served[r]);  // five pulls and a final one by each other worker
    moved += run.pushed[r];
  }
  EXPECT_EQ(moved, 5 * 2 * 4 * all);
}

double end_time(const std::vector<AppliedPush>& pushes) {
  const auto n = std::ssize(pushes) / 5;
  const auto add = [](double sum, const AppliedPush& push) { return sum + push.loss; };
  return std::accumulate(pushes.end() - n, pushes.end(), 0.0, add) / static_cast<double>(n);
}

// Asynchronous training is compared with the synchronous run over the same sequences in the same number of clocks,
// which makes a third of the updates, and with one worker that processes the three workers' batches sequentially, which
// makes the same number of updates without staleness. Bounds on the mean loss of the last fifth of a run that starts at
// log(37) = 3.6: 0.1 above the synchronous run, 0.35 above the single worker.
TEST(AsyncServer, LossStaysWithinBoundsOfSynchronousRun) {
  AsyncPlan plan{.ranks = 1, .staleness = 0, .steps = 60, .sequences = 6, .dropout = 0, .rate = 0.004};
  const double synchronous = end_time(train(plan).pushes);
  plan.steps = 180;
  plan.sequences = 2;
  const double serial = end_time(train(plan).pushes);
  plan.ranks = 3;
  plan.steps = 60;
  plan.servers = 2;
  for (plan.staleness = 0; plan.staleness < 3; plan.staleness += 2) {
    const AsyncTraining run = train(plan);
    EXPECT_GT(run.pushes.front().loss, 3.3);
    EXPECT_LT(end_time(run.pushes), synchronous + 0.1);
    EXPECT_LT(end_time(run.pushes), serial + 0.35);
  }
}

// Failures: a worker ends early, is slow, or throws; a record does not match. No rank hangs, and the error names the
// cause.

// Worker 1 makes one step, the others three, as in records of old runs.
TEST(AsyncFailure, EarlyWorkerExitDoesNotBlockReplay) {
  const TemporaryDirectory scratch = scratch_directory();
  const std::vector<Push> order = {{0, 0, 0}, {1, 0, 0}, {2, 0, 0}, {0, 1, 3}, {2, 1, 3}, {0, 2, 5}, {2, 2, 5}};
  const AsyncPlan plan{.servers = 2, .staleness = 0, .replay = scratch.path() / "record"};
  write_push_log(plan.replay, {.workers = 3, .staleness = 0, .steps = 8, .servers = {order, order}});
  const AsyncTraining run = train(plan);
  EXPECT_EQ(run.summary.applied, 7);
  EXPECT_TRUE(train(plan).values == run.values);
}

// Worker `late_worker` sleeps before its clock 1.
auto late(int late_worker, int64_t ms) {
  return [=](int worker, int64_t clock) {
    if (worker == late_worker && clock == 1) sleep_ms(ms);
  };
}

TEST(AsyncFailure, FinishedWorkersWaitLongerThanTimeout) {
  train({.ranks = 2, .staleness = 0, .steps = 2, .timeout = 2, .before = late(0, 2500)});
}

TEST(AsyncFailure, ThrowingWorkerAbortsAllRanksWithItsError) {
  for (int servers = 1; servers <= 3; ++servers)
    for (int guilty = 0; guilty < 3; ++guilty)
      for (const int64_t staleness : {0, 5}) {
        const auto before = [=](int worker, int64_t clock) {
          if (worker == guilty && clock == 2) throw Error("the cause", Status::input);
        };
        EXPECT_EQ(error_message([&] { train({.servers = servers, .staleness = staleness, .before = before}); },
                                Status::input),
                  "[rank " + std::to_string(guilty) + "] the cause");
      }
}

TEST(AsyncFailure, ThrowingLearningRateAbortsAllRanks) {
  AsyncPlan plan{.staleness = 50, .steps = 50, .sequences = 1, .optimizer = OptimizerKind::sgd, .dropout = 0};
  plan.lr = [](int64_t applied) { return applied == 7 ? throw Error("no rate") : 0.01; };
  EXPECT_EQ(error_message([&] { train(plan); }), "[rank 0] no rate");
}

TEST(AsyncFailure, NamesSilentWorker) {
  EXPECT_EQ(
      error_message([] { train({.staleness = 0, .timeout = 1, .before = late(2, 1400)}); }, Status::communication),
      "[rank 0] world axis, recv of 48 bytes: rank 2 sent nothing within 1 s");
}

std::string refusal(const AsyncPlan& plan, Status status = Status::usage) {
  return error_message([&] { train(plan); }, status);
}

TEST(AsyncFailure, RejectsMismatchedRecord) {
  const TemporaryDirectory scratch = scratch_directory();
  const std::string file = scratch.path() / "record";
  const AsyncPlan plan{.steps = 3, .record = file};
  train(plan);
  const auto changed = [&](auto change, Status status = Status::usage) {
    AsyncPlan other = plan;
    other.record.clear();
    other.replay = file;
    change(other);
    return refusal(other, status);
  };
  EXPECT_EQ(changed([](AsyncPlan&) {}), "nothing was thrown");
  const std::string was = file + " was recorded with 3 ranks, 1 servers, staleness 1 and 3 steps; this run has ";
  EXPECT_TRUE(has(changed([](AsyncPlan& p) { p.ranks = 2; }), was + "2 ranks"));
  EXPECT_TRUE(has(changed([](AsyncPlan& p) { p.servers = 2; }), was + "3 ranks, 2 servers"));
  EXPECT_TRUE(has(changed([](AsyncPlan& p) { p.staleness = 2; }), "this run has 3 ranks, 1 servers, staleness 2"));
  EXPECT_TRUE(has(changed([](AsyncPlan& p) { p.steps = 4; }), "and 4 steps"));
  EXPECT_TRUE(has(changed([&](AsyncPlan& p) { p.replay = file + "s"; }, Status::input), "cannot open "));
  EXPECT_TRUE(has(refusal({.staleness = -1}), "`staleness`: expected"));
  EXPECT_TRUE(has(refusal({.servers = 4}), "`servers`: expected 1 to 3"));
  EXPECT_TRUE(has(refusal({.steps = 1, .record = scratch.path() / "no/such/place"}, Status::output), "cannot write"));
}

TEST(AsyncFailure, NonFiniteLossAbortsRun) {
  EXPECT_TRUE(has(refusal({.rate = 1e30}, Status::not_finite), "the loss or the gradient norm is not finite"));
}

// Stopping: all workers reach a common step; a replay stops where its record allows it, and continues bitwise
// identically.

// Every worker is tried as the one that requests the stop.
TEST(AsyncStop, AllWorkersStopAtStepOfFastestWorker) {
  for (const int64_t staleness : {0, 2})
    for (const int stopper : {0, 1, 2}) {
      std::array<std::atomic<int64_t>, 3> begun{};
      std::atomic<bool> wished = false;
      AsyncPlan plan{.servers = 2, .staleness = staleness, .steps = 12};
      plan.before = [&](int worker, int64_t clock) {
        uneven(worker, clock);
        begun[static_cast<size_t>(worker)] = clock + 1;
      };
      plan.wish = [&](int worker) {
        return worker == stopper && begun[static_cast<size_t>(stopper)] == 3 && !wished.exchange(true);
      };
      plan.stops = {12};
      const AsyncTraining run = train(plan);
      ASSERT_EQ(run.stopped.size(), 2U);
      EXPECT_GE(run.stopped[0], 3);
      EXPECT_LE(run.stopped[0], 3 + staleness + 1);
      EXPECT_EQ(run.stopped[1], 12);
      const auto first = static_cast<size_t>(3 * run.stopped[0]);  // pushes before the stop
      for (size_t p = 0; p < run.pushes.size(); ++p) {
        EXPECT_EQ(p < first, run.pushes[p].push.clock < run.stopped[0]) << p;
        EXPECT_TRUE(p < first || run.pushes[p].push.version >= static_cast<int64_t>(first)) << p;
      }
      EXPECT_EQ(run.summary.applied, 36);
      EXPECT_LE(run.summary.max_ahead, staleness);
    }
}

TEST(AsyncStop, CheckpointsAreSavedAtCommonSteps) {
  const AsyncTraining run = train({.servers = 3, .staleness = 3, .steps = 6, .stops = {1, 2, 3, 4, 5}});
  EXPECT_EQ(run.stopped, (std::vector<int64_t>{1, 2, 3, 4, 5, 6}));
  for (size_t p = 0; p < run.pushes.size(); ++p) EXPECT_EQ(run.pushes[p].push.clock, static_cast<int64_t>(p / 3));
}

// In a record of a run without stops, workers are at different steps at every position.
TEST(AsyncStop, StoppedReplayMatchesRecordedRunBitwise) {
  const TemporaryDirectory scratch = scratch_directory();
  for (const int servers : {1, 2, 3}) {
    AsyncPlan plan{.servers = servers, .staleness = 2, .steps = 10, .record = scratch.path() / "record"};
    plan.before = uneven;
    const AsyncTraining first = train(plan);
    plan.replay = std::exchange(plan.record, "");
    for (int64_t step = 1; step < 10; ++step) plan.stops.push_back(step);
    const AsyncTraining second = train(plan);
    expect_bitwise_equal(first, second);
    for (size_t k = 0; k < plan.stops.size(); ++k) EXPECT_GE(second.stopped[k], plan.stops[k]);
  }
}

// Checks the common steps by a second method, which compares the servers' sets of pushes.
TEST(AsyncStop, AllServersHaveSamePushesAtCommonSteps) {
  const Philox random(7);
  uint64_t samples = 0;
  for (int trial = 0; trial < 200; ++trial) {
    const auto below = [&](size_t n) { return static_cast<size_t>(random.below(n, samples++)); };
    PushLog log{.workers = 2 + static_cast<int>(below(3)), .staleness = 9, .steps = 9, .servers = {}};
    const auto workers = static_cast<size_t>(log.workers);
    std::vector<Push> order;
    std::vector<int64_t> clocks(workers);
    for (int p = 0; p < 12; ++p) {
      const size_t w = below(workers);
      order.push_back({static_cast<int>(w), clocks[w]++, 0});
    }
    const size_t servers = 1 + below(3);
    for (size_t k = 0; k < servers; ++k) {  // swaps a few neighbours
      log.servers.push_back(order);
      for (size_t swaps = below(5); swaps > 0; --swaps)
        if (const size_t at = below(11); log.servers[k][at].worker != log.servers[k][at + 1].worker)
          std::swap(log.servers[k][at], log.servers[k][at + 1]);
    }
    std::vector<int64_t> expected;
    for (size_t n = 0; n <= order.size(); ++n) {
      std::set<std::set<std::pair<int, int64_t>>> different;
      for (const std::vector<Push>& server : log.servers) {
        std::set<std::pair<int, int64_t>> applied;
        for (size_t p = 0; p < n; ++p) applied.emplace(server[p].worker, server[p].clock);
        different.insert(applied);
      }
      if (different.size() == 1) expected.push_back(static_cast<int64_t>(n));
    }
    EXPECT_EQ(stop_points(log), expected);
  }
}

// The push log: round trip, and one-line errors.

const std::string kGood =
    "tessera-pushes version 1 workers 2 servers 1 staleness 1 steps 2\n"
    "server 0 pushes 4\n0 0 0\n1 0 0\n1 1 2\n0 1 1\n";

std::string refusal(const std::string& text) {
  return error_message([&] { parse_push_log(text, "log"); }, Status::input);
}

TEST(PushLog, RoundTripsThroughText) {
  const PushLog log = parse_push_log(kGood, "log");
  EXPECT_EQ(log.workers, 2);
  EXPECT_EQ(log.staleness, 1);
  EXPECT_EQ(log.steps, 2);
  EXPECT_EQ(log.servers, (std::vector<std::vector<Push>>{{{0, 0, 0}, {1, 0, 0}, {1, 1, 2}, {0, 1, 1}}}));
  EXPECT_EQ(to_string(log), kGood);
}

TEST(PushLog, RejectsTruncatedLogs) {
  for (size_t n = 0; n < kGood.size(); ++n) EXPECT_NE(refusal(kGood.substr(0, n)), "nothing was thrown") << n;
  EXPECT_NE(refusal(kGood + "\n"), "nothing was thrown");
  EXPECT_NE(refusal(kGood + kGood), "nothing was thrown");
}

std::string with(const std::string& from, const std::string& to) {
  std::string text = kGood;
  text.replace(text.find(from), from.size(), to);
  return text;
}

TEST(PushLog, ErrorsAreOneLine) {
  const std::vector<std::pair<std::string, std::string>> cases = {
      {"",
       "log: line 1: expected 'tessera-pushes version 1 workers # servers # staleness # steps #', got the end of "
       "the file"},
      {with("version 1", "version 2"), "log: line 1: expected"},
      {with("workers 2", "workers 99999999999999999999"), "log: line 1: expected"},
      {with("workers 2", "workers 70000"), "got 70000 and 1"},
      {with("servers 1", "servers 3"), "got 2 and 3"},
      {with("servers 1", "servers 2"), "log: line 7: expected 'server # pushes #', got the end of the file"},
      {with("server 0", "server 1"), "expected 'the servers in ascending order'"},
      {with("pushes 4", "pushes 4000000000000"), "log: line 7: expected '# # #', got the end of the file"},
      {with("pushes 4", "pushes 3"), "line 5: expected 'the end of the file', got more"},
      {with("1 1 2", "2 1 2"), "line 5: expected 'a worker index below 2', got 2"},
      {with("1 1 2", "1 2 2"), "line 5: expected 'clock 1 of 2 of worker 1', got 2"},
      {with("steps 2", "steps 1"), "expected 'clock 1 of 1 of worker 1', got 1"},
      {with("1 1 2", "1 1 1"), "line 5: expected 'a version from 2 to 2', got 1"},
      {with("1 1 2", "1 1 3"), "line 5: expected 'a version from 2 to 2', got 3"},
      {with("1 1 2", "1 1 -2"), "line 5: expected '# # #', got '1 1 -2'"},
      {with("1 1 2", "1 1 2 "), "got '1 1 2 '"},
      {with("1 1 2", "1  1 2"), "got '1  1 2'"},
  };
  for (const auto& [text, expected] : cases) {
    const std::string what = refusal(text);
    EXPECT_TRUE(has(what, expected)) << "\nexpected " << expected;
    EXPECT_FALSE(has(what, "\n"));
  }
}

// Worker 1 pulls for its clock 1 before worker 0 has completed any: one ahead.
TEST(PushLog, RejectsPushOrderBeyondStalenessBound) {
  const std::string ahead =
      "tessera-pushes version 1 workers 2 servers 1 staleness 1 steps 2\n"
      "server 0 pushes 4\n1 0 0\n1 1 1\n0 0 0\n0 1 3\n";
  EXPECT_EQ(refusal(ahead), "nothing was thrown");
  std::string bounded = ahead;
  bounded.replace(bounded.find("staleness 1"), 11, "staleness 0");
  EXPECT_EQ(refusal(bounded), "log: no run with a staleness of at most 0 can apply pushes in this order");
}

// Each server's order is valid by itself, but at server 0 worker 2 pulled after worker 3's push, and at server 1 worker
// 3 pulled after worker 2's push.
TEST(PushLog, RejectsDeadlockingPushOrders) {
  const std::string head = "tessera-pushes version 1 workers 4 servers 2 staleness 9 steps 1\n";
  const std::string first = "server 0 pushes 2\n3 0 0\n2 0 1\n";
  EXPECT_EQ(refusal(head + first + "server 1 pushes 2\n3 0 0\n2 0 1\n"), "nothing was thrown");
  EXPECT_NE(refusal(head + first + "server 1 pushes 2\n2 0 0\n3 0 1\n"), "nothing was thrown");
  EXPECT_NE(refusal(head + first + "server 1 pushes 1\n2 0 0\n"), "nothing was thrown");
}

}  // namespace
}  // namespace tessera
