// A rank is called a straggler where it clearly is one.
#include <gtest/gtest.h>

#include "train/usage.h"

namespace tessera {
namespace {

TEST(Straggler, IsTheOneThatStandsOut) {
  const auto late = straggler_of({0.5, 12, 0.5, 1}, 10);  // three ranks waited 12 s in 10 s each
  ASSERT_TRUE(late);
  EXPECT_EQ(late->rank, 1);
  EXPECT_DOUBLE_EQ(late->share, 0.4);
  EXPECT_TRUE(straggler_of({0.1, 2.5}, 10));
}

TEST(Straggler, IsNobodyWhereNobodyDoes) {
  EXPECT_FALSE(straggler_of({0.5, 5.9, 0.5, 1}, 10));  // less than a fifth of 30 s
  EXPECT_FALSE(straggler_of({8, 12, 7, 8}, 10));       // not twice the others' mean
  EXPECT_FALSE(straggler_of({0, 1.5}, 1.9));           // too short a run to say
  EXPECT_FALSE(straggler_of({0}, 10));
  EXPECT_FALSE(straggler_of({}, 10));
}

}  // namespace
}  // namespace tessera
