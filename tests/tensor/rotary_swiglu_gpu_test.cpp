// Rotary positions and SwiGLU on a GPU beside the CPU's: sizes with and without whole parts of 16 bytes.

#include "tensor/ops/activations.h"
#include "tensor/ops/rotary.h"
#include "tests/support/gpu.h"
#include "tests/support/tensors.h"
#include "tests/support/two_libraries.h"

namespace tessera {
namespace {

using test::drawn;
using test::same_bits;
using RotarySwigluGpu = test::OnGpu;

// The bits are the CPU's, but for the exponentials of float64, which are the C library's there and CUDA's here.
TEST_F(RotarySwigluGpu, SwigluHasTheBitsOfTheCpu) {
  for (const DType dtype : test::floating(arena))
    for (const Shape& shape :
         {Shape{3, 7}, Shape{2, 5, 8}, Shape{70, 24}, Shape{1, 1001}, Shape{9, 4096}, Shape{0, 8}}) {
      SCOPED_TRACE(std::string(name_of(dtype)) + " " + shape.str());
      const DType wide = dtype == DType::float64 ? dtype : DType::float32;
      const Tensor x = drawn(shape.with_last(2 * shape[shape.rank() - 1]), dtype, "x", -9, 9), there = x.to(arena),
                   dy = drawn(shape, dtype, "dy");
      const std::vector<double> in = x.to(DType::float64).to_vector<double>(),
                                up = dy.to(DType::float64).to_vector<double>();
      const auto n = static_cast<size_t>(shape[shape.rank() - 1]);
      const auto known = [&](double v) { return test::Near{v, 0, test::epsilon_of(wide)}; };
      const auto silu = [&](size_t row, size_t j) { return test::near_op<Silu>(in[2 * row * n + j], wide); };
      test::expect_near(swiglu(there), swiglu(x), wide,
                        [&](size_t i) { return silu(i / n, i % n).f * known(in[(2 * (i / n) + 1) * n + i % n]); });
      test::expect_near(swiglu_backward(dy.to(arena), there), swiglu_backward(dy, x), wide, [&](size_t i) {
        const size_t row = i / (2 * n), j = i % (2 * n);
        if (j >= n) return known(up[row * n + j - n]) * silu(row, j - n).f;
        return known(up[row * n + j]) * known(in[(2 * row + 1) * n + j]) * silu(row, j).df;
      });
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
  for (const DType dtype : test::floating(arena))
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
