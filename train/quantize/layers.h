// A trained model's linear layers in 4 bits, by GPTQ or by plain rounding: those of attention and of the feed-forward
// layers, not embeddings, head and norms.
//
// Layer by layer, and within a layer linear by linear, in the order in which they compute: the inputs of one, as GPTQ
// sees them, come from the calibration data through all linears before it, already rounded (Frantar et al. 2022,
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
  int64_t group = 128;    // columns that share a scale; -1: all of a row
  double damping = 0.01;  // the damping of GPTQ
  int64_t windows = 128;  // windows of the calibration data, spread over it evenly
  int64_t at_once = 4;    // windows of one forward pass
};

struct QuantizedWeight {
  std::string name;  // the parameter's name
  Int4Matrix matrix;
  double error = 0;  // error of the layer's output on the calibration data: output_error()
};

// The weights of all linear layers within the layers of a model that is whole, has memory and no adapters, in order. In
// the model they are replaced by what they were rounded to. Tokens that predict nothing (targets that are ignored) do
// not count as inputs. Rounding to nearest goes without calibration data (null), and then knows no errors. `done` (may
// be empty) hears of each weight. Throws Error: for rows that begin documents or are longer than the model's context,
// FieldError ("group") where groups do not divide a layer's inputs, and as gptq() does. Cost: a forward pass of all
// windows for each linear and one more, through one layer; 4 C bytes for each of their tokens; the inputs' squares and
// GPTQ for each weight.
std::vector<QuantizedWeight> quantize_layers(LanguageModel& model, const Rows* calibration,
                                             const QuantizeOptions& options,
                                             const std::function<void(const QuantizedWeight&)>& done = {});

// Whole tensors of a model whose frozen weights are in four bits: from numbers to bytes, and back.

// `numbers` with the bytes of what `config` holds in four bits, where uint8 is asked for: each weight is read and
// quantised whole, whatever is asked of it. The result may be asked by several threads.
FullTensors quantized(const ModelConfig& config, FullTensors numbers);

// `stored`, which has bytes of what `config` holds in four bits, with their numbers, where floating ones are asked for.
FullTensors dequantized(const ModelConfig& config, FullTensors stored);

}  // namespace tessera
