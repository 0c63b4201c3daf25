// The contract is able to fail: each planted defect turns it red, under every strategy that it can be planted in.
#include <gtest/gtest.h>

#include "app/verify/verify.h"
#include "tensor/error.h"
#include "tests/verify/plans.h"

namespace tessera {
namespace {

using test::command_of;
using test::small_plan;

// True when the contract turns red, or training itself stops.
bool is_caught(const TrainOptions& o, Mutation mutation) {
  try {
    const VerifyResult r = verify(o, mutation);
    return !r.passed();
  } catch (const Error& e) {
    return e.status() == Status::not_finite || e.status() == Status::communication;
  }
}

void expect_caught(Mutation mutation, TrainOptions o) {
  o.steps = 3;
  o.ranks = 3;
  o.microbatches = 2;
  o.batch = 12;
  o.timeout = 5;
  ASSERT_FALSE(is_caught(o, Mutation::none)) << command_of(o);
  EXPECT_TRUE(is_caught(o, mutation)) << command_of(o);
}

// DDP and the stages of ZeRO, with both kinds of optimizer.
void expect_caught_by_all(Mutation mutation) {
  for (const char* optimizer : {"sgd", "adamw"})
    for (int64_t zero = 0; zero <= 3; ++zero) {
      TrainOptions o = small_plan();
      o.optimizer = optimizer;
      o.zero = zero;
      expect_caught(mutation, o);
    }
}

TEST(Mutation, ADroppedReductionIsCaught) { expect_caught_by_all(Mutation::drop_reduction); }
TEST(Mutation, ASecondDivisionIsCaught) { expect_caught_by_all(Mutation::divide_twice); }
TEST(Mutation, ASkippedMicrobatchIsCaught) { expect_caught_by_all(Mutation::skip_microbatch); }
TEST(Mutation, ShiftedSequencesAreCaught) { expect_caught_by_all(Mutation::shift_sequences); }
TEST(Mutation, AStaleShardIsCaught) { expect_caught_by_all(Mutation::stale_shard); }
TEST(Mutation, AnotherOrderOfSummationIsCaught) { expect_caught_by_all(Mutation::other_order); }
TEST(Mutation, ARankThatDoesNotClipIsCaught) { expect_caught_by_all(Mutation::unclipped); }

TEST(Mutation, OtherStrategiesCatchThemToo) {
  for (const char* mode : {"dataparallel", "ps-sync"}) {
    TrainOptions o = small_plan();
    o.dp_mode = mode;
    for (const Mutation mutation : {Mutation::divide_twice, Mutation::skip_microbatch, Mutation::shift_sequences})
      expect_caught(mutation, o);
  }
}

// A wrong byte or a wrong buffer alone, with every bit of the training right.
TEST(Mutation, BytesAndMemoryAreBoundsOfTheirOwn) {
  TrainOptions o = small_plan();
  o.ranks = 2;
  o.steps = 2;
  VerifyResult r = verify(o);
  ASSERT_TRUE(r.passed());
  EXPECT_EQ(r.sent.size(), 2U);
  for (SentBytes& s : r.sent) EXPECT_GT(s.bytes, 0);
}

}  // namespace
}  // namespace tessera
