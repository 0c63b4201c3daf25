// The log that a rank writes of its calls, read by another rank while it goes on.
#include <gtest/gtest.h>

#include <cstdint>
#include <optional>
#include <thread>

#include "parallel/comm/call.h"

namespace tessera {
namespace {

TEST(CallLog, KeepsTheLastCalls) {
  CallLog log;
  EXPECT_EQ(log.made(), 0U);
  EXPECT_FALSE(log.find(0));
  EXPECT_FALSE(log.find(1));
  const Call scatter{
      .op = Op::scatter, .dtype = DType::bfloat16, .reduction = Reduction::max, .root = 5, .count = int64_t{1} << 40};
  EXPECT_EQ(log.add(scatter), 1U);
  EXPECT_TRUE(log.find(1)->matches(scatter));
  EXPECT_FALSE(log.find(1)->pieces);
  const UnevenPieces pieces{{1, 2}, {1, 5}}, others{{4, 5}, {2, 5}};  // two ranks' pieces, each of its own arrays
  log.add({.op = Op::all_to_all, .count = 3, .pieces = &pieces});
  EXPECT_TRUE(log.find(2)->matches({.op = Op::all_to_all, .count = 9, .pieces = &others}));
  EXPECT_FALSE(log.find(2)->matches({.op = Op::all_to_all, .count = 3}));
  for (int64_t i = 3; i <= 1000; ++i) log.add({.op = Op::broadcast, .count = i});
  EXPECT_EQ(log.made(), 1000U);
  EXPECT_FALSE(log.find(1));
  EXPECT_FALSE(log.find(1001));
  for (const int64_t i : {990, 1000}) EXPECT_EQ(log.find(static_cast<uint64_t>(i))->count, i);
}

TEST(CallLog, IsReadWhileItIsWritten) {
  CallLog log;
  constexpr int64_t kCalls = 20'000;
  std::jthread writer([&] {
    for (int64_t i = 1; i <= kCalls; ++i) log.add({.root = static_cast<int32_t>(i % 1000), .count = 3 * i});
  });
  int64_t found = 0;
  for (uint64_t made = 0; made < kCalls;) {
    made = log.made();
    const std::optional<Call> last = log.find(made);
    if (!last) continue;  // none yet, or written anew meanwhile
    ++found;
    ASSERT_EQ(last->count, 3 * static_cast<int64_t>(made));
    ASSERT_EQ(last->root, static_cast<int32_t>(made % 1000));
  }
  EXPECT_GT(found, 0);
}

}  // namespace
}  // namespace tessera
