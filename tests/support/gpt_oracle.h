// The loss and gradients of a GPT-2 by an independent PyTorch model (tests/compare/gpt_pytorch.py), on given weights.
#pragma once

#include "nn/parameter.h"
#include "tests/support/python.h"

namespace tessera::test {

struct GptShape {
  int64_t layers, heads, channels, context, vocab;
};

// Gradients lie as in the units: unit after unit, each as long as its buffers.
struct OracleResult {
  double loss32 = 0, loss64 = 0;
  std::vector<float> grads32;
  std::vector<double> grads64;
};

inline std::string oracle_index(const GptShape& shape, std::span<const FlatUnit> units, int64_t batch, int64_t tokens) {
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
inline OracleResult gpt_oracle(const GptShape& shape, std::span<const FlatUnit> units, const Tensor& inputs,
                               const Tensor& targets) {
  const Exchange exchange;
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
inline Worst worst_gradient(std::span<const FlatUnit> units, std::span<const double> reference) {
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

}  // namespace tessera::test
