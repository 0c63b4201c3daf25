// The closed forms of the papers, exactly, on a clock where F, I and W take one unit and B two; and what the clock does
// with other times.
#include "parallel/pipeline/simulate.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <fstream>
#include <iterator>
#include <sstream>

#include "parallel/pipeline/validate.h"
#include "tensor/error.h"
#include "tensor/random.h"
#include "tests/parallel/schedules.h"

namespace tessera {
namespace {

// Times are whole units, so every sum is exact: idle p / (makespan p) = above / below.
void expect_share(const Simulation& sim, int above, int below) {
  double idle = 0;
  for (const double x : sim.idle) idle += x;
  EXPECT_EQ(idle * below, sim.makespan * sim.schedule.ranks * above) << test::described(sim.schedule);
  EXPECT_DOUBLE_EQ(sim.bubble_share(), static_cast<double>(above) / below);
  const auto formula = bubble_formula(sim.schedule);
  ASSERT_TRUE(formula.has_value()) << test::described(sim.schedule);
  EXPECT_DOUBLE_EQ(*formula, static_cast<double>(above) / below) << test::described(sim.schedule);
}

// Calls f(p, m) for 1 to 8 ranks and 1 to 4 p micro-batches.
template <class F>
void for_sizes(const F& f) {
  for (int p = 1; p <= 8; ++p)
    for (int m = 1; m <= 4 * p; ++m) f(p, m);
}

TEST(Simulate, NaiveLetsOneRankWorkAtATime) {
  for_sizes([](int p, int m) {
    const Simulation s = simulate(naive(p, m));
    expect_share(s, p - 1, p);
    EXPECT_EQ(s.makespan, 3 * m * p);
    EXPECT_EQ(s.in_flight, std::vector<int>(static_cast<size_t>(p), 1));
  });
}

TEST(Simulate, GpipeHasItsBubbleAndHoldsEveryMicrobatch) {
  for_sizes([](int p, int m) {
    const Simulation s = simulate(gpipe(p, m));
    expect_share(s, p - 1, m + p - 1);
    EXPECT_EQ(s.in_flight, std::vector<int>(static_cast<size_t>(p), m));
  });
}

TEST(Simulate, OneFOneBHasGpipesBubbleInLessMemory) {
  for_sizes([](int p, int m) {
    const Simulation s = simulate(one_f_one_b(p, m));
    expect_share(s, p - 1, m + p - 1);
    for (int i = 0; i < p; ++i) EXPECT_EQ(s.in_flight[static_cast<size_t>(i)], std::min(p - i, m));
  });
}

TEST(Simulate, InterleavedDividesTheBubbleByItsChunks) {
  for (int p = 1; p <= 8; ++p)
    for (int m = p; m <= 4 * p; m += p)
      for (int v = 1; v <= 4; ++v) {
        const Simulation s = simulate(interleaved(p, m, v));
        expect_share(s, p - 1, v * m + p - 1);
        EXPECT_EQ(s.in_flight[0], std::min(m * v, p * v + p - 1))
            << p << " " << m << " " << v;  // chunks: v (p + (p-1)/v)
        EXPECT_EQ(s.schedule.wire_boundaries(), p == 1 ? 0 : p * v - 1);
      }
}

TEST(Simulate, ZbH1HasAThirdOfTheBubble) {
  for_sizes([](int p, int m) {
    const Simulation s = simulate(zb_h1(p, m));
    EXPECT_EQ(*std::max_element(s.in_flight.begin(), s.in_flight.end()), std::min(p, m));
    EXPECT_EQ(s.in_flight[0], std::min(p, m));
    if (m >= p) expect_share(s, p - 1, 3 * m + p - 1);
  });
}

// The smallest number of micro-batches from which on nothing is idle inside a rank's span.
TEST(Simulate, ZbH2AndZbVLeaveNothingIdleFromTwoPLessOneOn) {
  for_sizes([](int p, int m) {
    const Simulation h2 = simulate(zb_h2(p, m)), v = simulate(zb_v(p, m));
    EXPECT_EQ(*std::max_element(h2.in_flight.begin(), h2.in_flight.end()), std::min(2 * p - 1, m));
    EXPECT_EQ(*std::max_element(v.in_flight.begin(), v.in_flight.end()), 2 * std::min(p, m));
    for (const Simulation& s : {h2, v})
      EXPECT_EQ(*std::max_element(s.idle_inside.begin(), s.idle_inside.end()) == 0, m >= 2 * p - 1) << p << " " << m;
    if (m >= 2 * p - 1) {
      EXPECT_EQ(v.in_flight, std::vector<int>(static_cast<size_t>(p), 2 * p));
      EXPECT_EQ(h2.makespan, 3 * m + p - 1);  // ranks start one after another
      EXPECT_EQ(v.makespan, 6 * m + p - 1);   // twice the passes, of half the work each
    }
    EXPECT_EQ(v.schedule.wire_boundaries(), 2 * p - 2);
    EXPECT_FALSE(bubble_formula(h2.schedule).has_value() || bubble_formula(v.schedule).has_value());
  });
}

// The paper's table: floor((p + 4) / 3) micro-batches in flight for about 4 p units of bubble, floor((p + 2) / 2) for
// about 3 p, where 1F1B has p and 6 (p - 1). Beside the sizes of the others, random ones to 40 ranks.
TEST(Simulate, VMinAndVHalfHaveTheMemoryOfThePaper) {
  const auto expect = [](int p, int m) {
    const Simulation min = simulate(v_min(p, m)), half = simulate(v_half(p, m));
    const auto most = [](const Simulation& s) { return *std::ranges::max_element(s.in_flight); };
    EXPECT_EQ(most(min), 2 * std::min(m, (p + 4) / 3)) << p << " " << m;
    EXPECT_EQ(most(half), 2 * std::min(m, (p + 2) / 2)) << p << " " << m;
    if (p > 1) expect_share(min, 4 * p - 5, 6 * m + 4 * p - 5);
    EXPECT_LE(half.makespan, min.makespan) << p << " " << m;
    if (m < 2 * p) return;
    EXPECT_EQ(half.in_flight, std::vector<int>(static_cast<size_t>(p), 2 * ((p + 2) / 2))) << p << " " << m;
    EXPECT_LE(4 * (half.makespan - 6 * m), 13 * p) << p << " " << m;
    if (p <= 16) {
      EXPECT_LE(half.makespan - 6 * m, 3 * p) << p << " " << m;
    }
    for (const Simulation& s : {min, half}) EXPECT_EQ(s.schedule.wire_boundaries(), 2 * p - 2);
  };
  for_sizes(expect);
  const Philox draw = Philox::named(3, "v schedules");
  for (uint64_t trial = 0; trial < 60; ++trial)
    expect(1 + static_cast<int>(draw.below(40, 2 * trial)), 1 + static_cast<int>(draw.below(100, 2 * trial + 1)));
}

// A split backward pass that is not moved changes no time; free messages neither.
TEST(Simulate, PassesThatTakeNoTimeChangeNone) {
  for (const int p : {1, 2, 3, 5})
    for (const int m : {1, p, 2 * p, 3 * p + p})
      for (const Schedule& s : test::all_schedules(p, m)) {
        const double makespan = simulate(s).makespan;
        EXPECT_EQ(simulate(insert_messages(s)).makespan, makespan) << test::described(s);
        EXPECT_EQ(simulate(split_backward(gpipe(p, m))).in_flight, simulate(gpipe(p, m)).in_flight);
      }
}

TEST(Simulate, AMessageTakesItsTime) {
  for (int p = 1; p <= 5; ++p) {
    const Times slow{.message = 0.5};
    // One micro-batch: there and back over p - 1 boundaries.
    EXPECT_EQ(simulate(gpipe(p, 1), slow).makespan, 3 * p + 0.5 * 2 * (p - 1));
    EXPECT_EQ(simulate(insert_messages(gpipe(p, 1)), slow).makespan, 3 * p + 0.5 * 2 * (p - 1));
    // The turn of the V is no message.
    EXPECT_EQ(simulate(zb_v(p, 1), slow).makespan, simulate(zb_v(p, 1)).makespan + 0.5 * 2 * (2 * p - 2));
  }
}

TEST(Simulate, TakesEachStagesOwnTimes) {
  const Times times{.stages = {{.forward = 1, .backward = 2}, {.forward = 3, .backward = 5}}};
  const Simulation s = simulate(one_f_one_b(2, 2), times);
  // rank 0: F0 0-1, F1 1-2, B0 9-11, B1 17-19; rank 1: F0 1-4, B0 4-9, F1 9-12, B1 12-17
  EXPECT_EQ(s.makespan, 19);
  EXPECT_EQ(s.idle, (std::vector<double>{13, 3}));
  EXPECT_EQ(s.idle_inside, (std::vector<double>{13, 0}));
  EXPECT_DOUBLE_EQ(s.bubble_share(), 8.0 / 19);
  EXPECT_EQ(s.actions[0][2].start, 9);
  EXPECT_EQ(s.actions[1][3].end, 17);
  EXPECT_THROW(simulate(gpipe(3, 2), times), Error);
  EXPECT_THROW(simulate(gpipe(3, 2), {.message = -1}), Error);
  Schedule broken = gpipe(2, 2);
  broken.actions[0].pop_back();
  EXPECT_THROW(simulate(broken), Error);
}

// The pictures in the files of the generators are those that draw() makes, so the reader sees what runs.
TEST(Draw, IsWhatTheGeneratorsShow) {
  const auto shows = [](const std::string& file, const Schedule& schedule) {
    std::ifstream stream(std::string(TESSERA_SOURCE_DIR) + "/parallel/pipeline/" + file);
    const std::string text((std::istreambuf_iterator<char>(stream)), std::istreambuf_iterator<char>());
    std::istringstream rows(draw(simulate(schedule)));
    std::string picture;
    for (std::string row; std::getline(rows, row);) picture += "//   " + row + "\n";
    EXPECT_NE(text.find(picture), std::string::npos) << file << " should show\n" << picture;
  };
  shows("schedules.cpp", naive(3, 2));
  shows("schedules.cpp", gpipe(3, 4));
  shows("one_f_one_b.cpp", one_f_one_b(3, 4));
  shows("simulate.h", one_f_one_b(3, 4));
  shows("schedules.cpp", interleaved(2, 2, 2));
  shows("zero_bubble.cpp", zb_h1(3, 5));
  shows("zero_bubble.cpp", zb_h2(3, 5));
  shows("schedules.cpp", zb_v(2, 4));
  shows("schedules.cpp", v_min(2, 3));
  shows("schedules.cpp", v_half(2, 3));
}

TEST(Draw, LeavesOutMessages) {
  EXPECT_EQ(draw(simulate(insert_messages(zb_h1(2, 3)))),
            "rank 0 | F0 F1 .. I0 W0 F2 I1 W1 I2 W2\n"
            "rank 1 | .. F0 I0 F1 I1 W0 F2 I2 W1 W2\n");
}

TEST(Draw, FitsIntoTheGivenColumns) {
  const Simulation s = simulate(gpipe(3, 30));
  for (const int columns : {1, 7, 40}) {
    const std::string text = draw(s, 0, columns), first = text.substr(0, text.find('\n'));
    EXPECT_LE(first.size(), 8 + static_cast<size_t>(columns) * 4) << text;
    EXPECT_EQ(std::count(text.begin(), text.end(), '\n'), 3);
  }
  EXPECT_EQ(draw(simulate(gpipe(1, 1)), 0.5), "rank 0 | F0 -- B0 -- -- --\n");
}

// A measured step is replayed to the same step: every schedule, with passes of random lengths. And its picture.

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
