// That a step which trains makes its loss and the gradient in one pass over the logits: seen by the shared memory of
// the kernels that run, since the numbers are those of two passes.

#include "models/decoder.h"
#include "tests/cuda_emulator/emulator.h"
#include "tests/support/gpu.h"

namespace tessera {
namespace {

constexpr int64_t kVocab = 4104, kBatch = 2, kTokens = 8;

class OnePass : public test::OnGpu {
 protected:
  void SetUp() override {
    OnGpu::SetUp();
    ids = Tensor::zeros({kBatch, kTokens}, DType::int32, arena);
  }
  // Rows that were read into shared memory while f ran and the GPU came to its end.
  int64_t rows_in_shared(DType dtype, const std::function<void()>& f) {
    const auto bytes = static_cast<uint64_t>(kVocab * size_of(dtype));
    const uint64_t before = emulator::blocks_with_shared(bytes);
    f();
    ids.on_host();  // waits
    return static_cast<int64_t>(emulator::blocks_with_shared(bytes) - before);
  }
  Tensor ids;
};

TEST_F(OnePass, LossesOfATrainingStep) {
  for (const DType dtype : {DType::float32, DType::bfloat16}) {
    Decoder model({.layers = 1, .heads = 1, .channels = 16, .context = kTokens, .vocab = kVocab});
    model.materialize(1, arena, dtype, DType::float32);
    EXPECT_EQ(rows_in_shared(dtype, [&] { backward(model.loss(ids, ids, 0.1).mean); }), kBatch * kTokens);
    const auto validate = [&] {
      const NoGrad no_grad;
      model.loss(ids, ids, 0.1);
    };
    EXPECT_EQ(rows_in_shared(dtype, validate), 0);
  }
}

// Logits that somebody else looks at afterwards stay as they are.
TEST_F(OnePass, NotWhereLogitsAreKept) {
  const Var logits(Tensor::zeros({kBatch * kTokens, kVocab}, DType::float32, arena), true);
  const Tensor targets = ids.reshape({kBatch * kTokens});
  EXPECT_EQ(rows_in_shared(DType::float32, [&] { backward(cross_entropy(logits, targets, 1).mean); }), 0);
  EXPECT_EQ(logits.value().to_vector<float>(), std::vector<float>(kBatch * kTokens * kVocab, 0.0f));
  const Var twice = scale(logits, 2);
  EXPECT_EQ(rows_in_shared(DType::float32, [&] { backward(cross_entropy(twice, targets, 1).mean); }), 0);
  EXPECT_EQ(rows_in_shared(DType::float32, [&] { backward(cross_entropy(scale(logits, 2), targets, 1).mean); }),
            kBatch * kTokens);
}

}  // namespace
}  // namespace tessera
