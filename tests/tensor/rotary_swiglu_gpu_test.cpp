// Rotary positions and SwiGLU on a GPU beside the CPU's: sizes with and without whole parts of 16 bytes.
#include <gtest/gtest.h>

#include <string>
#include <utility>
#include <vector>

#include "tensor/ops/rotary.h"
#include "tensor/ops/swiglu.h"
#include "tests/support/gpu.h"
#include "tests/support/tensors.h"

namespace tessera {
namespace {

using test::drawn;
using test::same_bits;
using RotarySwigluGpu = test::OnGpu;

constexpr DType kFloating[] = {DType::float64, DType::float32, DType::bfloat16};

// The exponentials of float64 are the C library's on the CPU and CUDA's on a GPU, and a gradient may be near zero.
void expect_same(const Tensor& found, const Tensor& expected) {
  if (expected.dtype() != DType::float64)
    EXPECT_TRUE(same_bits(found, expected));
  else
    EXPECT_LT(test::farthest(found, expected), 1e-10);
}

TEST_F(RotarySwigluGpu, SwigluHasTheBitsOfTheCpu) {
  for (const DType dtype : kFloating)
    for (const Shape& shape :
         {Shape{3, 7}, Shape{2, 5, 8}, Shape{70, 24}, Shape{1, 1001}, Shape{9, 4096}, Shape{0, 8}}) {
      SCOPED_TRACE(std::string(name_of(dtype)) + " " + shape.str());
      const Tensor x = drawn(shape.with_last(2 * shape[shape.rank() - 1]), dtype, "x", -9, 9), there = x.to(arena),
                   dy = drawn(shape, dtype, "dy");
      expect_same(swiglu(there), swiglu(x));
      expect_same(swiglu_backward(dy.to(arena), there), swiglu_backward(dy, x));
    }
}

struct RotateCase {
  int64_t heads, d, more;  // numbers of a token behind those that turn
};

// In its own place and in another, where what does not turn is copied; there and back, positions of any order.
TEST_F(RotarySwigluGpu, RotateHasTheBitsOfTheCpu) {
  constexpr int64_t kTokens = 11;
  const std::vector<int32_t> any = {3, 40, 0, 7, 7, 1, 2, 39, 11, 12, 13};
  const Tensor positions = Tensor::of<int32_t>(any, {kTokens}, make_arena());
  std::vector<int32_t> of_each = any;
  of_each.insert(of_each.end(), any.rbegin(), any.rend());
  const Tensor each = Tensor::of<int32_t>(of_each, {2, kTokens}, make_arena());
  for (const DType dtype : kFloating)
    for (const RotateCase& c : {RotateCase{1, 2, 0}, RotateCase{3, 6, 5}, RotateCase{5, 16, 16}, RotateCase{2, 16, 3},
                                RotateCase{9, 64, 128}, RotateCase{0, 8, 8}})
      for (const bool back : {false, true}) {
        SCOPED_TRACE(std::string(name_of(dtype)) + " " + std::to_string(c.heads) + " heads of " + std::to_string(c.d));
        const DType wide = dtype == DType::float64 ? dtype : DType::float32;
        Turn turn{.heads = c.heads, .table = rotary_table({}, 41, c.d, wide, make_arena()), .first = 9, .back = back};
        for (int way = 0; way < 3; ++way) {
          if (way > 0) turn.positions = way == 1 ? positions : each;
          Turn there = turn;
          there.table = turn.table.to(arena);
          if (way > 0) there.positions = turn.positions.to(arena);
          const Tensor x = drawn({2, kTokens, c.heads * c.d + c.more}, dtype, "x"), kept = x.to(arena);
          const Tensor expected = rotate(x.clone(), turn);
          Tensor own = kept.clone();
          const void* const place = own.address();
          const Tensor turned = rotate(std::move(own), there), other = rotate(Tensor(kept), there);
          EXPECT_EQ(turned.address(), place);
          EXPECT_TRUE(same_bits(turned, expected) && same_bits(other, expected) && same_bits(kept, x));
        }
      }
}

}  // namespace
}  // namespace tessera
