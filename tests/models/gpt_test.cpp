// Comparisons of the full model: loss and all gradients with an independent PyTorch GPT-2, float32 with float64,
// recomputation and micro-batches bitwise, cached decoding with the forward pass.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <iterator>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "models/decoder.h"
#include "tensor/cpu/vectorize.h"
#include "tests/support/python.h"
#include "tests/support/tensors.h"

namespace tessera {
namespace {

using namespace test;

// Gradients are ordered like units, each as long as its buffer.
struct OracleResult {
  double loss = 0;
  std::vector<double> gradients;
};

std::string oracle_index(const ModelConfig& shape, std::span<const FlatUnit> units, int64_t batch, int64_t tokens) {
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

// inputs and targets: int32 (batch, tokens). Weights are read as float32; results are float64. Throws the script's
// message if the slot names differ from the PyTorch model's.
OracleResult gpt_oracle(const ModelConfig& shape, std::span<const FlatUnit> units, const Tensor& inputs,
                        const Tensor& targets) {
  const test::Exchange exchange;
  std::vector<float> weights;
  for (const FlatUnit& unit : units)
    std::ranges::copy(unit.values.to(DType::float32).to_vector<float>(), std::back_inserter(weights));
  exchange.write_text("model.json", oracle_index(shape, units, inputs.dim(0), inputs.dim(1)));
  exchange.write("weights.bin", std::span<const float>(weights));
  exchange.write("inputs.bin", std::span<const int32_t>(inputs.to_vector<int32_t>()));
  exchange.write("targets.bin", std::span<const int32_t>(targets.to_vector<int32_t>()));
  exchange.run(TESSERA_SOURCE_DIR "/tests/compare/gpt_pytorch.py");
  return {exchange.read<double>("loss.bin").at(1), exchange.read<double>("gradients.float64.bin")};
}

struct Worst {
  double error = 0;  // |g - reference| / |reference|, 2-norms of one parameter
  std::string name;
};

// The parameter whose gradient is farthest from the reference (in the order of OracleResult); the first NaN wins.
Worst worst_gradient(std::span<const FlatUnit> units, std::span<const double> reference) {
  Worst worst;
  size_t offset = 0;
  for (const FlatUnit& unit : units) {
    const std::vector<double> grads = host_values(unit.grads);
    for (const Slot& slot : unit.slots) {
      const auto begin = static_cast<size_t>(slot.begin), size = static_cast<size_t>(slot.size);
      const double error = distance(std::span(grads).subspan(begin, size), reference.subspan(offset + begin, size), 0);
      if (!(error <= worst.error)) worst = {error, slot.parameter->name};
      if (std::isnan(error)) return worst;
    }
    offset += grads.size();
  }
  return worst;
}

Tensor random_ids(const Shape& shape, int64_t vocab, uint64_t seed, const ArenaPtr& arena) {
  return made(shape, DType::int32, arena,
              [&](size_t i) { return Philox(seed).below(static_cast<uint64_t>(vocab), i); });
}

// A model with random biases and norms instead of their (symmetric) initial values.
std::unique_ptr<Decoder> make_model(const ModelConfig& config, DType dtype, const ArenaPtr& arena) {
  auto model = std::make_unique<Decoder>(config);
  model->materialize(7, arena, dtype, dtype == DType::bfloat16 ? DType::float32 : dtype);
  for (const Parameter* p : model->parameters()) {
    Tensor value = p->var.value();
    const Philox random = Philox::named(11, p->name);
    add_(value, made(value.shape(), DType::float32, arena, [&](size_t i) { return 0.05 * random.normal(i); }));
  }
  return model;
}

// The same values in float64.
std::unique_ptr<Decoder> widened(Decoder& model) {
  auto wide = std::make_unique<Decoder>(model.config);
  wide->materialize(7, make_arena(), DType::float64, DType::float64);
  for (size_t i = 0; i < wide->units().size(); ++i) wide->units()[i].values.copy_from(model.units()[i].values);
  return wide;
}

// Returns the loss of random tokens (batch, tokens).
double run_backward(Decoder& model, const Shape& shape) {
  const Tensor ids = random_ids(shape, model.config.vocab, 1, make_arena()),
               targets = random_ids(shape, model.config.vocab, 2, make_arena());
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
  Shape shape;  // (batch, tokens)
};
const Case kCases[] = {
    {{.layers = 2, .heads = 2, .channels = 32, .context = 16, .vocab = 65}, {3, 16}},
    {{.layers = 1, .heads = 3, .channels = 48, .context = 100, .vocab = 131}, {2, 97}},
    {{.layers = 3, .heads = 1, .channels = 24, .context = 9, .vocab = 17}, {4, 7}},
};

TEST(Gpt, LossAndGradientsMatchPyTorch) {
  if (const std::string why = test::missing("torch"); !why.empty()) GTEST_SKIP() << why;
  for (const Case& c : kCases) {
    const ArenaPtr arena = make_arena();
    auto model = make_model(c.config, DType::float32, arena);
    const OracleResult oracle = gpt_oracle(c.config, model->units(), random_ids(c.shape, c.config.vocab, 1, arena),
                                           random_ids(c.shape, c.config.vocab, 2, arena));
    EXPECT_NEAR(run_backward(*model, c.shape), oracle.loss, 1e-6 * oracle.loss);
    const Worst worst = worst_gradient(model->units(), oracle.gradients);
    EXPECT_LT(worst.error, 1e-5) << worst.name;
    const auto wide = widened(*model);
    EXPECT_NEAR(run_backward(*wide, c.shape), oracle.loss, 1e-12 * oracle.loss);
    const Worst worst64 = worst_gradient(wide->units(), oracle.gradients);
    EXPECT_LT(worst64.error, 1e-10) << worst64.name;
  }
}

TEST(Gpt, Bfloat16GradientsMatchFloat64) {
  const Case& c = kCases[0];
  const auto model = make_model(c.config, DType::bfloat16, make_arena()), wide = widened(*model);
  const double loss = run_backward(*model, c.shape), loss64 = run_backward(*wide, c.shape);
  EXPECT_NEAR(loss, loss64, 0.02 * loss64);
  std::vector<double> reference;
  for (const FlatUnit& unit : wide->units()) std::ranges::copy(host_values(unit.grads), std::back_inserter(reference));
  const Worst worst = worst_gradient(model->units(), reference);
  EXPECT_LT(worst.error, 0.05) << worst.name;
}

TEST(Gpt, RecomputationIsExact) {
  for (const DType dtype : {DType::float32, DType::bfloat16}) {
    ModelConfig config = kCases[0].config;
    config.dropout = 0.2;
    std::vector<std::byte> expected;
    for (const Recompute mode :
         {Recompute::none, Recompute::activation, Recompute::activation_norm, Recompute::attention, Recompute::block}) {
      config.recompute = mode;
      auto model = make_model(config, dtype, make_arena());
      model->set_step({.seed = 5, .step = 3, .first_sequence = 8, .training = true});
      run_backward(*model, {3, 16});
      const std::vector<std::byte> bytes = gradient_bytes(*model);
      if (mode == Recompute::none) expected = bytes;
      EXPECT_TRUE(bytes == expected) << "mode " << static_cast<int>(mode) << " in " << to_string(dtype);
    }
  }
}

TEST(Gpt, DropoutChangesLossOnlyInTraining) {
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

// Gradients of a step of two micro-batches.
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

// All kernels except oneDNN's GEMMs are bitwise independent of the number of threads.
TEST(Gpt, GradientsAreIndependentOfThreadsAndDeferral) {
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

TEST(Gpt, DecodingWithCacheMatchesForwardPass) {
  const Case& c = kCases[1];
  const ArenaPtr arena = make_arena();
  auto model = make_model(c.config, DType::float64, arena);
  const Tensor ids = random_ids({2, 90}, c.config.vocab, 1, arena);
  const NoGrad no_grad;
  const Tensor full_logits = model->logits(model->hidden(ids)).value().reshape({2, 90, c.config.vocab});
  TextCache first = model->cache(), second = model->cache();
  const std::array texts{&first, &second};
  int64_t at = 0;
  for (const int64_t length : {70, 1, 1, 17, 1}) {
    const Tensor next = model->decode(ids.narrow(1, at, length).contiguous(), texts);
    at += length;
    const std::vector<double> found = host_values(next), expected = host_values(full_logits.select(1, at - 1));
    ASSERT_EQ(found.size(), expected.size());
    for (size_t i = 0; i < found.size(); ++i) ASSERT_NEAR(found[i], expected[i], 1e-12);
  }
}

TEST(Gpt, RejectsMismatchedArguments) {
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
