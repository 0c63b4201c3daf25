// Work that is captured and launched again: what it reads at each launch, and what may not be captured.

#include <cstring>

#include "tensor/cuda/copy.h"
#include "tensor/ops/dropout.h"
#include "tensor/ops/elementwise.h"
#include "tensor/ops/matmul/matmul.h"
#include "tests/support/gpu.h"

namespace tessera {
namespace {

using GraphGpu = test::OnGpu;

// Kernels, products and copies of what is there when the graph is launched; nothing runs while it is captured.
TEST_F(GraphGpu, LaunchesReadWhatIsThere) {
  if constexpr (kWithCuda) {
    const std::shared_ptr<std::byte> pinned = cuda::pinned_memory(4 * sizeof(float));
    const auto put = [&](const std::vector<float>& v) { std::memcpy(pinned.get(), v.data(), 4 * sizeof(float)); };
    const Tensor x = Tensor::empty({2, 2}, DType::float32, arena), y = Tensor::zeros({2, 2}, DType::float32, arena);
    Tensor total = Tensor::zeros({2, 2}, DType::float32, arena);
    const auto work = [&] {
      cuda::copy_later(x, pinned.get());
      const Tensor product = matmul(x, x);  // in memory that is given back
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

TEST_F(GraphGpu, DropoutCountsByTheStepInMemory) {
  if constexpr (kWithCuda) {
    const Tensor step = Tensor::of<int64_t>(std::vector<int64_t>{0}, {1}, arena);
    const Tensor x = Tensor::zeros({2, 4, 24}, DType::float32, arena), y = x.clone();
    Tensor(x).fill(1);
    DropoutTile tile;
    tile.random = Philox::named(1, "drop");
    tile.step = 99;
    const auto expected = [&](uint64_t at) {
      DropoutTile plain = tile;
      plain.step = at;
      return dropout(x.clone(), 0.5, plain).to_vector<float>();
    };
    const std::vector<float> third = expected(3), fourth = expected(4);
    tile.step_on_gpu = reinterpret_cast<const uint64_t*>(step.device_data<int64_t>());
    dropout(x.clone(), 0.5, tile);
    const cuda::Graph graph(arena, [&] { Tensor(y).copy_from(dropout(x.clone(), 0.5, tile)); });
    Tensor(step).fill(3);
    graph.launch();
    EXPECT_EQ(y.to_vector<float>(), third);
    Tensor(step).fill(4);
    graph.launch();
    EXPECT_EQ(y.to_vector<float>(), fourth);
    EXPECT_NE(third, fourth);
  }
}

TEST_F(GraphGpu, FitsAsLongAsTheArenaIsAsItWas) {
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

// A capture that throws leaves the stream as it was: work that is queued next runs, and can be captured.
TEST_F(GraphGpu, AHostThatReadsInsideIsAnError) {
  if constexpr (kWithCuda) {
    Tensor x = Tensor::zeros({4}, DType::float32, arena);
    const auto failure = [&](const std::function<void()>& f) -> std::string {
      x.fill(1);
      try {
        const cuda::Graph graph(arena, [&] {
          x.fill(8);
          f();
        });
      } catch (const Error& e) {
        EXPECT_EQ(x.to_vector<float>(), std::vector<float>(4, 1.0f));
        const cuda::Graph next(arena, [&] { x.fill(5); });
        next.launch();
        EXPECT_EQ(x.to_vector<float>(), std::vector<float>(4, 5.0f));
        return e.what();
      }
      return "nothing was thrown";
    };
    Tensor::empty({1000}, DType::float32, arena);  // room for what is made inside
    const DeviceScalar late(x.narrow(0, 0, 1).to(DType::float64));
    for (const auto& read : std::vector<std::function<void()>>{
             [&] { static_cast<void>(static_cast<double>(late)); }, [&] { x.to_vector<float>(); },
             [&] { Tensor::of<float>(std::vector<float>(4), {4}, arena); }}) {
      const std::string what = failure(read);
      EXPECT_NE(what.find("the host waits for the GPU while work is captured"), std::string::npos) << what;
    }
    const std::string more = failure([&] { Tensor::empty({1 << 20}, DType::float32, arena); });
    EXPECT_NE(more.find("4194304 bytes of activations do not fit what is free"), std::string::npos) << more;
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
    EXPECT_EQ(static_cast<double>(late[0]), 0.1);  // the terms have kept their values
  }
}

// The same requests from the same layout get the same addresses; what is fixed hands out what it has.
TEST(Arena, LayoutsRepeatAndMayBeFixed) {
  const ArenaPtr memory = make_arena();
  const Tensor kept = Tensor::empty({100}, DType::float32, memory);
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

TEST(DeviceScalar, IsKnownOnTheHost) {
  DeviceScalar sum = 1.5;
  sum += DeviceScalar(Tensor::of<double>(std::vector<double>{0.25}, {1}, make_arena()));
  EXPECT_EQ(static_cast<double>(sum), 1.75);
  EXPECT_FALSE(sum.on_gpu().defined());
}

}  // namespace
}  // namespace tessera
