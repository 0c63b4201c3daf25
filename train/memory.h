// Memory of every rank of a plan, and the available memory. Predicted before the ranks start: state held between steps
// by closed forms over the model's sizes and the plan (Rajbhandari et al. 2020, section 5), and the peak within a step
// by measure_stages().
#pragma once
#include <limits>

#include "base/memory_limit.h"
#include "parallel/pipeline/schedule.h"
#include "train/config.h"

namespace tessera {

// --- persistent state ---

struct MemoryByCategory {
  int64_t parameters = 0, gradients = 0, optimizer = 0;
  bool operator==(const MemoryByCategory&) const = default;
};
// Between steps, by rank.
std::vector<MemoryByCategory> expected_memory(const Job& job);

// Peak memory. Activations include logits and workspace.
struct RankMemory {
  bool operator==(const RankMemory&) const = default;
  MemoryByCategory held;
  int64_t activations = 0, communication = 0;
  int64_t total() const { return held.parameters + held.gradients + held.optimizer + activations + communication; }
};
// Memory of each rank, on its host or its GPU (excluding library workspaces), of a job with a known vocabulary that
// passed check(). Takes milliseconds and no memory for any sizes, less if all layers are `alike`. Throws OutOfMemory if
// a rank needs more address space than this process may have.
std::vector<RankMemory> memory_of_ranks(const Job& job, bool alike = false);

// --- passes ---

// Peak memory of a pipeline rank, from measurements of single micro-batches on its stages.
//
// A single rank runs one micro-batch at a time through all stages as a dry run (cpu::DryRun): nothing is computed or
// sent, so models larger than the machine and ranks on GPUs are measured in milliseconds with the allocations of
// their own kernels (tensor/cpu/loops.h). The peak then follows by counting along the rank's schedule: the tensors
// saved for each micro-batch in flight plus the maximum of the current pass. The plan itself is not executed, so a
// runtime that retains memory too long exceeds this prediction.
//
//   rank 0:   F0      F1      B0      F2      B1      B2          kept: between F and B of a micro-batch
//   holds    kept   2 kept    kept  2 kept    kept     0          the peak: kept + the maximum during F or B

// Bytes of one micro-batch and stage, excluding parameters, gradients and optimizer state.
struct StageMemory {
  int64_t kept = 0;           // saved from F to B, or to I
  int64_t deferred = 0;       // from I to W
  int64_t forward = 0;        // maximum during F,
  int64_t backward = 0;       // B,
  int64_t input = 0;          // I
  int64_t weight = 0;         // and W; each including received, saved and deferred tensors
  int64_t packs = 0;          // persistent packed copies of the weights
  int64_t communication = 0;  // maximum of communication buffers among these, over all passes and stages
};
// Measures every stage of the plan, without the data-axis strategy or with it on the given data rank. `alike`: all
// layers are equal, so more than five are extrapolated from four and five.
std::vector<StageMemory> measure_stages(const Job& job, std::optional<int> data_rank = {}, bool alike = false);

// Bytes of the activations between stages.
int64_t handed_bytes(const Job& job);

// Peak of each pipeline rank.
std::vector<int64_t> peaks_of_ranks(const Schedule& plan, const std::vector<StageMemory>& stages, int64_t handed);

// --- the limit ---

// Memory is asked for before it is missed: what all ranks of this host will hold, against what they may use.

// Memory that a run needs on one host: `ranks` of its ranks, from `first` on; what rank 0 gathers when its activations
// are gone; and `more`, which is no rank's.
struct HostMemory {
  int64_t first = 0, ranks = 0;
  int64_t gathered = 0, more = 0;
  std::string more_is = {};  // description of `more`: "the oracle"
};

// The error for a run that does not fit.
struct MemoryRefusal {
  std::string table;  // lines by rank and category
  std::string line;   // required and available memory, and the nearest configuration that fits
};

// Empty if the job may fit. Takes milliseconds then. Requires a known vocabulary and a job that passed check().
std::optional<MemoryRefusal> memory_refusal(const Job& job, const HostMemory& here, const MemoryLimit& limit);

// The same for a vocabulary that may be unknown, from persistent state alone; extrapolated from two layers, so the cost
// is independent of their number.
std::optional<MemoryRefusal> least_refusal(const Job& job, int64_t local_world_size, const MemoryLimit& limit);

// Lower bound over all plans of a job's total memory: parameters, gradients and state of one replica, and the input of
// each layer.
struct MinimumMemory {
  double parameters = 0, trained = 0;  // number of elements
  double values = 0, state = 0;        // bytes of all parameters, and of the optimizer state of trainable ones
  double held = 0;                     // bytes of both and of gradients
  double activations = 0;
};
MinimumMemory least_memory(const Job& job);

}  // namespace tessera
