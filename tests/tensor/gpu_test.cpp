// Tensors on a GPU: creation, transfers, elementwise ops, RoPE and SwiGLU, bitwise identical to the CPU; graph capture
// and launch.
#include "tests/support/gpu.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "tensor/cuda/copy.h"
#include "tensor/ops/activations.h"
#include "tensor/ops/dropout.h"
#include "tensor/ops/elementwise.h"
#include "tensor/ops/reduce.h"
#include "tensor/ops/rotary.h"
#include "tests/support/errors.h"
#include "tests/support/tensors.h"
#include "tests/support/two_libraries.h"

namespace tessera {
namespace {

using namespace test;

using TensorsGpu = test::OnGpu;

TEST_F(TensorsGpu, RoundTripPreservesValues) {
  for (const DType dtype : test::floating(arena)) {
    const Tensor here = random_tensor({5, 7, 3}, dtype, "a"), there = here.to(arena);
    EXPECT_EQ(there.device(), Device::cuda);
    const Tensor turned = here.transpose(0, 2);
    EXPECT_TRUE(bitwise_equal({there, turned.to(arena), there.transpose(0, 2)}, {here, turned, turned}));
    const Tensor part = there.clone(), expected = here.clone();
    for (const Tensor& t : {part, expected}) t.narrow(1, 2, 3).copy_from(here.narrow(1, 4, 3));
    EXPECT_TRUE(bitwise_equal(part, expected));
  }
  EXPECT_EQ(arena->usage(Category::activations).live, 0);
}

TEST_F(TensorsGpu, ConvertFillAndBroadcastMatchCpu) {
  for (const DType from : test::floating(arena))
    for (const DType to : {DType::float64, DType::float32, DType::bfloat16, DType::int32, DType::int64}) {
      const Tensor here = random_tensor({33, 5}, from, "b", -100, 100);
      EXPECT_TRUE(bitwise_equal(here.to(arena).to(to), here.to(to))) << to_string(from) << " to " << to_string(to);
    }
  const auto results = [](const Tensor& row) {
    Tensor copied = row.make({4, 9}, DType::bfloat16), filled = copied.clone();
    copied.copy_from(row);
    filled.fill(0.7);
    return std::vector<Tensor>{copied, filled};
  };
  const Tensor row = random_tensor({9}, DType::float32, "row");
  EXPECT_TRUE(bitwise_equal(results(row.to(arena)), results(row)));
}

TEST_F(TensorsGpu, RejectHostAccess) {
  const Tensor there = random_tensor({3}, DType::float32, "c").to(arena);
  EXPECT_THROW(there.data<float>(), Error);
  EXPECT_EQ(there.to_vector<float>().size(), 3u);
  EXPECT_THROW(random_tensor({3}, DType::float32, "c").device_data<float>(), Error);
}

// Bitwise identical to the CPU, except float64 functions and log, which the C library and CUDA compute differently.
TEST_F(TensorsGpu, UnaryOpsMatchCpuBitwise) {
  UnaryOps::for_each([&]<class Op>(Op) {
    for (const DType dtype : test::floating(arena))
      for (const Shape& shape : {Shape{1}, Shape{1031}, Shape{17, 9}}) {
        SCOPED_TRACE(std::string(Op::name) + " " + std::string(to_string(dtype)) + " " + shape.str());
        const DType wide = accum_dtype(dtype);
        const Tensor x = random_tensor(shape, dtype, "x", Op::low, Op::high), dy = random_tensor(shape, dtype, "dy");
        const std::vector<double> at = host_values(x);
        const Tensor there = unary<Op>(x.to(arena));
        test::expect_near(there, unary<Op>(x), wide, [&](size_t i) { return test::near_op<Op>(at[i], wide).f; });
        test::expect_near_gradient<Op>(unary_backward<Op>(dy.to(arena), x.to(arena)), unary_backward<Op>(dy, x), dy, x);
        const Tensor turned = unary<Op>(x.to(arena).transpose(0, shape.ndim() - 1));
        EXPECT_TRUE(bitwise_equal(turned, there.transpose(0, shape.ndim() - 1)));
      }
  });
}

// A build may omit float64 kernels, but retains the copies, sums and additions that losses require.
TEST_F(TensorsGpu, OpsWithoutFloat64KernelsReportReason) {
  const Tensor x = random_tensor({40}, DType::float64, "x"), there = x.to(arena);
  EXPECT_TRUE(bitwise_equal(sum(there), sum(x)));
  EXPECT_TRUE(bitwise_equal(binary<Add>(there, there), binary<Add>(x, x)));
  EXPECT_TRUE(bitwise_equal(there.to(DType::bfloat16), x.to(DType::bfloat16)));
  if (test::no_float64().empty()) {
    EXPECT_TRUE(bitwise_equal(unary<Relu>(there), unary<Relu>(x)));
    return;
  }
  EXPECT_EQ(error_message([&] { unary<Relu>(there); }),
            "[relu] dtype is float64; expected float32 or bfloat16, since this program was built without "
            "float64 kernels (-DTESSERA_FLOAT64_KERNELS=ON)");
}

// If 1 - tanh^2 x is small, an error of a few ulps of tanh corresponds to a hundred times as many ulps of the result.
TEST(MathTolerance, CoversErrorsOfBothLibraries) {
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

TEST_F(TensorsGpu, BinaryOpsMatchCpuBitwise) {
  BinaryOps::for_each([&]<class Op>(Op) {
    for (const DType dtype : test::floating(arena)) {
      const Tensor a = random_tensor({6, 1, 11}, dtype, "a", Op::low, Op::high);
      const Tensor b = random_tensor({4, 11}, dtype, "b", Op::low, Op::high);
      EXPECT_TRUE(bitwise_equal(binary<Op>(a.to(arena), b.to(arena)), binary<Op>(a, b))) << Op::name;
    }
  });
}

// Slices of wider arrays and broadcast rows, some of them aligned to 16 bytes and some not.
TEST_F(TensorsGpu, SlicesAndBroadcastRowsMatchCpuBitwise) {
  const Philox random = Philox::named(5, "pieces");
  uint64_t samples = 0;
  const auto choose = [&](std::vector<int64_t> choices) { return choices[random.below(choices.size(), samples++)]; };
  const std::vector<DType> dtypes = test::floating(arena);
  for (size_t i = 0; i < 120; ++i) {
    const DType dtype = dtypes[i % dtypes.size()];
    const int64_t batch = choose({1, 2, 5}), rows = choose({1, 3, 4}), columns = choose({4, 7, 8, 16, 40}),
                  more = choose({0, 1, 2, 8, 16}), first = choose({0, more / 2, more});
    const Tensor a = random_tensor({batch, rows, columns + more}, dtype, "a"),
                 b = random_tensor({rows, columns + more}, dtype, "b"), c = random_tensor({columns}, dtype, "c");
    const auto columns_view = [&](const Tensor& t) { return t.narrow(t.shape().ndim() - 1, first, columns); };
    SCOPED_TRACE(columns_view(a).describe() + " from " + std::to_string(first) + " of " +
                 std::to_string(columns + more));
    const auto results = [&](const Tensor& x, const Tensor& y, const Tensor& z) {
      const Tensor into = x.clone();
      columns_view(into).copy_from(columns_view(y));
      return std::vector<Tensor>{binary<Add>(columns_view(x), columns_view(y)), binary<Add>(columns_view(x), z), into};
    };
    EXPECT_TRUE(bitwise_equal(results(a.to(arena), b.to(arena), c.to(arena)), results(a, b, c)));
  }
}

TEST_F(TensorsGpu, InPlaceSumsMatchCpuBitwise) {
  for (const DType dtype : test::floating(arena))
    for (const DType other : test::floating(arena)) {
      const auto results = [](const Tensor& to, const Tensor& more) {
        Tensor sum = to.clone();
        add_(sum, more, 0.3);
        Tensor scaled = sum.clone();
        scale_(scaled, 1.7);
        return std::vector<Tensor>{sum, scaled};
      };
      const Tensor x = random_tensor({3, 129}, dtype, "x"), y = random_tensor({129}, other, "y");
      EXPECT_TRUE(bitwise_equal(results(x.to(arena), y.to(arena)), results(x, y)));
    }
}

// RoPE and SwiGLU on a GPU, compared with the CPU, with rows of full vectors of 16 bytes and others.

using RotarySwigluGpu = test::OnGpu;

// Bitwise identical to the CPU, except for float64 exponentials, which come from the C library and CUDA.
TEST_F(RotarySwigluGpu, SwigluMatchesCpuBitwise) {
  for (const DType dtype : test::floating(arena))
    for (const Shape& shape :
         {Shape{3, 7}, Shape{2, 5, 8}, Shape{70, 24}, Shape{1, 1001}, Shape{9, 4096}, Shape{0, 8}}) {
      SCOPED_TRACE(std::string(to_string(dtype)) + " " + shape.str());
      const DType wide = accum_dtype(dtype);
      const Tensor x = random_tensor(shape.with_last(2 * shape[shape.ndim() - 1]), dtype, "x", -9, 9),
                   there = x.to(arena), dy = random_tensor(shape, dtype, "dy");
      const std::vector<double> in = host_values(x), up = host_values(dy);
      const auto n = static_cast<size_t>(shape[shape.ndim() - 1]);
      const auto known = [&](double v) { return test::Near{v, 0, test::machine_epsilon(wide)}; };
      const auto silu = [&](size_t row, size_t j) { return test::near_op<Silu>(in[2 * row * n + j], wide); };
      test::expect_near(gated_activation(there), gated_activation(x), wide,
                        [&](size_t i) { return silu(i / n, i % n).f * known(in[(2 * (i / n) + 1) * n + i % n]); });
      test::expect_near(gated_activation_backward(dy.to(arena), there), gated_activation_backward(dy, x), wide,
                        [&](size_t i) {
                          const size_t row = i / (2 * n), j = i % (2 * n);
                          if (j >= n) return known(up[row * n + j - n]) * silu(row, j - n).f;
                          return known(up[row * n + j]) * known(in[(2 * row + 1) * n + j]) * silu(row, j).df;
                        });
    }
}

// RoPE in place, and out of place, which copies the unrotated elements; forward and inverse, with positions in any
// order. Tokens have some elements after the rotated ones.
TEST_F(RotarySwigluGpu, RopeMatchesCpuBitwise) {
  constexpr size_t kTokens = 11;
  const std::vector<int32_t> any = {3, 40, 0, 7, 7, 1, 2, 39, 11, 12, 13};
  const Tensor positions = Tensor::of<int32_t>(any, {kTokens}, make_arena());
  const Tensor each = made({2, kTokens}, DType::int32, make_arena(),
                           [&](size_t i) { return i < kTokens ? any[i] : any[2 * kTokens - 1 - i]; });
  for (const DType dtype : test::floating(arena))
    for (const auto& [heads, d, more] :
         {std::array<int64_t, 3>{1, 2, 0}, {3, 6, 5}, {5, 16, 16}, {2, 16, 3}, {9, 64, 128}, {0, 8, 8}})
      for (const bool back : {false, true}) {
        SCOPED_TRACE(std::string(to_string(dtype)) + " " + std::to_string(heads) + " heads of " + std::to_string(d));
        const Tensor table = rotary_table({}, 41, d, accum_dtype(dtype), make_arena());
        RopeArgs turn{.heads = heads, .table = table, .first = 9, .back = back};
        for (int variant = 0; variant < 3; ++variant) {
          if (variant > 0) turn.positions = variant == 1 ? positions : each;
          RopeArgs there = turn;
          there.table = turn.table.to(arena);
          if (variant > 0) there.positions = turn.positions.to(arena);
          const Tensor x = random_tensor({2, kTokens, heads * d + more}, dtype, "x"), original = x.to(arena);
          const Tensor expected = rotate(x.clone(), turn);
          Tensor own = original.clone();
          const void* const place = own.address();
          const Tensor turned = rotate(std::move(own), there), other = rotate(Tensor(original), there);
          EXPECT_EQ(turned.address(), place);
          EXPECT_TRUE(bitwise_equal(turned, expected) && bitwise_equal(other, expected) && bitwise_equal(original, x));
        }
      }
}

// Graph capture: values read at launch, and operations that may not be captured.

using GraphGpu = test::OnGpu;

// Kernels, matmuls and copies read the values at launch; nothing runs during capture.
TEST_F(GraphGpu, LaunchesReadCurrentValues) {
  if constexpr (kWithCuda) {
    const std::shared_ptr<std::byte> pinned = cuda::pinned_memory(4 * sizeof(float));
    const auto put = [&](const std::vector<float>& v) { std::memcpy(pinned.get(), v.data(), 4 * sizeof(float)); };
    const Tensor x = Tensor::empty({2, 2}, DType::float32, arena), y = Tensor::zeros({2, 2}, DType::float32, arena);
    Tensor total = Tensor::zeros({2, 2}, DType::float32, arena);
    const auto work = [&] {
      cuda::queue_copy(x, pinned.get());
      const Tensor product = matmul(x, x);  // in a temporary block
      Tensor(y).copy_from(product);
      add_(total, product);
    };
    put({1, 2, 3, 4});
    work();
    total.fill(0);
    std::optional<cuda::Graph> graph;
    graph.emplace(arena, work);
    EXPECT_EQ(total.to_vector<float>(), std::vector<float>(4, 0.0f));
    graph->launch();
    EXPECT_EQ(y.to_vector<float>(), (std::vector<float>{7, 10, 15, 22}));
    put({1, 0, 0, 2});
    graph->launch();
    graph->launch();
    EXPECT_EQ(y.to_vector<float>(), (std::vector<float>{1, 0, 0, 4}));
    EXPECT_EQ(total.to_vector<float>(), (std::vector<float>{9, 10, 15, 30}));
  }
}

TEST_F(GraphGpu, DropoutReadsStepFromDeviceMemory) {
  if constexpr (kWithCuda) {
    const Tensor step = Tensor::zeros({1}, DType::int64, arena);
    const Tensor x = made({2, 4, 24}, DType::float32, arena, [](size_t) { return 1; }), y = x.clone();
    DropoutTile tile{.random = Philox::named(1, "drop"), .step = 99, .positions = {}};
    const auto expected = [&](uint64_t at) {
      DropoutTile plain = tile;
      plain.step = at;
      plain.step_on_gpu = nullptr;
      return dropout(x.clone(), 0.5, plain).to_vector<float>();
    };
    tile.step_on_gpu = reinterpret_cast<const uint64_t*>(step.device_data<int64_t>());
    dropout(x.clone(), 0.5, tile);
    const cuda::Graph graph(arena, [&] { Tensor(y).copy_from(dropout(x.clone(), 0.5, tile)); });
    for (const int64_t at : {3, 4}) {
      Tensor(step).fill(static_cast<double>(at));
      graph.launch();
      EXPECT_EQ(y.to_vector<float>(), expected(static_cast<uint64_t>(at)));
    }
    EXPECT_NE(expected(3), expected(4));
  }
}

TEST_F(GraphGpu, IsValidWhileArenaLayoutIsUnchanged) {
  if constexpr (kWithCuda) {
    const Tensor x = Tensor::zeros({1000}, DType::float32, arena);
    const auto work = [&] { unary<Gelu>(x); };
    work();
    const cuda::Graph graph(arena, work);
    EXPECT_TRUE(graph.fits());
    {
      const Tensor other = Tensor::empty({10}, DType::float32, arena);
      EXPECT_FALSE(graph.fits());
    }
    EXPECT_TRUE(graph.fits());
    Tensor::empty({5000}, DType::float32, arena);
    EXPECT_FALSE(graph.fits());
  }
}

// A failed capture leaves the stream usable: later work runs and can be captured.
TEST_F(GraphGpu, RejectsHostReadsDuringCapture) {
  if constexpr (kWithCuda) {
    Tensor x = Tensor::zeros({4}, DType::float32, arena);
    const auto failure = [&](const std::function<void()>& f) {
      x.fill(1);
      const auto work = [&] {
        x.fill(8);
        f();
      };
      const std::string message = error_message([&] { const cuda::Graph graph(arena, work); });
      EXPECT_EQ(x.to_vector<float>(), std::vector<float>(4, 1.0f));
      const cuda::Graph next(arena, [&] { x.fill(5); });
      next.launch();
      EXPECT_EQ(x.to_vector<float>(), std::vector<float>(4, 5.0f));
      return message;
    };
    Tensor::empty({1000}, DType::float32, arena);  // free memory for allocations during capture
    const DeviceScalar late(x.narrow(0, 0, 1).to(DType::float64));
    for (const auto& read : std::vector<std::function<void()>>{
             [&] { static_cast<void>(static_cast<double>(late)); }, [&] { x.to_vector<float>(); },
             [&] { Tensor::of<float>(std::vector<float>(4), {4}, arena); }})
      EXPECT_TRUE(has(failure(read), "the host waits for the GPU during CUDA graph capture"));
    EXPECT_TRUE(has(failure([&] { Tensor::empty({1 << 20}, DType::float32, arena); }),
                    "4194304 bytes of activations do not fit in the free blocks"));
  }
}

TEST_F(GraphGpu, DeviceScalarsAreAddedInOrderAndReadOnce) {
  if constexpr (kWithCuda) {
    const std::vector<double> terms{0.1, 1e17, -1e17, 0.3};
    double expected = 0;
    DeviceScalar sum = 0;
    const int64_t before = cuda::synchronizations(*arena);
    std::vector<DeviceScalar> late;
    for (const double x : terms) {
      Tensor there = Tensor::empty({}, DType::float64, arena);
      there.fill(x);
      late.emplace_back(there);
      expected += x;
      sum += late.back();
    }
    sum += 2;
    EXPECT_EQ(cuda::synchronizations(*arena), before);
    EXPECT_EQ(static_cast<double>(sum), expected + 2);
    EXPECT_EQ(cuda::synchronizations(*arena), before + 1);
    EXPECT_EQ(static_cast<double>(late[0]), 0.1);  // the terms are unchanged
  }
}

// Equal requests from the same layout receive the same addresses; a fixed arena uses only existing memory.
TEST(Arena, EqualLayoutsReturnEqualAddresses) {
  const ArenaPtr memory = make_arena();
  const Tensor original = Tensor::empty({100}, DType::float32, memory);
  const auto addresses = [&] {
    const Tensor a = Tensor::empty({1000}, DType::float32, memory), b = Tensor::empty({50}, DType::float32, memory);
    return std::vector<const std::byte*>{a.raw(), b.raw()};
  };
  const Arena::Layout fresh = memory->layout();
  const std::vector<const std::byte*> first = addresses();
  EXPECT_FALSE(memory->layout() == fresh);
  const Arena::Layout grown = memory->layout();
  {
    const Arena::Fixed fixed(*memory);
    EXPECT_EQ(addresses(), first);
    EXPECT_TRUE(memory->layout() == grown);
    EXPECT_THROW(Tensor::empty({100'000}, DType::float32, memory), Error);
    EXPECT_TRUE(memory->layout() == grown);
    const Tensor other = Tensor::empty({10}, DType::float32, memory);
    EXPECT_FALSE(memory->layout() == grown);
  }
  Tensor::empty({100'000}, DType::float32, memory);
  EXPECT_GT(memory->layout().footprint, grown.footprint);
}

TEST(DeviceScalar, CpuValueIsReadableOnHost) {
  DeviceScalar sum = 1.5;
  sum += DeviceScalar(Tensor::of<double>(std::vector<double>{0.25}, {1}, make_arena()));
  EXPECT_EQ(static_cast<double>(sum), 1.75);
  EXPECT_FALSE(sum.on_gpu().defined());
}

}  // namespace
}  // namespace tessera
