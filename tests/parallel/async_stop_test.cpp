// An asynchronous run that is stopped: all workers come to one step; a replay is stopped where its record allows it,
// and goes on to the same bits.

#include <set>

#include "tests/parallel/async_training.h"

namespace tessera {
namespace {

using test::AsyncPlan;
using test::AsyncTraining;
using test::Scratch;
using test::sleep_ms;
using test::train;

// Whoever wishes to stop, and whoever is slow.
TEST(AsyncStop, AllWorkersComeToTheStepThatTheFastestHasBegun) {
  for (const int64_t staleness : {0, 2})
    for (const int who : {0, 1, 2}) {
      std::array<std::atomic<int64_t>, 3> begun{};
      std::atomic<bool> wished = false;
      AsyncPlan plan{.servers = 2, .staleness = staleness, .steps = 12};
      plan.before = [&](int worker, int64_t clock) {
        sleep_ms((worker * 7 + clock * 5) % 6);
        begun[static_cast<size_t>(worker)] = clock + 1;
      };
      plan.wish = [&](int worker) {
        return worker == who && begun[static_cast<size_t>(who)] == 3 && !wished.exchange(true);
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
      EXPECT_LE(run.summary.most_ahead, staleness);
    }
}

TEST(AsyncStop, SavesOfEveryStepAreStepsInCommon) {
  const AsyncTraining run = train({.servers = 3, .staleness = 3, .steps = 6, .stops = {1, 2, 3, 4, 5}});
  EXPECT_EQ(run.stopped, (std::vector<int64_t>{1, 2, 3, 4, 5, 6}));
  for (size_t p = 0; p < run.pushes.size(); ++p) EXPECT_EQ(run.pushes[p].push.clock, static_cast<int64_t>(p / 3));
}

// In a record of a run that nobody stopped, workers are at different steps everywhere.
TEST(AsyncStop, AReplayThatIsStoppedAtEveryStepHasTheSameBits) {
  const Scratch scratch;
  for (const int servers : {1, 2, 3}) {
    AsyncPlan plan{.servers = servers, .staleness = 2, .steps = 10, .record = scratch.file("record")};
    plan.before = [](int worker, int64_t clock) { sleep_ms((worker * 7 + clock * 5) % 6); };
    const AsyncTraining first = train(plan);
    plan.replay = std::exchange(plan.record, "");
    for (int64_t step = 1; step < 10; ++step) plan.stops.push_back(step);
    const AsyncTraining second = train(plan);
    EXPECT_TRUE(first.values == second.values);
    EXPECT_TRUE(first.state == second.state);
    ASSERT_EQ(first.pushes.size(), second.pushes.size());
    for (size_t p = 0; p < first.pushes.size(); ++p) EXPECT_EQ(first.pushes[p].loss, second.pushes[p].loss);
    for (size_t k = 0; k < plan.stops.size(); ++k) EXPECT_GE(second.stopped[k], plan.stops[k]);
  }
}

// By another way: the sets of pushes, compared as sets.
TEST(AsyncStop, CommonPlacesAreWhereAllServersHaveTheSamePushes) {
  const Philox random(7);
  uint64_t draws = 0;
  for (int trial = 0; trial < 200; ++trial) {
    const auto below = [&](size_t n) { return static_cast<size_t>(random.below(n, draws++)); };
    PushLog log{.workers = 2 + static_cast<int>(below(3)), .staleness = 9, .steps = 9, .servers = {}};
    const auto workers = static_cast<size_t>(log.workers);
    std::vector<Push> order;
    std::vector<int64_t> clocks(workers);
    for (int p = 0; p < 12; ++p) {
      const size_t w = below(workers);
      order.push_back({static_cast<int>(w), clocks[w]++, 0});
    }
    const size_t servers = 1 + below(3);
    for (size_t k = 0; k < servers; ++k) {  // a few neighbours have changed places
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
    EXPECT_EQ(common_places(log), expected);
  }
}

}  // namespace
}  // namespace tessera
