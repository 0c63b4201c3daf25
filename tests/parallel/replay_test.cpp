// A measured step is replayed to the same step: every schedule, with passes of random lengths. And its picture.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <fstream>
#include <iterator>
#include <sstream>
#include <string>

#include "parallel/pipeline/simulate.h"
#include "parallel/pipeline/validate.h"
#include "tensor/error.h"
#include "tensor/random.h"
#include "tests/parallel/schedules.h"

namespace tessera {
namespace {

Times random_times(const Schedule& s, uint64_t trial) {
  const Philox random = Philox::named(trial, "lengths");
  uint64_t at = 0;
  Times times;
  for (const auto& list : s.actions)
    for (const Action& a : list) times.actions[a] = 1 + static_cast<double>(random.below(1000, at++)) / 100;
  return times;
}

// Happened at some other time, with messages that took none.
TimedLists happened(const Schedule& s, const Times& times, double at) {
  TimedLists lists = simulate(insert_messages(s), times).actions;
  for (auto& list : lists)
    for (TimedAction& t : list) {
      t.start += at;
      t.end += at;
    }
  return lists;
}

TEST(Replay, AStepIsReplayedToItself) {
  for (const int p : {1, 2, 3, 4})
    for (const int m : {p, 2 * p, 2 * p + 1})
      for (const Schedule& s : test::all_schedules(p, m, 2)) {
        const Times times = random_times(s, static_cast<uint64_t>(p * 100 + m));
        const Simulation clock = simulate(s, times);
        const TimedLists lists = happened(s, times, 1e4);
        const Simulation measured = as_measured(s, lists), replayed = simulate(s, times_of(s, lists));
        EXPECT_NEAR(measured.makespan, clock.makespan, 1e-6) << test::described(s);
        EXPECT_NEAR(measured.bubble_share(), clock.bubble_share(), 1e-9) << test::described(s);
        EXPECT_NEAR(replayed.makespan, clock.makespan, 1e-6) << test::described(s);
        EXPECT_NEAR(replayed.bubble_share(), clock.bubble_share(), 1e-9) << test::described(s);
        EXPECT_EQ(measured.in_flight, clock.in_flight);
      }
}

// Why means will not do: they lose what the first micro-batch takes longer, which the other rank waits for.
TEST(Replay, TheFirstMicrobatchHasItsOwnTime) {
  const Schedule s = zb_h2(2, 4);
  Times slow;
  for (const Do what : {Do::F, Do::I, Do::W}) slow.actions[{what, 0, 0}] = slow.actions[{what, 1, 0}] = 2;
  const TimedLists lists = happened(s, slow, 0);
  const Times exact = times_of(s, lists);
  Times means = exact;
  means.actions.clear();
  const double measured = as_measured(s, lists).bubble_share();
  EXPECT_NEAR(simulate(s, exact).bubble_share(), measured, 1e-12);
  EXPECT_GT(measured - simulate(s, means).bubble_share(), 0.03);
}

TEST(Replay, MessagesCountFromWhenBothSidesAreReady) {
  const Schedule s = gpipe(2, 1);
  const TimedLists lists = {{{{Do::F, 0, 0}, 5, 6},
                             {{Do::send_forward, 0, 0}, 6, 6.5},
                             {{Do::recv_backward, 0, 0}, 6.5, 11},
                             {{Do::B, 0, 0}, 11, 13}},
                            {{{Do::recv_forward, 1, 0}, 4, 7},
                             {{Do::F, 1, 0}, 7, 8},
                             {{Do::B, 1, 0}, 8, 10},
                             {{Do::send_backward, 1, 0}, 10, 10.25}}};
  const Times times = times_of(s, lists);
  EXPECT_NEAR(times.message, (0.5 + 0.75) / 2, 1e-12);
  EXPECT_NEAR(times.stages.at(0).backward, 2, 1e-12);
  EXPECT_NEAR(times.actions.at({Do::F, 1, 0}), 1, 1e-12);
  const Simulation measured = as_measured(s, lists);
  EXPECT_NEAR(measured.makespan, 8, 1e-12);
  EXPECT_NEAR(measured.idle.at(0), 5, 1e-12);
  EXPECT_NEAR(measured.actions.at(1).at(1).start, 2, 1e-12);
  EXPECT_THROW(simulate(s, {.actions = {{{Do::F, 0, 0}, -1.0}}}), Error);
}

TEST(Draw, ToScaleIsWhatTheHeaderShows) {
  const std::string picture = draw_to_scale(simulate(one_f_one_b(2, 3)), 0, 48);
  std::ifstream stream(std::string(TESSERA_SOURCE_DIR) + "/parallel/pipeline/simulate.h");
  const std::string text((std::istreambuf_iterator<char>(stream)), std::istreambuf_iterator<char>());
  std::istringstream rows(picture);
  std::string shown;
  for (std::string row; std::getline(rows, row);) shown += "//   " + row + "\n";
  EXPECT_NE(text.find(shown), std::string::npos) << shown;
}

// The picture of any schedule with any times: each rank's line is as wide as was asked for, and idle where the rank is.
TEST(Draw, ToScaleKeepsLengths) {
  for (const Schedule& s : test::all_schedules(3, 6, 2)) {
    const Simulation sim = simulate(s, random_times(s, 7));
    std::istringstream rows(draw_to_scale(sim, 2 * sim.makespan, 1000));
    size_t rank = 0;
    for (std::string row; std::getline(rows, row); ++rank) {
      ASSERT_EQ(row.size(), 8 + 1000 + 1U) << row;
      const auto idle = static_cast<double>(std::count(row.begin(), row.end(), '.'));
      EXPECT_NEAR(idle, sim.idle[rank] / sim.makespan * 500, 20) << test::described(s);
      EXPECT_EQ(std::count(row.begin() + 8, row.end(), ' '), 500);
    }
    EXPECT_EQ(rank, 3U);
  }
  EXPECT_EQ(draw_to_scale(simulate(gpipe(1, 1)), 0, 6), "rank 0 |F0B0--|\n");
  EXPECT_EQ(draw_to_scale(simulate(gpipe(1, 1)), 0, 3), "rank 0 |FB0|\n");
  EXPECT_EQ(draw_to_scale(simulate(zb_h1(1, 1), {.stages = {{0, 0, 0, 0}}}), 0, 3), "rank 0 |   |\n");
}

}  // namespace
}  // namespace tessera
