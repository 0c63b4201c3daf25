// 4-bit quantization of a trained model's linear layers in attention and feed-forward layers, by GPTQ or
// round-to-nearest. Embeddings, head and norms are not quantized. Linears are processed in execution order: GPTQ sees
// the inputs that the calibration data produces through all preceding linears, already quantized (Frantar et al. 2022,
// section 5).
#pragma once

#include "data/token_file.h"
#include "models/language_model.h"
#include "tensor/ops/quantize/gptq.h"
#include "train/checkpoint/state.h"

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
  std::string name;  // of the parameter
  Int4Matrix matrix;
  double error = 0;  // of the layer's output on the calibration data: output_error()
};

// Quantizes the weights of all linears in the layers of an unsharded model without adapters, in order, and replaces
// them in the model by their dequantized values. Ignored targets do not count as inputs. Round-to-nearest accepts
// `calibration` = null and then reports no errors. `done` (may be empty) is called for each weight. Throws Error for
// rows that begin documents or exceed the model's context, FieldError ("group") if the group size does not divide a
// layer's inputs, and as gptq() does. Cost: one forward pass of all windows through one layer per linear plus one; 4 C
// bytes for each of their tokens; the inputs' squares and GPTQ for each weight.
std::vector<QuantizedWeight> quantize_layers(LanguageModel& model, const Rows* calibration,
                                             const QuantizeOptions& options,
                                             const std::function<void(const QuantizedWeight&)>& done = {});

// Full tensors of a model with frozen 4-bit weights: conversion between floating-point values and stored bytes.

// Quantizes `numbers` on request of uint8 tensors that `config` stores in 4 bits; always reads and quantizes the full
// weight. Thread-safe.
FullTensors quantized(const ModelConfig& config, FullTensors numbers);

// The reverse: dequantizes the 4-bit tensors of `stored` on request of floating-point values.
FullTensors dequantized(const ModelConfig& config, FullTensors stored);

}  // namespace tessera
