// Expert parallelism: overlap of the row exchange, bitwise results, and capacity.
#include "parallel/experts/expert_parallel.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "parallel/comm/launch.h"
#include "tests/support/draw.h"
#include "tests/support/tensors.h"
#include "verify/defects/transports.h"

namespace tessera {
namespace {

constexpr int64_t kChannels = 4;
constexpr auto kTimeout = std::chrono::seconds(5);

// Waits until the condition holds; false after a timeout.
bool becomes_true(const std::function<bool()>& condition) {
  const auto end = std::chrono::steady_clock::now() + kTimeout;
  while (!condition() && std::chrono::steady_clock::now() < end) std::this_thread::yield();
  return condition();
}

// The progress of two ranks: rank 0's shared expert, and the messages sent by each: rows to the experts and back, the
// gradients of results, and those of rows.
struct Progress {
  std::atomic<int> shared = 0;  // 1: the forward pass has begun; 2: the backward pass has begun
  std::array<std::atomic<int>, 2> sent = {};
};

// Rank 1 delays its rows until the shared expert of rank 0 has begun, and their gradients until its backward pass has.
class LateTransport final : public AroundTransport {
 public:
  LateTransport(std::unique_ptr<Transport> inner, Progress& progress)
      : AroundTransport(std::move(inner)), progress_(progress) {}
  void send(int to, int tag, const std::byte* data, int64_t bytes) override {
    const int number = ++progress_.sent[static_cast<size_t>(rank())];
    if (rank() == 1 && number % 3 == 1) {
      EXPECT_TRUE(becomes_true([&] { return progress_.shared >= (number == 1 ? 1 : 2); })) << number;
    }
    inner().send(to, tag, data, bytes);
  }

 protected:
  std::unique_ptr<Transport> around(std::unique_ptr<Transport> made) const override {
    return std::make_unique<LateTransport>(std::move(made), progress_);
  }

 private:
  Progress& progress_;
};

MixtureOfExperts::Options options(int64_t experts, int64_t shared) {
  return {.hidden = 6, .mlp = {.activation = kSwiglu}, .experts = {.count = experts, .shared = shared}};
}

// Two experts, one per rank, each chosen by every token. Rank 1 sends its rows only after the shared expert of rank 0
// has begun, and rank 0 must meanwhile send its own. The same holds for the backward pass.
TEST(ExpertParallel, SharedExpertOverlapsDispatch) {
  Progress progress;
  const LaunchOptions how{.ranks = 2, .threads_per_rank = 1, .timeout_s = 20, .around = [&](auto transport) {
                            return std::make_unique<LateTransport>(std::move(transport), progress);
                          }};
  launch(how, [&](Communicator& world) {
    MixtureOfExperts layer(kChannels, options(2, 1));
    shard_experts(layer, world);
    layer.materialize(1, make_arena(), DType::float32, DType::float32);
    layer.set_step({.training = true});
    layer.clear_gradients();
    const auto begins = [&](int pass) {
      if (world.rank() != 0) return;
      progress.shared = pass;
      EXPECT_TRUE(becomes_true([&] { return progress.sent[0] >= (pass == 1 ? 1 : 4); })) << pass;
    };
    auto* const shared = dynamic_cast<GatedMlp*>(layer.all<GatedMlp>().at(0));
    shared->wrap([&](const Module::Inner& inner, const Var& x) {
      begins(1);
      const Var y = inner(x);
      return record_one("begins", y.value().clone(), {y.edge()}, [&](Grads& g) {
        begins(2);
        g.set(0, g.take_output());
      });
    });
    const Var x(test::random_tensor({1, 5, kChannels}, DType::float32, "x"), true);
    const Tensor dy = test::random_tensor({1, 5, kChannels}, DType::float32, "dy");
    backward(layer(x), {.seed = dy});
  });
  EXPECT_EQ(progress.sent[0], 4);
  EXPECT_EQ(progress.sent[1], 4);
}

// Outputs and gradients of one rank's tokens through a layer whose experts are sharded over `ep`; null: all are local.
std::vector<Tensor> pass(int rank, Communicator* ep, int64_t experts, int64_t shared, bool again) {
  MixtureOfExperts layer(kChannels, options(experts, shared));
  if (ep) shard_experts(layer, *ep);
  layer.materialize(3, make_arena(), DType::float32, DType::float32);
  layer.set_step({.training = true});
  layer.clear_gradients();
  const std::string name = "rank " + std::to_string(rank);
  const Shape shape{2, 3 + rank, kChannels};
  const Var x(test::random_tensor(shape, DType::float32, name), true);
  const auto run = [&](const std::vector<Var>& in) { return layer(in[0]); };
  const Var y = again ? checkpoint(run, {x}, false) : run({x});
  std::vector<Tensor> out{y.value()};
  backward(y, {.seed = test::random_tensor(shape, DType::float32, name + "'s dy")});
  out.push_back(x.grad());
  for (const Parameter* p : layer.parameters())
    if (!p->is_expert) out.push_back(p->var.grad());
  return out;
}

TEST(ExpertParallel, MatchesOneRankBitwise) {
  for (const int ranks : {2, 3})
    for (const int64_t shared : {0, 2})
      for (const bool again : {false, true})
        launch({.ranks = ranks, .threads_per_rank = 1, .timeout_s = 20}, [&](Communicator& world) {
          const std::vector<Tensor> found = pass(world.rank(), &world, 2 * ranks, shared, again),
                                    alone = pass(world.rank(), nullptr, 2 * ranks, shared, again);
          ASSERT_EQ(found.size(), alone.size());
          for (size_t i = 0; i < found.size(); ++i)
            EXPECT_TRUE(test::bitwise_equal(found[i], alone[i]))
                << ranks << " ranks, " << shared << " shared, tensor " << i;
        });
}

// Compared with a count over the full sequence, in order.
TEST(ExpertCapacity, CountsEarlierChoicesOverFullSequence) {
  for (uint64_t trial = 0; trial < test::plans(20); ++trial) {
    test::Sampler d("capacity", trial);
    const int ranks = static_cast<int>(d.between(2, 4));
    const SequencePartition balance = d.of({SequencePartition::zigzag, SequencePartition::contiguous});
    const int64_t sequences = d.between(1, 3), here = 2 * d.between(1, 4), k = d.between(1, 3),
                  experts = d.between(k, 5);
    const int64_t context = here * ranks;
    std::vector<int32_t> chosen, before;  // (sequences, context, k)
    for (int64_t i = 0; i < sequences * context * k; ++i)
      chosen.push_back(static_cast<int32_t>(d.between(0, experts - 1)));
    before.resize(chosen.size());
    for (int64_t s = 0; s < sequences; ++s) {
      std::vector<int32_t> seen(static_cast<size_t>(experts));
      for (int64_t j = 0; j < k; ++j)
        for (int64_t t = 0; t < context; ++t) {
          const auto at = static_cast<size_t>((s * context + t) * k + j);
          before[at] = seen[static_cast<size_t>(chosen[at])]++;
        }
    }
    launch({.ranks = ranks, .threads_per_rank = 1, .timeout_s = 20}, [&](Communicator& world) {
      const auto own = [&](const std::vector<int32_t>& full) {
        std::vector<int32_t> out;
        for (int64_t s = 0; s < sequences; ++s)
          for (const int64_t t : context_positions(context, ranks, world.rank(), balance))
            for (int64_t j = 0; j < k; ++j) out.push_back(full[static_cast<size_t>((s * context + t) * k + j)]);
        return out;
      };
      const Tensor mine = Tensor::of<int32_t>(own(chosen), {sequences * here, k}, make_arena());
      EXPECT_EQ(earlier_choices(mine, sequences, experts, world, balance).to_vector<int32_t>(), own(before)) << trial;
    });
  }
}

}  // namespace
}  // namespace tessera
