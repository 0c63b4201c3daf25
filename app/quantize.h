// `checkpoint quantize`: a model whose layers are in 4 bits, as a folder that other programs load too.
#pragma once
#include "app/checkpoint_options.h"

namespace tessera {

// Throws Error (usage) for a model that has adapters or is quantised already, and for groups or sizes that the format
// cannot hold; InputError and OutputError.
void quantize(const CheckpointOptions& options);

}  // namespace tessera
