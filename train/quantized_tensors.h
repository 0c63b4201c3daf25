// Whole tensors of a model whose frozen weights are in four bits: from numbers to bytes, and back.
#pragma once
#include "models/language_model.h"
#include "train/whole_state.h"

namespace tessera {

// `numbers` with the bytes of what `config` holds in four bits, where uint8 is asked for: each weight is read and
// quantised whole, whatever is asked of it. The result may be asked by several threads.
WholeTensors quantized(const ModelConfig& config, WholeTensors numbers);

// `stored`, which has bytes of what `config` holds in four bits, with their numbers, where floating ones are asked for.
WholeTensors dequantized(const ModelConfig& config, WholeTensors stored);

}  // namespace tessera
