// How many kernels a layer of experts launches: as many for each number of experts.

#include <cstdlib>

#include "nn/experts/experts.h"
#include "tests/cuda_emulator/streams.h"
#include "tests/support/gpu.h"
#include "tests/support/tensors.h"

namespace tessera {
namespace {

using Launches = test::OnGpu;

constexpr int64_t kChannels = 8, kHidden = 12;

// Counts the launches of a forward pass, and of its backward pass.
std::pair<uint64_t, uint64_t> of_a_pass(MixtureOfExperts& layer, const Var& x) {
  const uint64_t before = emulator::launches();
  const Var y = layer(x);
  const uint64_t between = emulator::launches();
  backward(y, {.seed = x.value()});
  return {between - before, emulator::launches() - between};
}

TEST_F(Launches, OfALayerDoNotDependOnTheNumberOfExperts) {
  for (const bool gated : {false, true})
    for (const DType dtype : {DType::float32, DType::bfloat16}) {
      std::vector<std::pair<uint64_t, uint64_t>> first, second;  // gradients are written, or added
      for (const int64_t experts : {4, 64, 192}) {
        MixtureOfExperts layer(kChannels, {.hidden = kHidden, .gated = gated, .experts = {.count = experts}});
        layer.materialize(3, arena, dtype, DType::float32);
        layer.set_step({.training = true});
        layer.clear_gradients();
        const Var x(test::drawn({2, 20, kChannels}, dtype, "x").to(arena), true);
        of_a_pass(layer, x);  // may time products that it meets for the first time
        layer.clear_gradients();
        first.push_back(of_a_pass(layer, x));
        second.push_back(of_a_pass(layer, x));
      }
      for (const auto* const passes : {&first, &second})
        for (const auto& pass : *passes) EXPECT_EQ(pass, passes->front());
    }
}

// One for as many groups as its arguments hold, if there are rows or, of gradients, weights.
TEST_F(Launches, OfGroupsOfRows) {
  const Tensor x = test::drawn({40, kChannels}, DType::float32, "x").to(arena),
               dy = test::drawn({40, kHidden}, DType::float32, "dy").to(arena),
               w = test::drawn({kHidden, kChannels}, DType::float32, "w").to(arena);
  for (const auto& [count, expected] : {std::pair<size_t, uint64_t>{1, 1}, {192, 1}, {193, 2}, {500, 3}}) {
    SCOPED_TRACE(count);
    std::vector<RowsGroup> groups(count, {.w = w}), gradients(count);
    for (RowsGroup& g : gradients) g.w = w.make(w.shape());
    for (std::vector<RowsGroup>* const all : {&groups, &gradients}) {
      all->front().rows += 17;
      all->at(count / 2).rows += 20;
      all->back().rows += 3;
    }
    uint64_t before = emulator::launches();
    const auto launches = [&] {
      const uint64_t now = emulator::launches();
      return now - std::exchange(before, now);
    };
    linear_rows(x, groups);
    EXPECT_EQ(launches(), expected);
    linear_rows_input_grad(dy, groups);
    EXPECT_EQ(launches(), expected);
    linear_rows_weight_grads(gradients, dy, x);
    EXPECT_EQ(launches(), expected);
  }
}

// A library without an algorithm for odd rows gets copies of what is odd only: of the weight and the result (fill,
// copy; copy out), and not of x.
TEST_F(Launches, OfAPaddedProduct) {
  const auto of_rows = [&](int64_t rows) {
    const Tensor x = test::drawn({rows, 16}, DType::bfloat16, "x").to(arena),
                 w = test::drawn({21, 16}, DType::bfloat16, "w").to(arena);
    const uint64_t before = emulator::launches();
    linear(x, w, Tensor());
    return emulator::launches() - before;
  };
  setenv("TESSERA_EMULATED_ALIGNMENT", "16", 1);
  const uint64_t even = of_rows(8), odd = of_rows(9);
  unsetenv("TESSERA_EMULATED_ALIGNMENT");
  EXPECT_EQ(even, 4U);
  EXPECT_EQ(odd, 6U);
}

}  // namespace
}  // namespace tessera
