// The whole model: loss and every gradient against an independent PyTorch GPT-2, float32 against float64, recomputation
// and micro-batches bit for bit, decoding with a cache against the plain forward pass.
#include <gtest/gtest.h>

#include "models/decoder.h"
#include "tensor/cpu/vectorize.h"
#include "tests/support/python.h"

namespace tessera {
namespace {

struct GptShape {
  int64_t layers, heads, channels, context, vocab;
};

// Gradients lie as in the units: unit after unit, each as long as its buffers.
struct OracleResult {
  double loss32 = 0, loss64 = 0;
  std::vector<float> grads32;
  std::vector<double> grads64;
};

std::string oracle_index(const GptShape& shape, std::span<const FlatUnit> units, int64_t batch, int64_t tokens) {
  std::string tensors;
  int64_t offset = 0;
  for (const FlatUnit& unit : units) {
    for (const Slot& slot : unit.slots) {
      std::string dims = slot.parameter->local().str();  // "(2, 3)"
      dims = "[" + dims.substr(1, dims.size() - 2) + "]";
      tensors += fmt::format(R"({}{{"name": "{}", "shape": {}, "offset": {}}})", tensors.empty() ? "" : ", ",
                             slot.parameter->name, dims, offset + slot.begin);
    }
    offset += unit.values.numel();
  }
  return fmt::format(
      R"({{"layers": {}, "heads": {}, "channels": {}, "context": {}, "vocab": {}, "batch": {}, "tokens": {}, "tensors": [{}]}})",
      shape.layers, shape.heads, shape.channels, shape.context, shape.vocab, batch, tokens, tensors);
}

// inputs and targets: int32 (batch, tokens). The weights are read as float32. Throws with the script's words when the
// names of the slots are not those of the PyTorch model.
OracleResult gpt_oracle(const GptShape& shape, std::span<const FlatUnit> units, const Tensor& inputs,
                        const Tensor& targets) {
  const test::Exchange exchange;
  std::vector<float> weights;
  for (const FlatUnit& unit : units) {
    const std::vector<float> values = unit.values.to(DType::float32).to_vector<float>();
    weights.insert(weights.end(), values.begin(), values.end());
  }
  exchange.write_text("model.json", oracle_index(shape, units, inputs.dim(0), inputs.dim(1)));
  exchange.write("weights.bin", std::span<const float>(weights));
  exchange.write("inputs.bin", std::span<const int32_t>(inputs.to_vector<int32_t>()));
  exchange.write("targets.bin", std::span<const int32_t>(targets.to_vector<int32_t>()));
  exchange.run(TESSERA_SOURCE_DIR "/tests/compare/gpt_pytorch.py");
  const std::vector<double> loss = exchange.read<double>("loss.bin");
  return {loss.at(0), loss.at(1), exchange.read<float>("gradients.float32.bin"),
          exchange.read<double>("gradients.float64.bin")};
}

struct Worst {
  double error = 0;  // |g - reference| / |reference|, 2-norms of one parameter
  std::string name;
};

// The parameter whose gradient is farthest from the reference, which lies as in OracleResult; the first that is NaN.
Worst worst_gradient(std::span<const FlatUnit> units, std::span<const double> reference) {
  Worst worst;
  size_t offset = 0;
  for (const FlatUnit& unit : units) {
    const std::vector<double> grads = unit.grads.to(DType::float64).to_vector<double>();
    for (const Slot& slot : unit.slots) {
      double difference = 0, norm = 0;
      for (int64_t i = slot.begin; i < slot.end(); ++i) {
        const double expected = reference[offset + static_cast<size_t>(i)];
        const double d = grads[static_cast<size_t>(i)] - expected;
        difference += d * d;
        norm += expected * expected;
      }
      const double error = std::sqrt(difference / norm);
      if (!(error <= worst.error)) worst = {error, slot.parameter->name};
      if (std::isnan(error)) return worst;
    }
    offset += grads.size();
  }
  return worst;
}

Tensor random_ids(const Shape& shape, int64_t vocab, uint64_t seed, const ArenaPtr& arena) {
  Tensor ids = Tensor::empty(shape, DType::int32, arena);
  for (int64_t i = 0; i < ids.numel(); ++i)
    ids.data<int32_t>()[i] =
        static_cast<int32_t>(Philox(seed).below(static_cast<uint64_t>(vocab), static_cast<uint64_t>(i)));
  return ids;
}

// A model whose biases and norms are not at their (too symmetric) initial values.
std::unique_ptr<Decoder> make_model(const ModelConfig& config, DType dtype, const ArenaPtr& arena) {
  auto model = std::make_unique<Decoder>(config);
  model->materialize(7, arena, dtype, dtype == DType::bfloat16 ? DType::float32 : dtype);
  for (const Parameter* p : model->parameters()) {
    Tensor value = p->var.value();
    const Philox random = Philox::named(11, p->name);
    Tensor noise = Tensor::empty(value.shape(), DType::float32, arena);
    for (int64_t i = 0; i < noise.numel(); ++i)
      noise.data<float>()[i] = static_cast<float>(0.05 * random.normal(static_cast<uint64_t>(i)));
    add_(value, noise);
  }
  return model;
}

double run_backward(Decoder& model, const Tensor& ids, const Tensor& targets) {
  model.clear_gradients();
  const Loss loss = model.loss(ids, targets, 1.0 / static_cast<double>(targets.numel()));
  backward(loss.mean);
  model.zero_missing_gradients();
  return loss.mean.value().item<double>();
}

std::vector<std::byte> gradient_bytes(Decoder& model) {
  std::vector<std::byte> all;
  for (const FlatUnit& unit : model.units())
    all.insert(all.end(), unit.grads.raw(), unit.grads.raw() + unit.grads.nbytes());
  return all;
}

struct Case {
  ModelConfig config;
  int64_t batch, tokens;
};
const Case kCases[] = {
    {{.layers = 2, .heads = 2, .channels = 32, .context = 16, .vocab = 65}, 3, 16},
    {{.layers = 1, .heads = 3, .channels = 48, .context = 100, .vocab = 131}, 2, 97},
    {{.layers = 3, .heads = 1, .channels = 24, .context = 9, .vocab = 17}, 4, 7},
};

TEST(Gpt, LossAndGradientsAreThoseOfPyTorch) {
  if (const std::string why = test::missing("torch"); !why.empty()) GTEST_SKIP() << why;
  for (const Case& c : kCases) {
    const ArenaPtr arena = make_arena();
    auto model = make_model(c.config, DType::float32, arena);
    const Tensor ids = random_ids({c.batch, c.tokens}, c.config.vocab, 1, arena);
    const Tensor targets = random_ids({c.batch, c.tokens}, c.config.vocab, 2, arena);
    const double loss = run_backward(*model, ids, targets);
    const GptShape shape{c.config.layers, c.config.heads, c.config.channels, c.config.context, c.config.vocab};
    const OracleResult oracle = gpt_oracle(shape, model->units(), ids, targets);
    EXPECT_NEAR(loss, oracle.loss64, 1e-6 * oracle.loss64);
    const Worst worst = worst_gradient(model->units(), oracle.grads64);
    EXPECT_LT(worst.error, 1e-5) << worst.name;

    auto wide = std::make_unique<Decoder>(c.config);
    wide->materialize(7, arena, DType::float64, DType::float64);
    for (size_t i = 0; i < wide->units().size(); ++i) wide->units()[i].values.copy_from(model->units()[i].values);
    EXPECT_NEAR(run_backward(*wide, ids, targets), oracle.loss64, 1e-12 * oracle.loss64);
    const Worst worst64 = worst_gradient(wide->units(), oracle.grads64);
    EXPECT_LT(worst64.error, 1e-10) << worst64.name;
  }
}

TEST(Gpt, BFloat16GradientsAreNearFloat64) {
  const Case& c = kCases[0];
  const ArenaPtr arena = make_arena();
  auto model = make_model(c.config, DType::bfloat16, arena);
  auto wide = std::make_unique<Decoder>(c.config);
  wide->materialize(7, arena, DType::float64, DType::float64);
  for (size_t i = 0; i < wide->units().size(); ++i) wide->units()[i].values.copy_from(model->units()[i].values);
  const Tensor ids = random_ids({c.batch, c.tokens}, c.config.vocab, 1, arena),
               targets = random_ids({c.batch, c.tokens}, c.config.vocab, 2, arena);
  const double loss = run_backward(*model, ids, targets), loss64 = run_backward(*wide, ids, targets);
  EXPECT_NEAR(loss, loss64, 0.02 * loss64);
  std::vector<double> reference;
  for (const FlatUnit& unit : wide->units()) {
    const std::vector<double> g = unit.grads.to_vector<double>();
    reference.insert(reference.end(), g.begin(), g.end());
  }
  const Worst worst = worst_gradient(model->units(), reference);
  EXPECT_LT(worst.error, 0.05) << worst.name;
}

TEST(Gpt, RecomputationChangesNoBit) {
  for (const DType dtype : {DType::float32, DType::bfloat16}) {
    ModelConfig config = kCases[0].config;
    config.dropout = 0.2;
    std::vector<std::byte> expected;
    for (const Recompute mode :
         {Recompute::none, Recompute::activation, Recompute::activation_norm, Recompute::attention, Recompute::block}) {
      config.recompute = mode;
      const ArenaPtr arena = make_arena();
      auto model = make_model(config, dtype, arena);
      model->set_step({.seed = 5, .step = 3, .first_sequence = 8, .training = true});
      run_backward(*model, random_ids({3, 16}, config.vocab, 1, arena), random_ids({3, 16}, config.vocab, 2, arena));
      const std::vector<std::byte> bytes = gradient_bytes(*model);
      if (mode == Recompute::none) expected = bytes;
      EXPECT_TRUE(bytes == expected) << "mode " << static_cast<int>(mode) << " in " << name_of(dtype);
    }
  }
}

TEST(Gpt, DropoutChangesTheLossAndOnlyWhileTraining) {
  ModelConfig config = kCases[0].config;
  config.dropout = 0.3;
  const ArenaPtr arena = make_arena();
  auto model = make_model(config, DType::float32, arena);
  const Tensor ids = random_ids({3, 16}, config.vocab, 1, arena);
  const auto loss_at = [&](StepInfo at) {
    model->set_step(at);
    return model->loss(ids, ids, 1.0 / 48).mean.value().item<double>();
  };
  const double off = loss_at({.seed = 5}), first = loss_at({.seed = 5, .step = 0, .training = true});
  EXPECT_NE(off, first);
  EXPECT_EQ(first, loss_at({.seed = 5, .step = 0, .training = true}));
  EXPECT_NE(first, loss_at({.seed = 5, .step = 1, .training = true}));
  EXPECT_NE(first, loss_at({.seed = 6, .step = 0, .training = true}));
  EXPECT_NE(first, loss_at({.seed = 5, .step = 0, .first_sequence = 3, .training = true}));
}

// The gradients of a step of two micro-batches.
std::vector<std::byte> gradients_of_a_step(DType dtype, int threads, bool defer) {
  const ModelConfig config{.layers = 2, .heads = 2, .channels = 64, .context = 48, .vocab = 99, .dropout = 0.1};
  const int before = cpu::threads();
  cpu::set_threads(threads);
  const ArenaPtr arena = make_arena();
  auto model = make_model(config, dtype, arena);
  model->clear_gradients();
  for (int64_t m = 0; m < 2; ++m) {
    model->set_step({.seed = 5, .step = 1, .first_sequence = 4 * m, .training = true});
    const Tensor ids = random_ids({4, 48}, config.vocab, static_cast<uint64_t>(m), arena);
    DeferredWeightGrads later;
    const Loss loss = model->loss(ids, ids, 1.0 / 384);
    backward(loss.mean, {.seed = {}, .defer = defer ? &later : nullptr});
    EXPECT_EQ(later.empty(), !defer);
    later.run();
  }
  model->zero_missing_gradients();
  cpu::set_threads(before);
  return gradient_bytes(*model);
}

// All kernels but oneDNN's products have the same bits for any number of threads.
TEST(Gpt, ThreadsAndDeferredWeightGradientsChangeNoBit) {
  const std::vector<std::byte> wide = gradients_of_a_step(DType::float64, 1, false);
  for (const int threads : {1, 2, 3}) {
    const std::vector<std::byte> narrow = gradients_of_a_step(DType::float32, threads, false);
    EXPECT_TRUE(gradients_of_a_step(DType::float32, threads, true) == narrow) << threads << " threads";
    EXPECT_TRUE(gradients_of_a_step(DType::float32, threads, false) == narrow) << threads << " threads, again";
    for (const bool defer : {false, true})
      EXPECT_TRUE(gradients_of_a_step(DType::float64, threads, defer) == wide)
          << threads << " threads, deferred " << defer;
  }
}

TEST(Gpt, DecodingWithACacheIsTheForwardPass) {
  const Case& c = kCases[1];
  const ArenaPtr arena = make_arena();
  auto model = make_model(c.config, DType::float64, arena);
  const Tensor ids = random_ids({2, 90}, c.config.vocab, 1, arena);
  const NoGrad no_grad;
  const Tensor whole = model->logits(model->hidden(ids)).value().reshape({2, 90, c.config.vocab});
  TextCache first = model->cache(), second = model->cache();
  const std::array texts{&first, &second};
  int64_t at = 0;
  for (const int64_t length : {70, 1, 1, 17, 1}) {
    const Tensor next = model->decode(ids.narrow(1, at, length).contiguous(), texts);
    at += length;
    for (int64_t b = 0; b < 2; ++b)
      for (int64_t v = 0; v < c.config.vocab; ++v)
        ASSERT_NEAR(next.select(0, b).select(0, v).item<double>(),
                    whole.select(0, b).select(0, at - 1).select(0, v).item<double>(), 1e-12);
  }
}

TEST(Gpt, RefusesWhatDoesNotFit) {
  EXPECT_THROW(Decoder({.layers = 1, .heads = 3, .channels = 32, .context = 8, .vocab = 10}), Error);
  const ArenaPtr arena = make_arena();
  Decoder model({.layers = 1, .heads = 2, .channels = 32, .context = 8, .vocab = 10});
  EXPECT_EQ(model.parameter_count(),
            10 * 32 + 8 * 32 + (4 * 32 * 32 + 8 * 32 * 32) + (3 + 1 + 4 + 1 + 4) * 32 + 2 * 32);
  model.materialize(1, arena, DType::float32, DType::float32);
  EXPECT_THROW(model.materialize(1, arena, DType::float32, DType::float32), Error);
  EXPECT_THROW(model.hidden(random_ids({1, 9}, 10, 1, arena)), Error);
  EXPECT_THROW(model.hidden(random_ids({1, 8}, 11000, 1, arena)), Error);
}

}  // namespace
}  // namespace tessera
