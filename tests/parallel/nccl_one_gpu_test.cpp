// NCCL with one rank, which every machine with one GPU has: that its library loads and starts, that a collective of it
// can be captured and launched again, and that it ends.

#include "parallel/comm/launch.h"
#include "parallel/comm/nccl/transport.h"
#include "tensor/cuda/copy.h"
#include "tests/support/gpu.h"

namespace tessera {
namespace {

class NcclOneGpu : public test::OnGpu {
 protected:
  void SetUp() override {
    OnGpu::SetUp();
    if (!IsSkipped() && !kWithNccl) GTEST_SKIP() << "a build without NCCL";
  }
};

template <class F>
bool soon(const F& done) {
  using Clock = std::chrono::steady_clock;
  for (const auto start = Clock::now(); Clock::now() - start < std::chrono::seconds(60);) {
    if (done()) return true;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return false;
}

TEST_F(NcclOneGpu, StartsIsCapturedAndEnds) {
  if constexpr (kWithCuda && kWithNccl) {
    prepare_for_nccl();
    const std::unique_ptr<NcclApi> nccl = real_nccl(0, 1);
    nccl->begin(1, nccl->make_id(), 0);
    ASSERT_TRUE(soon([&] { return nccl->queued(); }));
    Tensor x = Tensor::zeros({1000}, DType::float32, arena), sum = Tensor::zeros({1000}, DType::float32, arena);
    const auto add_up = [&] {
      nccl->after(*arena);
      nccl->all_reduce(x.address(), sum.address(), 1000, DType::float32, Reduction::sum);
    };
    add_up();
    ASSERT_TRUE(soon([&] { return nccl->queued(); }));
    nccl->join(*arena, nccl->point());
    cuda::synchronize(*arena);
    {
      const cuda::Graph graph(arena, [&] {
        add_up();
        soon([&] { return nccl->queued(); });
        nccl->join(*arena, nccl->point());
      });
      for (const float value : {3.0f, 5.0f}) {
        x.fill(value);
        graph.launch();
        EXPECT_EQ(sum.on_host().to_vector<float>(), std::vector<float>(1000, value));
      }
    }  // graphs go before communicators
    EXPECT_TRUE(soon([&] { return nccl->finished(); }));
    nccl->abort();
  }
}

}  // namespace
}  // namespace tessera
