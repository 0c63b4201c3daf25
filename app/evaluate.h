// The mean loss over a whole split, in windows of the context.
#pragma once
#include "data/token_file.h"
#include "models/gpt.h"
#include "parallel/comm/communicator.h"

namespace tessera {

// The same on every rank of `axis`, which take turns of `at_once` windows. Throws Error (not_finite).
double mean_loss(Gpt& model, Communicator& axis, const TokenFile& split, int64_t at_once, const ArenaPtr& arena);

}  // namespace tessera
