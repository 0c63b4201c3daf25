// The record of applied pushes: written and read back, and refused with one line where it is no record.
#include "parallel/async/push_log.h"

#include <gtest/gtest.h>

#include "tensor/error.h"

namespace tessera {
namespace {

const std::string kGood =
    "tessera-pushes version 1 workers 2 servers 1 staleness 1 steps 2\n"
    "server 0 pushes 4\n0 0 0\n1 0 0\n1 1 2\n0 1 1\n";

std::string refusal(const std::string& text) {
  try {
    parse_push_log(text, "log");
  } catch (const InputError& e) {
    return e.what();
  }
  return "accepted";
}

TEST(PushLog, ReadsWhatItWrites) {
  const PushLog log = parse_push_log(kGood, "log");
  EXPECT_EQ(log.workers, 2);
  EXPECT_EQ(log.staleness, 1);
  EXPECT_EQ(log.steps, 2);
  EXPECT_EQ(log.servers, (std::vector<std::vector<Push>>{{{0, 0, 0}, {1, 0, 0}, {1, 1, 2}, {0, 1, 1}}}));
  EXPECT_EQ(text_of(log), kGood);
}

TEST(PushLog, RefusesEveryPartOfALog) {
  for (size_t n = 0; n < kGood.size(); ++n) EXPECT_NE(refusal(kGood.substr(0, n)), "accepted") << n;
  EXPECT_NE(refusal(kGood + "\n"), "accepted");
  EXPECT_NE(refusal(kGood + kGood), "accepted");
}

std::string with(const std::string& from, const std::string& to) {
  std::string text = kGood;
  text.replace(text.find(from), from.size(), to);
  return text;
}

TEST(PushLog, SaysWhatIsWrongInOneLine) {
  const std::vector<std::pair<std::string, std::string>> cases = {
      {"",
       "log: line 1: expected 'tessera-pushes version 1 workers # servers # staleness # steps #', found the end of "
       "the file"},
      {with("version 1", "version 2"), "log: line 1: expected"},
      {with("workers 2", "workers 99999999999999999999"), "log: line 1: expected"},
      {with("workers 2", "workers 70000"), "found 70000 and 1"},
      {with("servers 1", "servers 3"), "found 2 and 3"},
      {with("servers 1", "servers 2"), "log: line 7: expected 'server # pushes #', found the end of the file"},
      {with("server 0", "server 1"), "expected 'the servers in order'"},
      {with("pushes 4", "pushes 4000000000000"), "log: line 7: expected '# # #', found the end of the file"},
      {with("pushes 4", "pushes 3"), "line 5: expected 'the end of the file', found more"},
      {with("1 1 2", "2 1 2"), "line 5: expected 'a worker below 2', found 2"},
      {with("1 1 2", "1 2 2"), "line 5: expected 'clock 1 of 2 of worker 1', found 2"},
      {with("steps 2", "steps 1"), "expected 'clock 1 of 1 of worker 1', found 1"},
      {with("1 1 2", "1 1 1"), "line 5: expected 'a version from 2 to 2', found 1"},
      {with("1 1 2", "1 1 3"), "line 5: expected 'a version from 2 to 2', found 3"},
      {with("1 1 2", "1 1 -2"), "line 5: expected '# # #', found '1 1 -2'"},
      {with("1 1 2", "1 1 2 "), "found '1 1 2 '"},
      {with("1 1 2", "1  1 2"), "found '1  1 2'"},
  };
  for (const auto& [text, expected] : cases) {
    const std::string what = refusal(text);
    EXPECT_NE(what.find(expected), std::string::npos) << what << "\nexpected " << expected;
    EXPECT_EQ(what.find('\n'), std::string::npos);
  }
}

// Worker 1 pulls for its clock 1 when worker 0 has done none: one ahead.
TEST(PushLog, RefusesAnOrderBeyondItsBound) {
  const std::string ahead =
      "tessera-pushes version 1 workers 2 servers 1 staleness 1 steps 2\n"
      "server 0 pushes 4\n1 0 0\n1 1 1\n0 0 0\n0 1 3\n";
  EXPECT_EQ(refusal(ahead), "accepted");
  std::string bounded = ahead;
  bounded.replace(bounded.find("staleness 1"), 11, "staleness 0");
  EXPECT_EQ(refusal(bounded), "log: no run with a staleness of at most 0 can apply pushes in this order");
}

// Each server alone could have seen this; but at server 0 worker 2 pulled after worker 3's push, and at server 1 worker
// 3 pulled after worker 2's.
TEST(PushLog, RefusesOrdersThatWaitForEachOther) {
  const std::string head = "tessera-pushes version 1 workers 4 servers 2 staleness 9 steps 1\n";
  const std::string first = "server 0 pushes 2\n3 0 0\n2 0 1\n";
  EXPECT_EQ(refusal(head + first + "server 1 pushes 2\n3 0 0\n2 0 1\n"), "accepted");
  EXPECT_NE(refusal(head + first + "server 1 pushes 2\n2 0 0\n3 0 1\n"), "accepted");
  EXPECT_NE(refusal(head + first + "server 1 pushes 1\n2 0 0\n"), "accepted");
}

}  // namespace
}  // namespace tessera
