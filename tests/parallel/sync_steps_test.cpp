// When replicas synchronize: one rule, with its counts.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <limits>

#include "parallel/data_strategy.h"

namespace tessera {
namespace {

TEST(SyncSteps, NextCountAndFirstAgreeWithDefinition) {
  constexpr int64_t kSteps = 30;
  for (int64_t every = 1; every <= 7; ++every)
    for (int64_t fragments = 1; fragments <= every; ++fragments)
      for (int64_t last : {0, 1, 4, 13, 29}) {
        const SyncSteps sync{.every = every, .fragments = fragments, .last = last};
        const auto is_due = [&](int64_t fragment, int64_t step) {
          return step == last || step % every == fragment * every / fragments;
        };
        int64_t first = std::numeric_limits<int64_t>::max();
        for (int64_t fragment = 0; fragment < fragments; ++fragment) {
          int64_t found = 0;
          for (int64_t step = 1; step <= kSteps; ++step) {
            EXPECT_EQ(sync.due(fragment, step), is_due(fragment, step)) << every << " " << fragments << " " << step;
            if (is_due(fragment, step)) first = std::min(first, step);
            found += is_due(fragment, step) ? 1 : 0;
            EXPECT_EQ(sync.count(fragment, step), found);
          }
        }
        EXPECT_EQ(sync.first(), first);
        for (int64_t step = 1; step <= kSteps; ++step)
          EXPECT_EQ(sync.all_due(step), step == last || (fragments == 1 && is_due(0, step)));
      }
}

}  // namespace
}  // namespace tessera
