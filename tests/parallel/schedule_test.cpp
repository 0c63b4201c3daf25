// Schedules as values: generators and passes, injected faults, text round trips, the papers' closed forms in
// simulation, and replays of measured steps.
#include <algorithm>
#include <cstdint>
#include <functional>
#include <iostream>
#include <map>
#include <sstream>
#include <string>
#include <vector>

#include "base/files.h"
#include "parallel/pipeline/simulate.h"
#include "parallel/pipeline/validate.h"
#include "tensor/random.h"
#include "tests/parallel/schedules.h"
#include "tests/support/errors.h"

namespace tessera {
namespace {

using namespace test;

std::string fault_text(const Schedule& s) { return find_fault(s).value_or(""); }

size_t count(const Schedule& s, PassKind what) {
  size_t n = 0;
  for (const auto& list : s.actions) n += static_cast<size_t>(std::ranges::count(list, what, &Action::what));
  return n;
}

// Applies random transformation passes in a random order, each at most once.
Schedule with_passes(Schedule s, const Philox& random, uint64_t at) {
  std::vector<std::function<Schedule(const Schedule&)>> passes{split_backward, insert_messages};
  while (!passes.empty()) {
    const auto pick = static_cast<size_t>(random.below(passes.size(), at));
    if (random.below(3, at + 10) > 0) s = passes[pick](s);
    passes.erase(passes.begin() + static_cast<std::ptrdiff_t>(pick));
    ++at;
  }
  return s;
}

TEST(Schedule, EveryGeneratedScheduleIsValidAfterEveryPass) {
  const Philox random = Philox::named(1, "passes");
  uint64_t at = 0;
  for (int p = 1; p <= 8; ++p)
    for (int m = 1; m <= 24; ++m)
      for (const Schedule& s : all_schedules(p, m)) {
        ASSERT_EQ(fault_text(s), "") << described(s);
        for (const Schedule& one : {split_backward(s), insert_messages(s)})
          ASSERT_EQ(fault_text(one), "") << described(s) << "\n" << to_text(one);
        const Schedule some = with_passes(s, random, at += 100);
        ASSERT_EQ(fault_text(some), "") << described(s) << "\n" << to_text(some);
        ASSERT_EQ(peak_in_flight(some), peak_in_flight(s));
      }
}

TEST(Schedule, HasTwoMessagesPerBoundaryAndMicrobatch) {
  for (const int p : {1, 2, 3, 5})
    for (const int m : {1, p, 4 * p})
      for (const Schedule& s : all_schedules(p, m)) {
        const Schedule lowered = insert_messages(s);
        const auto expected = static_cast<size_t>(s.wire_boundaries() * m);
        for (const PassKind what :
             {PassKind::send_forward, PassKind::recv_forward, PassKind::send_backward, PassKind::recv_backward})
          EXPECT_EQ(count(lowered, what), expected) << described(s);
        EXPECT_EQ(insert_messages(split_backward(s)), split_backward(lowered)) << described(s);
      }
}

TEST(Schedule, PassesProduceDocumentedActionLists) {
  const Schedule s = one_f_one_b(2, 2);
  const auto rank0 = [](const Schedule& x) {
    Schedule only{.actions = {x.actions[0]}};
    const std::string text = to_text(only);
    return text.substr(text.find('\n') + 1);
  };
  EXPECT_EQ(rank0(insert_messages(s)), "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1\n");
  EXPECT_EQ(rank0(split_backward(s)), "0F0 0F1 0I0 0W0 0I1 0W1\n");
  EXPECT_FALSE(has(to_text(split_backward(insert_messages(s))), "1I0 1W0"));  // sent between
  EXPECT_THROW(insert_messages(insert_messages(s)), Error);
}

// --- injected faults ---

Action& pick(Schedule& s, const Philox& random, uint64_t at, ActionPlace& place) {
  place.rank = static_cast<int>(random.below(static_cast<uint64_t>(s.ranks), at));
  auto& list = s.actions[static_cast<size_t>(place.rank)];
  place.index = random.below(list.size(), at + 1);
  return list[place.index];
}

// Swaps an action with one that it depends on, or with an adjacent one whose order is fixed; false if there is none.
bool swap_bound(Schedule& s, const ActionPlace& place) {
  auto& list = s.actions[static_cast<size_t>(place.rank)];
  const Action a = list[place.index];
  for (size_t j = place.index + 1; j < list.size(); ++j) {
    const bool same_kind = list[j].what == a.what && list[j].stage == a.stage && a.what <= PassKind::W;
    const bool same_pass = a.what == PassKind::F && list[j].stage == a.stage && list[j].microbatch == a.microbatch &&
                           (list[j].what == PassKind::B || list[j].what == PassKind::I);
    if (!same_kind && !same_pass) continue;
    std::swap(list[place.index], list[j]);
    return true;
  }
  return false;
}

TEST(Validate, DetectsEveryInjectedFault) {
  const Philox random = Philox::named(2, "defects");
  int injected[4] = {};
  for (uint64_t trial = 0; trial < 600; ++trial) {
    const uint64_t at = 1000 * trial;
    const int p = 1 + static_cast<int>(random.below(5, at)), m = 1 + static_cast<int>(random.below(8, at + 1));
    const std::vector<Schedule> all = all_schedules(p, m, 3);
    const Schedule right = with_passes(all[random.below(all.size(), at + 2)], random, at + 100);
    for (uint64_t kind = 0; kind < 4; ++kind) {
      Schedule s = right;
      ActionPlace place;
      Action& a = pick(s, random, at + 10 + 2 * kind, place);
      auto& list = s.actions[static_cast<size_t>(place.rank)];
      const std::string what = a.str();
      if (kind == 0 && !swap_bound(s, place)) continue;
      if (kind == 1) list.erase(list.begin() + static_cast<std::ptrdiff_t>(place.index));
      if (kind == 2) list.insert(list.begin() + static_cast<std::ptrdiff_t>(place.index), Action(a));
      if (kind == 3) a.stage += a.stage + 1 < s.stages ? 1 : -1;
      if (kind == 3 && a.stage < 0 && s.stages > 1) a.stage = 0;
      ++injected[kind];
      ASSERT_TRUE(find_fault(s)) << "fault " << kind << " at " << what << " of " << described(s) << "\n" << to_text(s);
      EXPECT_EQ(fault_text(right), "");
    }
  }
  for (const int n : injected) EXPECT_GT(n, 200);
}

TEST(Validate, DescribesFaultAndPosition) {
  Schedule s = one_f_one_b(2, 3);  // rank 0: 0F0 0F1 0B0 0F2 0B1 0B2, rank 1: 1F0 1B0 1F1 1B1 1F2 1B2
  const auto changed = [&](const auto& change) {
    Schedule other = s;
    change(other, other.actions[0], other.actions[1]);
    return fault_text(other);
  };
  EXPECT_EQ(changed([](auto&, auto&, auto& one) { one.pop_back(); }), "rank 1: 1B2 is missing");
  EXPECT_EQ(changed([](auto&, auto&, auto& one) { std::swap(one[1], one[3]); }),
            "rank 1, action 1 (1B1): precedes that of micro-batch 0; expected ascending micro-batches in each stage");
  EXPECT_TRUE(has(changed([](auto&, auto&, auto& one) { one[2] = {PassKind::F, 0, 1}; }), "stage 0 is on rank 0"));
  EXPECT_TRUE(has(changed([](auto&, auto& zero, auto&) { zero.push_back({PassKind::B, 0, 2}); }), "occurs twice"));
  EXPECT_TRUE(has(changed([](auto&, auto&, auto& one) { std::swap(one[0], one[1]); }),
                  "1B0): waits for 1F0, which comes later on the same rank"));
  EXPECT_TRUE(has(changed([](auto&, auto& zero, auto&) {
                    zero.insert(zero.begin(), {PassKind::W, 0, 0});
                  }),
                  "both fused (B) and split (I, W)"));
  EXPECT_TRUE(has(changed([](auto& x, auto&, auto&) { x.microbatches = 0; }), "expected 1 or more"));
  EXPECT_TRUE(has(changed([](auto& x, auto&, auto&) { x.rank_of_stage = {0, 0}; }), "rank 0 has 2 stages"));
  // Two ranks that wait for each other.
  Schedule crossed = interleaved(2, 2, 2);
  std::swap(crossed.actions[0][0], crossed.actions[0][2]);
  EXPECT_NE(fault_text(crossed), "");
  Schedule deadlock = parse_schedule("0F0 0F1 0B0 0B1\n1F0 1F1 1B0 1B1\n", "text");
  deadlock.actions = {{{PassKind::F, 0, 0}, {PassKind::B, 0, 0}, {PassKind::F, 0, 1}, {PassKind::B, 0, 1}},
                      {{PassKind::F, 1, 0}, {PassKind::F, 1, 1}, {PassKind::B, 1, 0}, {PassKind::B, 1, 1}}};
  EXPECT_EQ(fault_text(deadlock),
            "deadlock: rank 0, action 1 (0B0): waits for 1B0; rank 1, action 1 (1F1): waits for 0F1");
}

// --- text ---

TEST(ScheduleFile, RoundTripsThroughText) {
  for (const int p : {1, 3})
    for (const Schedule& s : all_schedules(p, 3)) {
      const Schedule lowered = insert_messages(s);
      Schedule again = parse_schedule(to_text(lowered), s.name);
      EXPECT_EQ(again, lowered) << described(s);
    }
  const TemporaryDirectory directory(temporary_directory() / "tessera-schedule");
  const auto path = directory.path() / "mine.txt";
  write_file(path, to_text(zb_v(2, 3)));
  EXPECT_EQ(make_schedule(path.string(), 2, 3).actions, zb_v(2, 3).actions);
  EXPECT_TRUE(has(error_message([&] { make_schedule(path.string(), 3, 3); }), "is for 2 ranks; the plan has 3"));
  EXPECT_TRUE(has(error_message([&] { make_schedule(path.string(), 2, 4); }), "3 micro-batches; the plan has 4"));
  EXPECT_TRUE(has(error_message([&] { make_schedule(path.string(), 2, 3, 1); }), "2 chunks"));
  EXPECT_TRUE(has(error_message([&] { read_schedule(directory.path() / "none"); }, Status::input), "cannot open "));
}

TEST(ScheduleFile, ErrorsNameLineAndToken) {
  const auto error = [](const std::string& text) {
    return error_message([&] { parse_schedule(text, "my.txt"); }, Status::input);
  };
  EXPECT_EQ(error("# two ranks\n\n0F0 0B0 # of rank 0\r\n\t1F0  1B0\n"), "nothing was thrown");
  for (const char* word :
       {"1X0", "F0", "1F", "-1F0", "1F-1", "1F0x", "99999999999F0", "1f0", "1F0,", "1SENDF0", "1UNSHARD0"})
    EXPECT_EQ(error("# x\n0F0 0B0\n1F0 " + std::string(word) + "\n").substr(0, 28),
              "my.txt: line 3, word 2: '" + (word + std::string("' is")).substr(0, 3))
        << word;
  EXPECT_TRUE(has(error(""), "no actions"));
  EXPECT_TRUE(has(error("# nothing\n"), "no actions"));
  EXPECT_TRUE(has(error("0F0 0B0 2000000000F2000000000"), "too few"));
  EXPECT_EQ(error("0F0 0F1 0B0\n1F0 1B0 1F1 1B1\n"), "my.txt: rank 0: 0B1 is missing");
  EXPECT_TRUE(has(error("0F0 0B0\n1B0 1F0\n"), "my.txt: rank 1, action 0 (1B0)"));
  EXPECT_EQ(Action::parse("2RECV_B13"), (Action{PassKind::recv_backward, 2, 13}));
  EXPECT_EQ((Action{PassKind::I, 2, 0}.str()), "2I0");
}

TEST(MakeSchedule, RejectsInvalidArguments) {
  EXPECT_TRUE(has(error_message([] { make_schedule("interleaved", 4, 6); }),
                  "not a multiple of 4 ranks; nearest valid value: 4 or 8"));
  EXPECT_TRUE(has(error_message([] { make_schedule("1f1b", 4, 6, 2); }), "1f1b has 1 chunk per rank, got 2"));
  EXPECT_TRUE(has(error_message([] { make_schedule("zb-v", 4, 6, 3); }), "zb-v has 2 chunks"));
  EXPECT_TRUE(has(error_message([] { make_schedule("fast", 4, 6); }), "expected naive, gpipe, 1f1b"));
  EXPECT_TRUE(has(error_message([] { make_schedule("gpipe", 4, 0); }), "micro-batches is 0"));
  EXPECT_TRUE(has(error_message([] { make_schedule("gpipe", 0, 1); }), "ranks is 0"));
  EXPECT_TRUE(has(error_message([] { make_schedule("interleaved", 2, 2, -1); }), "chunks is -1"));
}

// The papers' closed forms, exactly, with unit times for F, I and W and two units for B; and other times.

// Expects the bubble above / below. Times are integers, so every sum is exact.
void expect_fraction(const Simulation& sim, int above, int below) {
  double idle = 0;
  for (const double x : sim.idle) idle += x;
  EXPECT_EQ(idle * below, sim.makespan * sim.schedule.ranks * above) << test::described(sim.schedule);
  EXPECT_DOUBLE_EQ(sim.bubble_fraction(), static_cast<double>(above) / below) << test::described(sim.schedule);
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

// In the naive schedule one rank works at a time, GPipe has every micro-batch in flight, 1F1B has GPipe's bubble with
// less memory, and ZB-H1 a third of that bubble.
TEST(Simulate, NaiveGpipeOneFOneBAndZbH1MatchBubbleAndMemoryInPapers) {
  for_sizes([](int p, int m) {
    const Simulation one = simulate(naive(p, m)), all = simulate(gpipe(p, m)), some = simulate(one_f_one_b(p, m)),
                     split = simulate(zb_h1(p, m));
    expect_fraction(one, p - 1, p);
    for (const Simulation& s : {all, some}) expect_fraction(s, p - 1, m + p - 1);
    if (m >= p) expect_fraction(split, p - 1, 3 * m + p - 1);
    EXPECT_EQ(one.makespan, 3 * m * p);
    EXPECT_EQ(one.in_flight, std::vector<int>(static_cast<size_t>(p), 1));
    EXPECT_EQ(all.in_flight, std::vector<int>(static_cast<size_t>(p), m));
    for (int i = 0; i < p; ++i) EXPECT_EQ(some.in_flight[static_cast<size_t>(i)], std::min(p - i, m));
    EXPECT_EQ(std::ranges::max(split.in_flight), std::min(p, m));
    EXPECT_EQ(split.in_flight[0], std::min(p, m));
  });
}

TEST(Simulate, InterleavedDividesBubbleByChunksPerRank) {
  for (int p = 1; p <= 8; ++p)
    for (int m = p; m <= 4 * p; m += p)
      for (int v = 1; v <= 4; ++v) {
        const Simulation s = simulate(interleaved(p, m, v));
        expect_fraction(s, p - 1, v * m + p - 1);
        EXPECT_EQ(s.in_flight[0], std::min(m * v, p * v + p - 1))
            << p << " " << m << " " << v;  // chunks: v (p + (p-1)/v)
        EXPECT_EQ(s.schedule.wire_boundaries(), p == 1 ? 0 : p * v - 1);
      }
}

// 2 p - 1 is the smallest number of micro-batches for which no rank is idle between its first and last action.
TEST(Simulate, ZbH2AndZbVHaveNoIdleTimeWith2PMinus1Microbatches) {
  for_sizes([](int p, int m) {
    const Simulation h2 = simulate(zb_h2(p, m)), v = simulate(zb_v(p, m));
    EXPECT_EQ(std::ranges::max(h2.in_flight), std::min(2 * p - 1, m));
    EXPECT_EQ(std::ranges::max(v.in_flight), 2 * std::min(p, m));
    for (const Simulation& s : {h2, v})
      EXPECT_EQ(std::ranges::max(s.idle_inside) == 0, m >= 2 * p - 1) << p << " " << m;
    if (m >= 2 * p - 1) {
      EXPECT_EQ(v.in_flight, std::vector<int>(static_cast<size_t>(p), 2 * p));
      EXPECT_EQ(h2.makespan, 3 * m + p - 1);  // ranks start one after another
      EXPECT_EQ(v.makespan, 6 * m + p - 1);   // twice the passes, of half the work each
    }
    EXPECT_EQ(v.schedule.wire_boundaries(), 2 * p - 2);
    EXPECT_FALSE(bubble_formula(h2.schedule).has_value() || bubble_formula(v.schedule).has_value());
  });
}

// The paper's table: V-Min has floor((p + 4) / 3) micro-batches in flight and a bubble of about 4 p units, V-Half
// floor((p + 2) / 2) and about 3 p, 1F1B p and 6 (p - 1). Also random sizes up to 40 ranks.
TEST(Simulate, VMinAndVHalfMatchMemoryInPaper) {
  const auto expect = [](int p, int m) {
    const Simulation min = simulate(v_min(p, m)), half = simulate(v_half(p, m));
    const auto max_in_flight = [](const Simulation& s) { return std::ranges::max(s.in_flight); };
    EXPECT_EQ(max_in_flight(min), 2 * std::min(m, (p + 4) / 3)) << p << " " << m;
    EXPECT_EQ(max_in_flight(half), 2 * std::min(m, (p + 2) / 2)) << p << " " << m;
    if (p > 1) expect_fraction(min, 4 * p - 5, 6 * m + 4 * p - 5);
    EXPECT_LE(half.makespan, min.makespan) << p << " " << m;
    if (m < 2 * p) return;
    EXPECT_EQ(half.in_flight, std::vector<int>(static_cast<size_t>(p), 2 * ((p + 2) / 2))) << p << " " << m;
    EXPECT_LE(4 * (half.makespan - 6 * m), 13 * p) << p << " " << m;
    EXPECT_LE(p <= 16 ? half.makespan - 6 * m : 0, 3 * p) << p << " " << m;
    for (const Simulation& s : {min, half}) EXPECT_EQ(s.schedule.wire_boundaries(), 2 * p - 2);
  };
  for_sizes(expect);
  const Philox random = Philox::named(3, "v schedules");
  for (uint64_t trial = 0; trial < 60; ++trial)
    expect(1 + static_cast<int>(random.below(40, 2 * trial)), 1 + static_cast<int>(random.below(100, 2 * trial + 1)));
}

// Splitting the backward pass without reordering changes no times, nor do zero-cost messages.
TEST(Simulate, SplitBackwardAndFreeMessagesPreserveMakespan) {
  for (const int p : {1, 2, 3, 5})
    for (const int m : {1, p, 2 * p, 3 * p + p})
      for (const Schedule& s : test::all_schedules(p, m)) {
        const double makespan = simulate(s).makespan;
        EXPECT_EQ(simulate(insert_messages(s)).makespan, makespan) << test::described(s);
        EXPECT_EQ(simulate(split_backward(gpipe(p, m))).in_flight, simulate(gpipe(p, m)).in_flight);
      }
}

TEST(Simulate, MessagesAddLatency) {
  for (int p = 1; p <= 5; ++p) {
    const Times slow{.message = 0.5};
    // One micro-batch: forward and backward over p - 1 boundaries.
    EXPECT_EQ(simulate(gpipe(p, 1), slow).makespan, 3 * p + 0.5 * 2 * (p - 1));
    EXPECT_EQ(simulate(insert_messages(gpipe(p, 1)), slow).makespan, 3 * p + 0.5 * 2 * (p - 1));
    // The turn of the V needs no message.
    EXPECT_EQ(simulate(zb_v(p, 1), slow).makespan, simulate(zb_v(p, 1)).makespan + 0.5 * 2 * (2 * p - 2));
  }
}

TEST(Simulate, UsesTimesOfEachStage) {
  const Times times{.stages = {{.forward = 1, .backward = 2}, {.forward = 3, .backward = 5}}};
  const Simulation s = simulate(one_f_one_b(2, 2), times);
  // rank 0: F0 0-1, F1 1-2, B0 9-11, B1 17-19; rank 1: F0 1-4, B0 4-9, F1 9-12, B1 12-17
  EXPECT_EQ(s.makespan, 19);
  EXPECT_EQ(s.idle, (std::vector<double>{13, 3}));
  EXPECT_EQ(s.idle_inside, (std::vector<double>{13, 0}));
  EXPECT_DOUBLE_EQ(s.bubble_fraction(), 8.0 / 19);
  EXPECT_EQ(s.actions[0][2].start, 9);
  EXPECT_EQ(s.actions[1][3].end, 17);
  EXPECT_THROW(simulate(gpipe(3, 2), times), Error);
  EXPECT_THROW(simulate(gpipe(3, 2), {.message = -1}), Error);
  Schedule broken = gpipe(2, 2);
  broken.actions[0].pop_back();
  EXPECT_THROW(simulate(broken), Error);
}

// Checks that a pipeline source file contains this diagram in a comment.
void expect_shown(const std::string& file, const std::string& picture) {
  const std::string text = read_file(TESSERA_SOURCE_DIR "/parallel/pipeline/" + file);
  std::istringstream rows(picture);
  std::string shown;
  for (std::string row; std::getline(rows, row);) shown += "//   " + row + "\n";
  EXPECT_TRUE(has(text, shown)) << file;
}

// The diagrams in the generators' files are the output of draw().
TEST(Sampler, MatchesDiagramsInSourceFiles) {
  for (const auto& [file, schedule] :
       std::vector<std::pair<std::string, Schedule>>{{"naive.cpp", naive(3, 2)},
                                                     {"gpipe.cpp", gpipe(3, 4)},
                                                     {"one_f_one_b.cpp", one_f_one_b(3, 4)},
                                                     {"simulate.h", one_f_one_b(3, 4)},
                                                     {"interleaved.cpp", interleaved(2, 2, 2)},
                                                     {"zero_bubble.cpp", zb_h1(3, 5)},
                                                     {"zero_bubble.cpp", zb_h2(3, 5)},
                                                     {"zb_v.cpp", zb_v(2, 4)},
                                                     {"v_half.cpp", v_min(2, 3)},
                                                     {"v_half.cpp", v_half(2, 3)}})
    expect_shown(file, draw(simulate(schedule)));
  expect_shown("simulate.h", draw_to_scale(simulate(one_f_one_b(2, 3)), 0, 48));
}

TEST(Sampler, OmitsMessages) {
  EXPECT_EQ(draw(simulate(insert_messages(zb_h1(2, 3)))),
            "rank 0 | F0 F1 .. I0 W0 F2 I1 W1 I2 W2\n"
            "rank 1 | .. F0 I0 F1 I1 W0 F2 I2 W1 W2\n");
}

TEST(Sampler, FitsIntoRequestedColumns) {
  const Simulation s = simulate(gpipe(3, 30));
  for (const int columns : {1, 7, 40}) {
    const std::string text = draw(s, 0, columns), first = text.substr(0, text.find('\n'));
    EXPECT_LE(first.size(), 8 + static_cast<size_t>(columns) * 4) << text;
    EXPECT_EQ(std::count(text.begin(), text.end(), '\n'), 3);
  }
  EXPECT_EQ(draw(simulate(gpipe(1, 1)), 0.5), "rank 0 | F0 -- B0 -- -- --\n");
}

// Replaying a measured step reproduces it, for every schedule with random pass times; scaled diagrams keep the
// durations.

Times random_times(const Schedule& s, uint64_t trial) {
  const Philox random = Philox::named(trial, "lengths");
  uint64_t at = 0;
  Times times;
  for (const auto& list : s.actions)
    for (const Action& a : list) times.actions[a] = 1 + static_cast<double>(random.below(1000, at++)) / 100;
  return times;
}

// A measured step at an offset time, with zero message times.
TimedLists happened(const Schedule& s, const Times& times, double at) {
  TimedLists lists = simulate(insert_messages(s), times).actions;
  for (auto& list : lists)
    for (TimedAction& t : list) {
      t.start += at;
      t.end += at;
    }
  return lists;
}

TEST(Replay, ReproducesMeasuredStep) {
  for (const int p : {1, 2, 3, 4})
    for (const int m : {p, 2 * p, 2 * p + 1})
      for (const Schedule& s : test::all_schedules(p, m, 2)) {
        const Times times = random_times(s, static_cast<uint64_t>(p * 100 + m));
        const Simulation clock = simulate(s, times);
        const TimedLists lists = happened(s, times, 1e4);
        const Simulation measured = as_measured(s, lists), replayed = simulate(s, simulate_times(s, lists));
        EXPECT_NEAR(measured.makespan, clock.makespan, 1e-6) << test::described(s);
        EXPECT_NEAR(measured.bubble_fraction(), clock.bubble_fraction(), 1e-9) << test::described(s);
        EXPECT_NEAR(replayed.makespan, clock.makespan, 1e-6) << test::described(s);
        EXPECT_NEAR(replayed.bubble_fraction(), clock.bubble_fraction(), 1e-9) << test::described(s);
        EXPECT_EQ(measured.in_flight, clock.in_flight);
      }
}

// Means would lose the extra time of the first micro-batch, for which the other rank waits.
TEST(Replay, UsesSeparateTimeForFirstMicrobatch) {
  const Schedule s = zb_h2(2, 4);
  Times slow;
  for (const PassKind what : {PassKind::F, PassKind::I, PassKind::W})
    slow.actions[{what, 0, 0}] = slow.actions[{what, 1, 0}] = 2;
  const TimedLists lists = happened(s, slow, 0);
  const Times exact = simulate_times(s, lists);
  Times means = exact;
  means.actions.clear();
  const double measured = as_measured(s, lists).bubble_fraction();
  EXPECT_NEAR(simulate(s, exact).bubble_fraction(), measured, 1e-12);
  EXPECT_GT(measured - simulate(s, means).bubble_fraction(), 0.03);
}

TEST(Replay, MessagesStartWhenBothSidesAreReady) {
  const Schedule s = gpipe(2, 1);
  const TimedLists lists = {{{{PassKind::F, 0, 0}, 5, 6},
                             {{PassKind::send_forward, 0, 0}, 6, 6.5},
                             {{PassKind::recv_backward, 0, 0}, 6.5, 11},
                             {{PassKind::B, 0, 0}, 11, 13}},
                            {{{PassKind::recv_forward, 1, 0}, 4, 7},
                             {{PassKind::F, 1, 0}, 7, 8},
                             {{PassKind::B, 1, 0}, 8, 10},
                             {{PassKind::send_backward, 1, 0}, 10, 10.25}}};
  const Times times = simulate_times(s, lists);
  EXPECT_NEAR(times.message, (0.5 + 0.75) / 2, 1e-12);
  EXPECT_NEAR(times.stages.at(0).backward, 2, 1e-12);
  EXPECT_NEAR(times.actions.at({PassKind::F, 1, 0}), 1, 1e-12);
  const Simulation measured = as_measured(s, lists);
  EXPECT_NEAR(measured.makespan, 8, 1e-12);
  EXPECT_NEAR(measured.idle.at(0), 5, 1e-12);
  EXPECT_NEAR(measured.actions.at(1).at(1).start, 2, 1e-12);
  EXPECT_THROW(simulate(s, {.actions = {{{PassKind::F, 0, 0}, -1.0}}}), Error);
}

// The scaled diagram of any schedule with any times: rows have the requested width and show each rank's idle time.
TEST(Sampler, ScaledDiagramPreservesDurations) {
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
  const Simulation two = simulate(v_min(1, 2)), three = simulate(interleaved(1, 1, 3));
  EXPECT_EQ(draw_to_scale(two, 0, 24), "rank 0 |F0f0i0I0w0W0F1f1i1I1w1W1|\n");
  EXPECT_EQ(draw_to_scale(two, 0, 12), "rank 0 |FfiIwWFfiIwW|\n");
  EXPECT_EQ(draw_to_scale(three, 0, 27), "rank 0 |0F01f02f02b0---1b0---0B0---|\n");
  EXPECT_EQ(draw_to_scale(three, 0, 18), "rank 0 |F0f0f02b0-1b0-0B0-|\n");
  EXPECT_EQ(draw_to_scale(simulate(zb_h1(1, 1), {.stages = {{0, 0, 0, 0}}}), 0, 3), "rank 0 |   |\n");
}

}  // namespace
}  // namespace tessera
