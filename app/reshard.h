// `checkpoint reshard`: a run whose files are in parts, one for each rank of a layout, or whole again.
#pragma once
#include "app/checkpoint_options.h"

namespace tessera {

// The newest checkpoint of FROM as a new run; with no layout among the options its files are whole. One tensor is in
// memory at a time. Throws Error (usage) for a layout that cannot be, InputError, and OutputError.
void reshard(const CheckpointOptions& o);

}  // namespace tessera
