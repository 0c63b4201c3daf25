// Tensors on a GPU: what is made there, copied there and back, and the elementwise ops, bit for bit those of the CPU.
#include "tests/support/gpu.h"

#include "tensor/ops/elementwise.h"
#include "tensor/ops/reduce.h"
#include "tests/support/errors.h"
#include "tests/support/tensors.h"
#include "tests/support/two_libraries.h"

namespace tessera {
namespace {

using TensorsGpu = test::OnGpu;

using test::drawn;
using test::same_bits;

TEST_F(TensorsGpu, GoThereAndBack) {
  for (const DType dtype : test::floating(arena)) {
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
  for (const DType from : test::floating(arena))
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

// The bits are the CPU's, but for functions of two libraries: those of float64, and log.
TEST_F(TensorsGpu, UnaryOpsHaveTheBitsOfTheCpu) {
  UnaryOps::for_each([&]<class Op>(Op) {
    for (const DType dtype : test::floating(arena))
      for (const Shape& shape : {Shape{1}, Shape{1031}, Shape{17, 9}}) {
        SCOPED_TRACE(std::string(Op::name) + " " + std::string(name_of(dtype)) + " " + shape.str());
        const DType wide = dtype == DType::float64 ? dtype : DType::float32;
        const Tensor x = drawn(shape, dtype, "x", Op::low, Op::high), dy = drawn(shape, dtype, "dy");
        const std::vector<double> at = x.to(DType::float64).to_vector<double>();
        const Tensor there = unary<Op>(x.to(arena));
        test::expect_near(there, unary<Op>(x), wide, [&](size_t i) { return test::near_op<Op>(at[i], wide).f; });
        test::expect_near_gradient<Op>(unary_backward<Op>(dy.to(arena), x.to(arena)), unary_backward<Op>(dy, x), dy, x);
        const Tensor turned = unary<Op>(x.to(arena).transpose(0, shape.rank() - 1));
        EXPECT_TRUE(same_bits(turned, there.transpose(0, shape.rank() - 1)));
      }
  });
}

// A build may leave the kernels of float64 out. Copies, sums and the addition of losses stay.
TEST_F(TensorsGpu, WithoutKernelsOfFloat64OpsSayWhy) {
  const Tensor x = drawn({40}, DType::float64, "x"), there = x.to(arena);
  EXPECT_TRUE(same_bits(sum(there), sum(x)));
  EXPECT_TRUE(same_bits(binary<Add>(there, there), binary<Add>(x, x)));
  EXPECT_TRUE(same_bits(there.to(DType::bfloat16), x.to(DType::bfloat16)));
  if (test::no_float64().empty()) {
    EXPECT_TRUE(same_bits(unary<Relu>(there), unary<Relu>(x)));
    return;
  }
  EXPECT_EQ(error_of([&] { unary<Relu>(there); }),
            "[relu] dtype is float64; expected float32 or bfloat16, since this program was built without kernels of "
            "float64 (-DTESSERA_FLOAT64_KERNELS=ON)");
}

// Where 1 - tanh^2 x is small, a difference of few units in the last place of tanh is a hundred times as many of it.
TEST(TwoLibraries, MayDifferAsTheirErrorsDo) {
  const auto relative = [](const test::Near& n) { return n.apart / std::abs(n.value); };
  const test::NearOp tanh = test::near_op<Tanh>(3, DType::float64), exact = test::near_op<Tanh>(3, DType::float32);
  EXPECT_NEAR(relative(tanh.f), 3.5 * 0x1p-52, 1e-18);
  EXPECT_GT(relative(tanh.df), 1.6e-14);  // an H100 was 1.56e-14 from the CPU here
  EXPECT_LT(relative(tanh.df), 3e-13);
  EXPECT_EQ(exact.f.apart + exact.df.apart + test::near_op<Relu>(2, DType::float64).df.apart, 0);
  EXPECT_DOUBLE_EQ(test::near_op<Gelu>(1, DType::float64).f.value, Gelu::f(1.0));
  EXPECT_NEAR(test::near_op<Gelu>(1, DType::float64).df.value, Gelu::df(1.0), 1e-15);
  EXPECT_NEAR(test::near_op<Silu>(1, DType::float64).df.value, Silu::df(1.0), 1e-15);
}

TEST_F(TensorsGpu, BinaryOpsHaveTheBitsOfTheCpu) {
  BinaryOps::for_each([&]<class Op>(Op) {
    for (const DType dtype : test::floating(arena)) {
      const Tensor a = drawn({6, 1, 11}, dtype, "a", Op::low, Op::high);
      const Tensor b = drawn({4, 11}, dtype, "b", Op::low, Op::high);
      EXPECT_TRUE(same_bits(binary<Op>(a.to(arena), b.to(arena)), binary<Op>(a, b))) << Op::name;
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
  const std::vector<DType> dtypes = test::floating(arena);
  for (size_t i = 0; i < 120; ++i) {
    const DType dtype = dtypes[i % dtypes.size()];
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
  for (const DType dtype : test::floating(arena))
    for (const DType other : test::floating(arena)) {
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
