// The closed forms of the papers, exactly, on a clock where F, I and W take one unit and B two; and what the clock does
// with other times.
#include "parallel/pipeline/simulate.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <fstream>
#include <iterator>
#include <sstream>
#include <string>
#include <vector>

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

}  // namespace
}  // namespace tessera
