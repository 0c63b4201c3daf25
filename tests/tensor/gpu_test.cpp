// Tensors on a GPU: what is made there, copied there and back, and the elementwise ops, bit for bit those of the CPU.
#include "tests/support/gpu.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "tensor/ops/elementwise.h"
#include "tensor/random.h"
#include "tests/support/tensors.h"

namespace tessera {
namespace {

using TensorsGpu = test::OnGpu;

using test::drawn;
using test::farthest;
using test::same_bits;

constexpr DType kFloating[] = {DType::float64, DType::float32, DType::bfloat16};

TEST_F(TensorsGpu, GoThereAndBack) {
  for (const DType dtype : kFloating) {
    const Tensor here = drawn({5, 7, 3}, dtype, "a"), there = here.to(arena);
    EXPECT_EQ(there.device(), Device::cuda);
    EXPECT_TRUE(same_bits(there, here));
    EXPECT_TRUE(same_bits(here.transpose(0, 2).to(arena), here.transpose(0, 2)));
    EXPECT_TRUE(same_bits(there.transpose(0, 2), here.transpose(0, 2)));
    Tensor part = there.clone(), expected = here.clone();
    part.narrow(1, 2, 3).copy_from(here.narrow(1, 4, 3));
    expected.narrow(1, 2, 3).copy_from(here.narrow(1, 4, 3));
    EXPECT_TRUE(same_bits(part, expected));
  }
  EXPECT_EQ(arena->usage(Category::activations).live, 0);
}

TEST_F(TensorsGpu, ConvertFillAndBroadcast) {
  for (const DType from : kFloating)
    for (const DType to : {DType::float64, DType::float32, DType::bfloat16, DType::int32, DType::int64}) {
      const Tensor here = drawn({33, 5}, from, "b", -100, 100);
      EXPECT_TRUE(same_bits(here.to(arena).to(to), here.to(to))) << name_of(from) << " to " << name_of(to);
    }
  const Tensor row = drawn({9}, DType::float32, "row");
  Tensor here = Tensor::zeros({4, 9}, DType::bfloat16, make_arena()), there = here.to(arena);
  here.copy_from(row);
  there.copy_from(row.to(arena));
  EXPECT_TRUE(same_bits(there, here));
  there.fill(0.7);
  here.fill(0.7);
  EXPECT_TRUE(same_bits(there, here));
}

TEST_F(TensorsGpu, HostCodeMayNotReadThem) {
  const Tensor there = drawn({3}, DType::float32, "c").to(arena);
  EXPECT_THROW(there.data<float>(), Error);
  EXPECT_EQ(there.to_vector<float>().size(), 3u);
  EXPECT_THROW(drawn({3}, DType::float32, "c").device_data<float>(), Error);
}

// The derivatives of log and the double functions are the C library's on one side and CUDA's on the other.
template <class Op>
bool exact(DType dtype) {
  const std::string_view name = Op::name;
  return name != "log" && (dtype != DType::float64 ||
                           (name != "exp" && name != "tanh" && name != "sigmoid" && name != "silu" && name != "gelu"));
}

template <class Op>
void compare(const Tensor& there, const Tensor& here) {
  if (exact<Op>(here.dtype()))
    EXPECT_TRUE(same_bits(there, here)) << Op::name << " " << here.describe();
  else
    EXPECT_LT(farthest(there, here), here.dtype() == DType::float64 ? 1e-14 : 1e-2) << Op::name << here.describe();
}

TEST_F(TensorsGpu, UnaryOpsHaveTheBitsOfTheCpu) {
  UnaryOps::for_each([&]<class Op>(Op) {
    for (const DType dtype : kFloating)
      for (const Shape& shape : {Shape{1}, Shape{1031}, Shape{17, 9}}) {
        const Tensor x = drawn(shape, dtype, "x", Op::low, Op::high), dy = drawn(shape, dtype, "dy");
        compare<Op>(unary<Op>(x.to(arena)), unary<Op>(x));
        compare<Op>(unary_backward<Op>(dy.to(arena), x.to(arena)), unary_backward<Op>(dy, x));
        if (shape.rank() == 2) compare<Op>(unary<Op>(x.to(arena).transpose(0, 1)), unary<Op>(x.transpose(0, 1)));
      }
  });
}

TEST_F(TensorsGpu, BinaryOpsHaveTheBitsOfTheCpu) {
  BinaryOps::for_each([&]<class Op>(Op) {
    for (const DType dtype : kFloating) {
      const Tensor a = drawn({6, 1, 11}, dtype, "a", Op::low, Op::high);
      const Tensor b = drawn({4, 11}, dtype, "b", Op::low, Op::high);
      compare<Op>(binary<Op>(a.to(arena), b.to(arena)), binary<Op>(a, b));
    }
  });
}

// Pieces of wider arrays and rows for many, of which some can be read 16 bytes at a time and some cannot.
TEST_F(TensorsGpu, PiecesAndRepeatedRowsHaveTheBitsOfTheCpu) {
  const Philox random = Philox::named(5, "pieces");
  uint64_t drawn_so_far = 0;
  const auto one_of = [&](std::vector<int64_t> choices) {
    return choices[random.below(choices.size(), drawn_so_far++)];
  };
  for (int i = 0; i < 120; ++i) {
    const DType dtype = kFloating[i % 3];
    const int64_t batch = one_of({1, 2, 5}), rows = one_of({1, 3, 4}), columns = one_of({4, 7, 8, 16, 40}),
                  more = one_of({0, 1, 2, 8, 16}), first = one_of({0, more / 2, more});
    const Tensor a = drawn({batch, rows, columns + more}, dtype, "a"), b = drawn({rows, columns + more}, dtype, "b"),
                 c = drawn({columns}, dtype, "c");
    const auto piece = [&](const Tensor& t) { return t.narrow(t.shape().rank() - 1, first, columns); };
    SCOPED_TRACE(piece(a).describe() + " from " + std::to_string(first) + " of " + std::to_string(columns + more));
    const Tensor there = a.to(arena), beside = b.to(arena);
    EXPECT_TRUE(same_bits(binary<Add>(piece(there), piece(beside)), binary<Add>(piece(a), piece(b))));
    EXPECT_TRUE(same_bits(binary<Add>(piece(there), c.to(arena)), binary<Add>(piece(a), c)));
    Tensor into = a.clone(), into_there = there.clone();
    piece(into).copy_from(piece(b));
    piece(into_there).copy_from(piece(beside));
    EXPECT_TRUE(same_bits(into_there, into));
  }
}

TEST_F(TensorsGpu, SumsInPlaceHaveTheBitsOfTheCpu) {
  for (const DType dtype : kFloating)
    for (const DType other : kFloating) {
      Tensor x = drawn({3, 129}, dtype, "x"), there = x.to(arena);
      const Tensor y = drawn({129}, other, "y");
      add_(x, y, 0.3);
      add_(there, y.to(arena), 0.3);
      EXPECT_TRUE(same_bits(there, x));
      scale_(x, 1.7);
      scale_(there, 1.7);
      EXPECT_TRUE(same_bits(there, x));
    }
}

}  // namespace
}  // namespace tessera
