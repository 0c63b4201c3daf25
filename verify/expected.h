// What theory says of a plan: calls and bytes by axis and operation, and bytes held by each rank, in closed forms.
//
// Worked out from the model's sizes and the plan alone. S is the bytes of an array, n the data-parallel ranks; figures
// are sums over ranks. An all-reduce sends 2 (n - 1) S, by every algorithm; a reduce-scatter or an all-gather (n - 1)
// S, through a root (n - 1) S (1 + 1/n). Rajbhandari et al. 2020, sections 5 and 7.
#pragma once
#include <string>
#include <vector>

#include "train/job.h"
#include "train/usage.h"

namespace tessera {

// Of `steps` steps of training, in the order of axes and operations; operations that the plan does not use are absent.
std::vector<SentBytes> expected_bytes(const Job& job, int64_t steps);

struct HeldBytes {
  int64_t parameters = 0, gradients = 0, optimizer = 0;
  bool operator==(const HeldBytes&) const = default;
};
// Between two steps, of each rank.
std::vector<HeldBytes> expected_memory(const Job& job);

}  // namespace tessera
