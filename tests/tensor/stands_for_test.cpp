// The memory that ops take from an arena of the host that stands for a GPU, beside what they take from it for itself.
#include <gtest/gtest.h>

#include "tensor/cpu/loops.h"
#include "tensor/ops/attention/attention.h"
#include "tensor/ops/cross_entropy.h"
#include "tensor/ops/experts/experts.h"

namespace tessera {
namespace {

constexpr int64_t kRows = 64, kIn = 32, kOut = 48;

// Bytes that `op` takes on `device` at its peak, of operands that are there before.
template <class F>
int64_t taken(Device device, const F& op) {
  const cpu::Idle nothing_is_computed;
  const ArenaPtr arena = make_arena();
  arena->local<StandsFor>().device = device;
  const auto matrix = [&](int64_t rows, int64_t columns, DType dtype = DType::bfloat16) {
    return Tensor::empty({rows, columns}, dtype, arena);
  };
  const Tensor x = matrix(kRows, kIn), w = matrix(kOut, kIn), dy = matrix(kRows, kOut),
               dw = matrix(kOut, kIn, DType::float32);
  const int64_t before = arena->total().live;
  arena->reset_peaks();
  op(x, w, dy, dw);
  return arena->total().peak - before;
}

TEST(StandsFor, ProductsOfAGpuTakeTheirResultAlone) {
  const auto product = [](const Tensor& x, const Tensor& w, const Tensor&, const Tensor&) {
    WeightPacks packs;
    linear(x, w, {}, &packs);
  };
  EXPECT_EQ(taken(Device::cuda, product), 2 * kRows * kOut);
  EXPECT_GE(taken(Device::cpu, product), 2 * kRows * kOut + 2 * kIn * kOut);  // and a packed weight
}

TEST(StandsFor, ProductsOfExpertsOfAGpuTakeTheirResultAlone) {
  const auto product = [](const Tensor& x, const Tensor& w, const Tensor&, const Tensor&) {
    linear_rows(x, {{w, kRows / 2}, {w, kRows / 2}});
  };
  const auto gradient = [](const Tensor& x, const Tensor&, const Tensor& dy, const Tensor& dw) {
    linear_rows_weight_grads({{dw, kRows}}, dy, x);
  };
  EXPECT_EQ(taken(Device::cuda, product), 2 * kRows * kOut);
  EXPECT_EQ(taken(Device::cuda, gradient), 0);
  EXPECT_GT(taken(Device::cpu, product), 2 * kRows * kOut);  // and operands in float32
  EXPECT_GT(taken(Device::cpu, gradient), 0);
}

TEST(StandsFor, AttentionOfAGpuTakesItsResultAlone) {
  const auto attend = [](const Tensor& x, const Tensor&, const Tensor&, const Tensor&) {
    Tensor q = x.reshape({1, kRows, 1, kIn});
    const Attended forward = attention(q, q, q, {});
    attention_backward(q, q, q, q, forward, {}, q, q, q);
  };
  const int64_t result = 2 * kRows * kIn + 4 * kRows;  // with a log of a sum for each row
  EXPECT_EQ(taken(Device::cuda, attend), result);
  EXPECT_GT(taken(Device::cpu, attend), result);  // and tiles of threads
}

TEST(StandsFor, LogitsOfAGpuAreOneBlock) {
  const auto blocks = [](Device device) {
    bool one = false;
    taken(device, [&](const Tensor& x, const Tensor& w, const Tensor&, const Tensor&) {
      one = row_blocks(x, w, 32 * kOut).one();
    });
    return one;
  };
  EXPECT_TRUE(blocks(Device::cuda));
  EXPECT_FALSE(blocks(Device::cpu));
}

}  // namespace
}  // namespace tessera
