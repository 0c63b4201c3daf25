// Schedules as values: every generator is right, after every pass too; every planted defect is seen; text and back.

#include <unistd.h>

#include <algorithm>
#include <fstream>

#include "parallel/pipeline/validate.h"
#include "tensor/random.h"
#include "tests/parallel/schedules.h"
#include "tests/support/errors.h"

namespace tessera {
namespace {

using test::all_schedules;
using test::described;

std::string fault_of(const Schedule& s) { return find_fault(s).value_or(""); }

size_t count(const Schedule& s, Do what) {
  size_t n = 0;
  for (const auto& list : s.actions)
    n += static_cast<size_t>(std::count_if(list.begin(), list.end(), [&](const Action& a) { return a.what == what; }));
  return n;
}

// Random passes in a random order, each at most once.
Schedule with_passes(Schedule s, const Philox& draw, uint64_t at) {
  std::vector<std::function<Schedule(const Schedule&)>> passes{split_backward, insert_messages};
  while (!passes.empty()) {
    const auto pick = static_cast<size_t>(draw.below(passes.size(), at));
    if (draw.below(3, at + 10) > 0) s = passes[pick](s);
    passes.erase(passes.begin() + static_cast<std::ptrdiff_t>(pick));
    ++at;
  }
  return s;
}

TEST(Schedule, EveryGeneratorIsRightAfterEveryPass) {
  const Philox draw = Philox::named(1, "passes");
  uint64_t at = 0;
  for (int p = 1; p <= 8; ++p)
    for (int m = 1; m <= 24; ++m)
      for (const Schedule& s : all_schedules(p, m)) {
        ASSERT_EQ(fault_of(s), "") << described(s);
        for (const Schedule& one : {split_backward(s), insert_messages(s)})
          ASSERT_EQ(fault_of(one), "") << described(s) << "\n" << to_text(one);
        const Schedule some = with_passes(s, draw, at += 100);
        ASSERT_EQ(fault_of(some), "") << described(s) << "\n" << to_text(some);
        ASSERT_EQ(peak_in_flight(some), peak_in_flight(s));
      }
}

TEST(Schedule, MessagesAreTwoForEachBoundaryAndMicrobatch) {
  for (const int p : {1, 2, 3, 5})
    for (const int m : {1, p, 4 * p})
      for (const Schedule& s : all_schedules(p, m)) {
        const Schedule lowered = insert_messages(s);
        const auto expected = static_cast<size_t>(s.wire_boundaries() * m);
        for (const Do what : {Do::send_forward, Do::recv_forward, Do::send_backward, Do::recv_backward})
          EXPECT_EQ(count(lowered, what), expected) << described(s);
        EXPECT_EQ(insert_messages(split_backward(s)), split_backward(lowered)) << described(s);
      }
}

TEST(Schedule, PassesWriteWhatTheyPromise) {
  const Schedule s = one_f_one_b(2, 2);
  const auto rank0 = [](const Schedule& x) {
    Schedule only{.actions = {x.actions[0]}};
    const std::string text = to_text(only);
    return text.substr(text.find('\n') + 1);
  };
  EXPECT_EQ(rank0(insert_messages(s)), "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1\n");
  EXPECT_EQ(rank0(split_backward(s)), "0F0 0F1 0I0 0W0 0I1 0W1\n");
  EXPECT_EQ(to_text(split_backward(insert_messages(s))).find("1I0 1W0"), std::string::npos);  // sent between
  EXPECT_THROW(insert_messages(insert_messages(s)), Error);
}

// --- defects ---

Action& pick(Schedule& s, const Philox& draw, uint64_t at, ActionPlace& place) {
  place.rank = static_cast<int>(draw.below(static_cast<uint64_t>(s.ranks), at));
  auto& list = s.actions[static_cast<size_t>(place.rank)];
  place.index = draw.below(list.size(), at + 1);
  return list[place.index];
}

// Swaps an action with one that it depends on, or that must keep its order beside it; false when there is none.
bool swap_bound(Schedule& s, const ActionPlace& place) {
  auto& list = s.actions[static_cast<size_t>(place.rank)];
  const Action a = list[place.index];
  for (size_t j = place.index + 1; j < list.size(); ++j) {
    const bool same_kind = list[j].what == a.what && list[j].stage == a.stage && a.what <= Do::W;
    const bool same_pass = a.what == Do::F && list[j].stage == a.stage && list[j].microbatch == a.microbatch &&
                           (list[j].what == Do::B || list[j].what == Do::I);
    if (!same_kind && !same_pass) continue;
    std::swap(list[place.index], list[j]);
    return true;
  }
  return false;
}

TEST(Validate, SeesEveryPlantedDefect) {
  const Philox draw = Philox::named(2, "defects");
  int planted[4] = {};
  for (uint64_t trial = 0; trial < 600; ++trial) {
    const uint64_t at = 1000 * trial;
    const int p = 1 + static_cast<int>(draw.below(5, at)), m = 1 + static_cast<int>(draw.below(8, at + 1));
    const std::vector<Schedule> all = all_schedules(p, m, 3);
    const Schedule right = with_passes(all[draw.below(all.size(), at + 2)], draw, at + 100);
    for (uint64_t kind = 0; kind < 4; ++kind) {
      Schedule s = right;
      ActionPlace place;
      Action& a = pick(s, draw, at + 10 + 2 * kind, place);
      auto& list = s.actions[static_cast<size_t>(place.rank)];
      const std::string what = a.str();
      if (kind == 0 && !swap_bound(s, place)) continue;
      if (kind == 1) list.erase(list.begin() + static_cast<std::ptrdiff_t>(place.index));
      if (kind == 2) list.insert(list.begin() + static_cast<std::ptrdiff_t>(place.index), Action(a));
      if (kind == 3) a.stage += a.stage + 1 < s.stages ? 1 : -1;
      if (kind == 3 && a.stage < 0 && s.stages > 1) a.stage = 0;
      ++planted[kind];
      ASSERT_TRUE(find_fault(s)) << "defect " << kind << " at " << what << " of " << described(s) << "\n" << to_text(s);
      EXPECT_EQ(fault_of(right), "");
    }
  }
  for (const int n : planted) EXPECT_GT(n, 200);
}

TEST(Validate, SaysWhatIsWrongAndWhere) {
  Schedule s = one_f_one_b(2, 3);  // rank 0: 0F0 0F1 0B0 0F2 0B1 0B2, rank 1: 1F0 1B0 1F1 1B1 1F2 1B2
  const auto changed = [&](const std::function<void(Schedule&)>& change) {
    Schedule other = s;
    change(other);
    return fault_of(other);
  };
  EXPECT_EQ(changed([](Schedule& x) { x.actions[1].pop_back(); }), "rank 1: 1B2 is missing");
  EXPECT_EQ(changed([](Schedule& x) { std::swap(x.actions[1][1], x.actions[1][3]); }),
            "rank 1, action 1 (1B1): comes before that of micro-batch 0; micro-batches of a stage ascend");
  EXPECT_NE(changed([](Schedule& x) {
              x.actions[1][2] = {Do::F, 0, 1};
            }).find("stage 0 is on rank 0"),
            std::string::npos);
  EXPECT_NE(changed([](Schedule& x) {
              x.actions[0].push_back({Do::B, 0, 2});
            }).find("is there twice"),
            std::string::npos);
  EXPECT_NE(changed([](Schedule& x) {
              std::swap(x.actions[1][0], x.actions[1][1]);
            }).find("1B0): waits for 1F0, which comes later on the same rank"),
            std::string::npos);
  EXPECT_NE(changed([](Schedule& x) {
              x.actions[0].insert(x.actions[0].begin(), {Do::W, 0, 0});
            }).find("whole and split"),
            std::string::npos);
  EXPECT_NE(changed([](Schedule& x) { x.microbatches = 0; }).find("expected 1 or more"), std::string::npos);
  EXPECT_NE(changed([](Schedule& x) { x.rank_of_stage = {0, 0}; }).find("rank 0 has 2 stages"), std::string::npos);
  // Two ranks that wait for each other.
  Schedule crossed = interleaved(2, 2, 2);
  std::swap(crossed.actions[0][0], crossed.actions[0][2]);
  EXPECT_NE(fault_of(crossed), "");
  Schedule deadlock = parse_schedule("0F0 0F1 0B0 0B1\n1F0 1F1 1B0 1B1\n", "text");
  deadlock.actions = {{{Do::F, 0, 0}, {Do::B, 0, 0}, {Do::F, 0, 1}, {Do::B, 0, 1}},
                      {{Do::F, 1, 0}, {Do::F, 1, 1}, {Do::B, 1, 0}, {Do::B, 1, 1}}};
  EXPECT_EQ(fault_of(deadlock),
            "deadlock: rank 0, action 1 (0B0): waits for 1B0; rank 1, action 1 (1F1): waits for 0F1");
}

// --- text ---

TEST(ScheduleFile, TextAndBack) {
  for (const int p : {1, 3})
    for (const Schedule& s : all_schedules(p, 3)) {
      const Schedule lowered = insert_messages(s);
      Schedule again = parse_schedule(to_text(lowered), s.name);
      EXPECT_EQ(again, lowered) << described(s);
    }
  const auto path = std::filesystem::temp_directory_path() / ("tessera_schedule_" + std::to_string(getpid()) + ".txt");
  std::ofstream(path) << to_text(zb_v(2, 3));
  EXPECT_EQ(make_schedule(path.string(), 2, 3).actions, zb_v(2, 3).actions);
  EXPECT_NE(error_of([&] { make_schedule(path.string(), 3, 3); }).find("is for 2 ranks; the plan has 3"),
            std::string::npos);
  EXPECT_NE(error_of([&] { make_schedule(path.string(), 2, 4); }).find("3 micro-batches; the plan has 4"),
            std::string::npos);
  EXPECT_NE(error_of([&] { make_schedule(path.string(), 2, 3, 1); }).find("2 chunks"), std::string::npos);
  std::filesystem::remove(path);
  EXPECT_NE(error_of([&] { read_schedule(path); }, Status::input).find("cannot open "), std::string::npos);
}

TEST(ScheduleFile, SaysLineAndWord) {
  const auto error = [](const std::string& text) {
    return error_of([&] { parse_schedule(text, "my.txt"); }, Status::input);
  };
  EXPECT_EQ(error("# two ranks\n\n0F0 0B0 # of rank 0\r\n\t1F0  1B0\n"), "nothing was thrown");
  for (const char* word :
       {"1X0", "F0", "1F", "-1F0", "1F-1", "1F0x", "99999999999F0", "1f0", "1F0,", "1SENDF0", "1UNSHARD0"})
    EXPECT_EQ(error("# x\n0F0 0B0\n1F0 " + std::string(word) + "\n").substr(0, 28),
              "my.txt: line 3, word 2: '" + (word + std::string("' is")).substr(0, 3))
        << word;
  EXPECT_NE(error("").find("no actions"), std::string::npos);
  EXPECT_NE(error("# nothing\n").find("no actions"), std::string::npos);
  EXPECT_NE(error("0F0 0B0 2000000000F2000000000").find("too few"), std::string::npos);
  EXPECT_EQ(error("0F0 0F1 0B0\n1F0 1B0 1F1 1B1\n"), "my.txt: rank 0: 0B1 is missing");
  EXPECT_NE(error("0F0 0B0\n1B0 1F0\n").find("my.txt: rank 1, action 0 (1B0)"), std::string::npos);
  EXPECT_EQ(Action::parse("2RECV_B13"), (Action{Do::recv_backward, 2, 13}));
  EXPECT_EQ((Action{Do::I, 2, 0}.str()), "2I0");
}

TEST(MakeSchedule, RefusesWhatCannotBe) {
  EXPECT_NE(error_of([] {
              make_schedule("interleaved", 4, 6);
            }).find("no multiple of 4 ranks; the nearest that are: 4 and 8"),
            std::string::npos);
  EXPECT_NE(error_of([] { make_schedule("1f1b", 4, 6, 2); }).find("1f1b has 1 chunk per rank, found 2"),
            std::string::npos);
  EXPECT_NE(error_of([] { make_schedule("zb-v", 4, 6, 3); }).find("zb-v has 2 chunks"), std::string::npos);
  EXPECT_NE(error_of([] { make_schedule("fast", 4, 6); }).find("expected naive, gpipe, 1f1b"), std::string::npos);
  EXPECT_NE(error_of([] { make_schedule("gpipe", 4, 0); }).find("micro-batches is 0"), std::string::npos);
  EXPECT_NE(error_of([] { make_schedule("gpipe", 0, 1); }).find("ranks is 0"), std::string::npos);
  EXPECT_NE(error_of([] { make_schedule("interleaved", 2, 2, -1); }).find("chunks is -1"), std::string::npos);
}

}  // namespace
}  // namespace tessera
