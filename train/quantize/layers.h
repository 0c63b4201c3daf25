// 4-bit quantization of a trained model's linears in attention and feed-forward layers, by GPTQ or round-to-nearest;
// not of embeddings, head and norms. GPTQ proceeds in execution order: each linear sees the calibration inputs that the
// preceding linears, already quantized, produce (Frantar et al. 2022, section 5).
#pragma once
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "data/loader.h"
#include "models/language_model.h"
#include "tensor/ops/quantize/gptq.h"
#include "train/checkpoint/full_state.h"

namespace tessera {

enum class Rounding : uint8_t { nearest, gptq };

struct QuantizeOptions {
  Rounding method = Rounding::gptq;
  int64_t group = 128;    // columns per scale; -1: the full row
  double damping = 0.01;  // of GPTQ
  int64_t windows = 128;  // calibration windows, evenly spaced
  int64_t at_once = 4;    // windows per forward pass
};

struct QuantizedWeight {
  std::string name;
  Int4Matrix matrix;
  double error = 0;  // of the layer's output on the calibration data: output_error()
};

// Quantizes all linears in the layers of an unsharded model without adapters and replaces their weights in the model by
// the dequantized values. Tokens with ignored targets do not count. Round-to-nearest accepts `calibration` = null and
// then reports no errors. `done` (may be empty) is called for each weight. Throws Error for rows with document starts
// or beyond the model's context, FieldError ("group") if the group size does not divide a layer's inputs, and as gptq()
// does. Cost per layer: one forward pass of all windows per linear and one more; 4 C bytes per token; X^T X and GPTQ
// per linear.
std::vector<QuantizedWeight> quantize_layers(LanguageModel& model, const Rows* calibration,
                                             const QuantizeOptions& options,
                                             const std::function<void(const QuantizedWeight&)>& done = {});

// Quantizes `values` when `config` stores the requested uint8 tensor in 4 bits; always reads and quantizes the full
// weight. Thread-safe.
FullTensors quantized(const ModelConfig& config, FullTensors values);

// Dequantizes the 4-bit tensors of `stored` when floating-point values are requested.
FullTensors dequantized(const ModelConfig& config, FullTensors stored);

}  // namespace tessera
