// Traffic of a plan by theory: calls and bytes by axis and operation, in closed forms. (Bytes that each rank holds:
// train/memory.h.)
//
// Worked out from the model's sizes and the plan alone. S is the bytes of an array, n the data-parallel ranks; figures
// are sums over ranks. An all-reduce sends 2 (n - 1) S, by every algorithm; a reduce-scatter or an all-gather (n - 1)
// S, through a root (n - 1) S (1 + 1/n). Rajbhandari et al. 2020, sections 5 and 7.
#pragma once
#include <optional>
#include <string>
#include <vector>

#include "train/job.h"
#include "train/memory.h"
#include "train/usage.h"

namespace tessera {

// Traffic of `steps` steps of training, in the order of axes and operations; operations that the plan does not use are
// absent. `rows`: how often, in all of them, a token was sent to an expert on another rank; without it all experts are
// taken to be chosen alike.
std::vector<SentBytes> expected_bytes(const Job& job, int64_t steps, std::optional<int64_t> rows = {});
// Copies that each rank makes from the host's memory to its GPU in `steps` steps, with Offload::parameters: its
// shard of a unit for each use of it.
std::optional<SentBytes> expected_copies(const Job& job, int64_t steps);

}  // namespace tessera
