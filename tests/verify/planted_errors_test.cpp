// Errors of a known size in a run: the smallest bit where bits must be equal, and either side of the bound elsewhere.

#include "tests/support/one_thread.h"
#include "tests/verify/plans.h"
#include "verify/verify.h"

namespace tessera {
namespace {

using test::command_of;
using test::small_plan;
using PlantedErrors = test::OneThread;

void flip_lowest_bit(const Tensor& t, int64_t at) { t.raw()[at * size_of(t.dtype())] ^= std::byte{1}; }

// Tensors that a plan keeps, by the names of the kinds: the first element of each unit's first parameter that is here.
void flip(const std::vector<FlatUnit>& units, const std::function<Tensor(const FlatUnit&)>& of) {
  for (const FlatUnit& unit : units)
    for (const Slot& slot : unit.slots)
      if (slot.begin >= 0 && slot.begin < unit.values.numel() && !slot.parameter->is_copy())
        return flip_lowest_bit(of(unit), slot.begin);
}

using Spoil = std::function<void(Trainer&)>;

VerifyHooks after_update(const Spoil& spoil) {
  VerifyHooks hooks;
  hooks.update = [=](Trainer& t, const StepReport& report) {
    t.update(report);
    spoil(t);
  };
  return hooks;
}
VerifyHooks after_sums(const Spoil& spoil) {
  VerifyHooks hooks;
  hooks.summed = spoil;
  return hooks;
}

void expect_bits(const TrainOptions& o) {
  const Job job = job_of(o);
  const auto passes = [&](const VerifyHooks& hooks) {
    const VerifyResult r = verify(job, hooks);
    EXPECT_EQ(r.bitwise, r.passed() && r.exact) << command_of(o);
    return r.passed();
  };
  ASSERT_TRUE(verify(job).passed()) << command_of(o);
  const auto of_values = [](const FlatUnit& unit) { return unit.values; };
  EXPECT_FALSE(passes(after_update([&](Trainer& t) { flip(t.strategy().residents(), of_values); }))) << command_of(o);
  for (const std::string kind : {"m", "v", "master"}) {
    if (kind == "master" && text_of(o.optim.dtype) != "bf16") continue;
    EXPECT_FALSE(passes(after_update([&](Trainer& t) {
      flip(t.strategy().shards(), [&](const FlatUnit& unit) {
        for (const NamedTensor& state : t.optimizer().state())
          if (state.name == unit.name + "." + kind) return state.tensor;
        return Tensor();
      });
    }))) << kind
         << " of " << command_of(o);
  }
  if (o.plan.tp > 1) return;  // gradients are held to a bound there
  EXPECT_FALSE(passes(after_sums([](Trainer& t) {
    flip(t.strategy().shards(), [](const FlatUnit& unit) { return unit.grads; });
  }))) << command_of(o);
}

TrainOptions one_step(const char* dtype) {
  TrainOptions o = small_plan();
  o["dtype"] = dtype;
  say(o, "steps=1 batch=4");
  return o;
}

TEST_F(PlantedErrors, OneBitIsSeenWhereBitsAreEqual) {
  for (const char* dtype : {"fp64", "fp32", "bf16"})
    for (const int64_t zero : {0, 2, 3}) {
      TrainOptions o = one_step(dtype);
      o.ranks = 2;
      o["zero"] = zero;
      expect_bits(o);
    }
}

TEST_F(PlantedErrors, OneBitOfParametersAndStateIsSeenWhereSumsAreSplit) {
  for (const char* dtype : {"fp32", "bf16"}) {
    TrainOptions o = one_step(dtype);
    o["tp"] = 2;
    o.ranks = 2;
    expect_bits(o);
  }
}

// The gradient of a parameter that all ranks have, too large by a share of itself.
VerifyHooks too_large_by(double share) {
  return after_sums([=](Trainer& t) {
    for (const FlatUnit& unit : t.strategy().shards())
      for (const Slot& slot : unit.slots)
        if (slot.parameter->shard.is_whole() && slot.parameter->vanishes.end == 0) {
          Tensor part = unit.grads.narrow(0, slot.begin, slot.size);
          return scale_(part, 1 + share);
        }
  });
}

TEST_F(PlantedErrors, AGradientMayBeOffByTheBoundAndNoMore) {
  for (const char* dtype : {"fp64", "fp32", "bf16"})
    for (const bool context : {false, true}) {
      TrainOptions o = one_step(dtype);
      o[context ? "cp" : "tp"] = 2;
      o.ranks = 2;
      const Job job = job_of(o);
      const VerifyResult right = verify(job);
      ASSERT_TRUE(right.passed()) << command_of(o);
      const double unit = text_of(o.optim.dtype) == "fp64"
                              ? 1e-12
                              : 256 * 1.0609 * std::ldexp(1.0, text_of(o.optim.dtype) == "bf16" ? -8 : -24);
      EXPECT_LE(right.bound, 1.001 * unit);
      const double own = right.grad_max_rel;  // rounding's
      ASSERT_LT(own, 0.5 * right.bound) << command_of(o);
      EXPECT_TRUE(verify(job, too_large_by(right.bound - 1.01 * own)).passed()) << command_of(o);
      const VerifyResult wrong = verify(job, too_large_by(right.bound + 1.01 * own + 0.01 * right.bound));
      EXPECT_FALSE(wrong.passed()) << command_of(o);
      EXPECT_LT(wrong.grad_max_rel, 2 * right.bound);
    }
}

}  // namespace
}  // namespace tessera
