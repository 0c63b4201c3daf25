// Synchronization: barriers, buffer reuse after calls, detection of mismatched calls, and prefetching.

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <string>
#include <thread>
#include <vector>

#include "parallel/comm/trace.h"
#include "parallel/zero.h"
#include "tests/parallel/arrays.h"
#include "tests/parallel/tiny_gpt.h"
#include "tests/support/errors.h"
#include "verify/defects/transports.h"

namespace tessera {
namespace {

using std::chrono::milliseconds;

// If a process is suspended between two clock readings, the timer counts only 0.25 s of the gap.
TEST(Collectives, TimeoutExcludesSuspendedTime) {
  AwakeTimer timer;
  EXPECT_LT(timer.seconds(), 0.1);
  for (int i = 0; i < 5; ++i) {
    std::this_thread::sleep_for(milliseconds(20));
    timer.seconds();
  }
  const double before = timer.seconds();
  EXPECT_GE(before, 0.1);
  std::this_thread::sleep_for(milliseconds(700));
  EXPECT_NEAR(timer.seconds() - before, 0.25, 1e-6);
}

TEST(Collectives, BarrierWaitsForLastRank) {
  for (const int ranks : {2, 3, 5})
    for (int late = 0; late < ranks; ++late) {
      std::atomic<int> come = 0;
      launch({.ranks = ranks, .threads_per_rank = 1, .timeout_s = 20}, [&](Communicator& world) {
        for (int round = 1; round <= 3; ++round) {
          if (world.rank() == late) std::this_thread::sleep_for(milliseconds(10));
          ++come;
          world.barrier();
          EXPECT_GE(come, round * ranks) << "rank " << late << " of " << ranks << " was late";
        }
      });
    }
}

// When a call returns, its arrays belong to its rank again: they are overwritten while slower ranks may still be in the
// call. Uses more ranks than cores, and arrays long enough for preemption.
TEST(Collectives, CallersMayOverwriteArraysAfterCall) {
  constexpr int kRanks = 4;
  constexpr int64_t kElements = 60000;
  for (const Algorithm algorithm : test::kByMessages)
    launch({.ranks = kRanks, .threads_per_rank = 1, .timeout_s = 60, .algorithm = algorithm}, [&](Communicator& world) {
      const ArenaPtr arena = world.make_arena();
      const auto make = [&](int64_t n) { return Tensor::empty({n}, DType::float32, arena); };
      const Tensor full = make(kElements), other = make(kElements), part = make(kElements / kRanks);
      const int me = world.rank();
      const Philox random = Philox::named(static_cast<uint64_t>(me), "waits");
      const auto expect_all = [&](const Tensor& x, float value, const char* what) {
        const float* const p = x.data<float>();
        const bool right = std::all_of(p, p + x.numel(), [&](float v) { return v == value; });
        EXPECT_TRUE(right) << what << " on rank " << me;
      };
      for (uint64_t round = 0; round < 30; ++round) {
        const auto base = static_cast<float>(10 * round);
        const auto pause = [&] {
          if (random.below(4, round) == 0) std::this_thread::sleep_for(milliseconds(1));
        };
        Tensor(full).fill(base + static_cast<float>(me));
        world.all_reduce(full);
        expect_all(full, base * kRanks + 6, "all_reduce");
        Tensor(full).fill(base + static_cast<float>(me));
        pause();
        world.reduce_scatter(full, part);
        Tensor(full).fill(-1);
        expect_all(part, base * kRanks + 6, "reduce_scatter");
        Tensor(part).fill(base);
        world.all_gather(part, full);
        Tensor(part).fill(-1);
        expect_all(full, base, "all_gather");
        pause();
        Tensor(full).fill(base + static_cast<float>(me));
        world.all_to_all(full, other);
        Tensor(full).fill(-1);
        for (int r = 0; r < kRanks; ++r)
          expect_all(other.narrow(0, r * kElements / kRanks, kElements / kRanks), base + static_cast<float>(r),
                     "all_to_all");
        const int root = static_cast<int>(round) % kRanks;
        Tensor(full).fill(base + static_cast<float>(me));
        world.broadcast(full, root);
        expect_all(full, base + static_cast<float>(root), "broadcast");
        Tensor(full).fill(base + static_cast<float>(me));
        world.reduce(full, root);
        if (me == root) expect_all(full, base * kRanks + 6, "reduce");
        Tensor(full).fill(-1);
      }
    });
}

// One of several ranks requests a different size, dtype, operation, root or reduction; the others agree.
TEST(Collectives, ErrorsNameMismatchedRankAtAnyPosition) {
  for (const int ranks : {3, 4, 5})
    for (int odd = 0; odd < ranks; ++odd)
      for (const auto& [kind, ask] : test::kOddCalls) {
        const std::string what = std::string(kind) + " on rank " + std::to_string(odd) + " of " + std::to_string(ranks);
        try {
          launch({.ranks = ranks, .threads_per_rank = 1, .timeout_s = 20}, [&, &ask = ask](Communicator& world) {
            const Tensor x = Tensor::zeros({24}, DType::float32, make_arena());
            world.barrier();
            ask(world, x, world.rank() == odd);
          });
          ADD_FAILURE() << "accepted: another " << what;
        } catch (const Error& e) {
          EXPECT_FALSE(has(e.what(), "did not arrive within")) << what;
        }
      }
}

// Computation times of blocks, in seconds, and concurrent communication.
struct Watched {
  std::vector<double> begins, ends, backwards;  // forward passes; starts of backward passes, last block first
  std::vector<TraceEvent> gathers, sums;        // of full blocks
};

// The second step of a ZeRO stage, after the unit order is recorded, on rank 1 of two. Rank 0 is late everywhere, so
// communication takes longer than computation on rank 1.
Watched watch_zero(int stage, double late) {
  Watched out;
  std::vector<Fault> always_late;
  for (int64_t call = 0; call < 500; ++call) always_late.push_back({.call = call, .seconds = late});
  launch({.ranks = 2, .threads_per_rank = 1, .timeout_s = 60, .around = with_faults({{0, always_late}})},
         [&](Communicator& world) {
           const ArenaPtr arena = make_arena();
           ModelConfig config = test::tiny_gpt(0);
           config.layers = 4;
           Decoder model(config);
           Trace trace;
           Watched seen;
           for (DecoderBlock* block : model.blocks)
             block->wrap([&](const Module::Inner& inner, const Var& x) {
               seen.begins.push_back(trace.now());
               Var y = inner(x);
               seen.ends.push_back(trace.now());
               return on_backward(std::move(y), [&] { seen.backwards.push_back(trace.now()); });
             });
           Zero zero(model, world, arena, {.seed = 5}, {.stage = stage});
           for (int64_t step = 0; step < 2; ++step) {
             seen = {};
             if (step == 1) world.set_trace(&trace);
             zero.begin_step();
             zero.begin_gradients(0);
             const test::Sequences s = test::sequences(config, step, 2 * world.rank(), 2, arena);
             test::learn(model, s, {.seed = 5, .step = step, .first_sequence = 2 * world.rank(), .training = true}, 40);
             zero.end_gradients(0);
             zero.reduce_gradients();
           }
           world.set_trace(nullptr);
           int64_t block = 0;
           for (const Module::Unit& unit : model.layout())
             if (unit.name == "blocks.1") block = shard_size(unit.size, 2) * 2 * 4;
           for (const TraceEvent& e : trace.events())
             if (e.bytes == block) (e.what == "all_gather" ? seen.gathers : seen.sums).push_back(e);
           if (world.rank() == 1) out = seen;
         });
  return out;
}

// On a busy machine computation may take longer than the other rank's delay; then the test retries with longer delays.
// A rank that blocks instead of computing fails with any delay.
template <class F>
Watched watch_zero_until(int stage, const F& overlaps) {
  for (const double late : {0.004, 0.02, 0.1})
    if (Watched w = watch_zero(stage, late); overlaps(w)) return w;
  return watch_zero(stage, 0.5);
}

TEST(ZeroOverlap, ParameterPrefetchOverlapsComputation) {
  const Watched w = watch_zero_until(3, [](const Watched& x) {
    if (x.gathers.size() < 2 * x.begins.size() - 1 || x.backwards.size() < x.begins.size()) return true;
    const size_t back = x.gathers.size() - x.begins.size();
    for (size_t i = 1; i < x.begins.size(); ++i)
      if (x.gathers[i].end < x.begins[i - 1] || x.gathers[back + i].end < x.backwards[i - 1]) return false;
    return true;
  });
  const size_t blocks = w.begins.size();
  ASSERT_EQ(blocks, 4U);
  ASSERT_EQ(w.backwards.size(), blocks);
  ASSERT_GE(w.gathers.size(), 2 * blocks - 1);  // the last block may stay gathered between the passes
  for (size_t i = 0; i + 1 < blocks; ++i) {
    EXPECT_LT(w.gathers[i + 1].requested, w.begins[i])
        << "block " << i + 1 << " is asked for before " << i << " computes";
    EXPECT_GT(w.gathers[i + 1].end, w.begins[i]) << "and not waited for until it is needed";
    EXPECT_LT(w.gathers[i + 1].end, w.begins[i + 1]);
  }
  const size_t back = w.gathers.size() - blocks;  // start of the backward pass; the first block's gather is last
  for (size_t i = 1; i < blocks; ++i) {
    EXPECT_LT(w.gathers[back + i].requested, w.backwards[i - 1]) << i;
    EXPECT_GT(w.gathers[back + i].end, w.backwards[i - 1]) << i;
  }
}

TEST(ZeroOverlap, GradientReductionOverlapsComputation) {
  for (const int stage : {2, 3}) {
    const Watched w = watch_zero_until(stage, [](const Watched& x) {
      for (size_t i = 0; i + 1 < x.sums.size(); ++i)
        if (x.sums[i].end < x.backwards[i + 1]) return false;
      return true;
    });
    ASSERT_EQ(w.sums.size(), 4U) << stage;
    ASSERT_EQ(w.backwards.size(), 4U);
    for (size_t i = 0; i + 1 < 4; ++i) {
      EXPECT_GT(w.sums[i].requested, w.backwards[i]) << stage;
      EXPECT_LT(w.sums[i].requested, w.backwards[i + 1]) << "the sum waited for the next block's gradients";
      EXPECT_GT(w.sums[i].end, w.backwards[i + 1]) << "the next block's gradients waited for the sum";
    }
  }
}

}  // namespace
}  // namespace tessera
