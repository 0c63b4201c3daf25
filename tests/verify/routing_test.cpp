// The oracle takes the routing of a plan that splits sums: only what rounding explains.
#include <gtest/gtest.h>

#include "tests/verify/plans.h"
#include "verify/verify.h"

namespace tessera {
namespace {

// On the plan's ranks every token goes to the same two experts. What they then compute is right, and so are all
// gradients beside an oracle that follows them: the margin alone says that these were not the router's choices.
TEST(Routing, ChoicesThatAreNotTheRoutersAreNoRounding) {
  TrainOptions o = test::small_plan();
  say(o, "dtype=fp64 tp=2 experts=4 steps=2");
  VerifyHooks hooks;
  hooks.made = [](Trainer& t) {
    const int64_t context = t.whole_model().config.context;
    for (MixtureOfExperts* mixture : t.model().all<MixtureOfExperts>())
      mixture->set_choices([context](int64_t, int64_t sequences) {
        std::vector<int32_t> choices;
        for (int64_t i = 0; i < sequences * context; ++i) choices.insert(choices.end(), {0, 1});
        return Tensor::of<int32_t>(choices, {std::ssize(choices)}, make_arena());
      });
  };
  EXPECT_TRUE(verify(job_of(o)).passed());
  const VerifyResult r = verify(job_of(o), hooks);
  ASSERT_EQ(r.failures.size(), 1U);
  EXPECT_NE(r.failures[0].find("tokens went to another expert than on one rank"), std::string::npos) << r.failures[0];
  EXPECT_GT(r.strayed, 0);
}

}  // namespace
}  // namespace tessera
