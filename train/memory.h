// Memory of every rank of a plan, predicted before the ranks start: persistent state by closed forms (Rajbhandari et
// al. 2020, section 5), the peak within a step by measure_stages().
#pragma once
#include <cstdint>
#include <limits>
#include <optional>
#include <string>
#include <vector>

#include "base/memory_limit.h"
#include "parallel/pipeline/schedule.h"
#include "train/config.h"

namespace tessera {

// Size of a rank's persistent state, in bytes or elements.
template <class T>
struct StateSize {
  T parameters{}, gradients{}, optimizer{};
  bool operator==(const StateSize&) const = default;
};
using MemoryByCategory = StateSize<int64_t>;
// The state on a data rank under a ZeRO stage: from stage 1 on its `shard` of the optimizer state, from stage 2 on also
// of the gradients, in stage 3 also of the parameters; everything else is `full`. `planner/` uses it for other
// frameworks too.
template <class T>
StateSize<T> state_with_zero(ZeroStage zero, const StateSize<T>& full, const StateSize<T>& shard) {
  return {.parameters = zero >= ZeroStage::three ? shard.parameters : full.parameters,
          .gradients = zero >= ZeroStage::two ? shard.gradients : full.gradients,
          .optimizer = zero >= ZeroStage::one ? shard.optimizer : full.optimizer};
}
std::vector<MemoryByCategory> expected_memory(const TrainConfig& job);

// Activations include logits and workspace.
struct RankMemory {
  bool operator==(const RankMemory&) const = default;
  MemoryByCategory held;
  int64_t activations = 0, communication = 0;
  int64_t total() const { return held.parameters + held.gradients + held.optimizer + activations + communication; }
};
// Peak memory of each rank, on its host or its GPU (excluding library workspaces), for a job with known vocabulary that
// passed check(). Takes milliseconds for any sizes, less if all layers are `alike`. Throws OutOfMemory if a rank needs
// more address space than this process may have.
std::vector<RankMemory> memory_of_ranks(const TrainConfig& job, bool alike = false);

// Peak memory of a pipeline rank. A single rank runs one micro-batch at a time through all stages as a dry run
// (cpu::DryRun) with the allocations of the plan's kernels (tensor/cpu/loops.h), so models larger than the machine and
// ranks on GPUs are measured in milliseconds. The peak follows from the rank's schedule: the tensors saved for each
// micro-batch in flight plus the maximum of the current pass. The plan itself is not executed, so a runtime that
// retains memory too long exceeds this prediction.
//
//   rank 0:   F0      F1      B0      F2      B1      B2          saved: between F and B of a micro-batch
//   holds    saved  2 saved  saved  2 saved  saved    0           the peak: saved + the maximum during F or B

// Bytes of one micro-batch and stage, excluding parameters, gradients and optimizer state. Maxima include received,
// saved and deferred tensors.
struct StageMemory {
  int64_t saved = 0;          // saved from F to B, or to I
  int64_t deferred = 0;       // from I to W
  int64_t forward = 0;        // maximum of F
  int64_t backward = 0;       // of B
  int64_t input = 0;          // of I
  int64_t weight = 0;         // of W
  int64_t packs = 0;          // persistent packed copies of the weights
  int64_t communication = 0;  // maximum over all passes and stages
};
// Measures every stage, without the data-axis strategy or with it on the given data rank. `alike`: all layers are
// equal, so more than five are extrapolated from four and five.
std::vector<StageMemory> measure_stages(const TrainConfig& job, std::optional<int> data_rank = {}, bool alike = false);

// The activations of a micro-batch that a rank sends to the next stage, in elements and in bytes.
template <class T>
T handed_elements(const Plan& p, T sequences, T context, T channels) {
  return sequences * context / static_cast<T>(p.cp) * channels / static_cast<T>(p.sp ? p.tp : 1);
}
int64_t handed_bytes(const TrainConfig& job);

std::vector<int64_t> peaks_of_ranks(const Schedule& plan, const std::vector<StageMemory>& stages, int64_t handed);

// Requirements of one host: its ranks [first, first + ranks); `gathered`: bytes that rank 0 gathers after freeing
// activations; `more`: bytes in addition to the ranks'.
struct HostMemory {
  int64_t first = 0, ranks = 0;
  int64_t gathered = 0, more = 0;
  std::string more_is = {};  // "the oracle"
};

struct MemoryRefusal {
  std::string table;  // lines by rank and category
  std::string line;   // required and available memory, and the nearest configuration that fits
};

// Empty if the job may fit. Requires a known vocabulary and a job that passed check(). Takes milliseconds.
std::optional<MemoryRefusal> memory_refusal(const TrainConfig& job, const HostMemory& here, const MemoryLimit& limit);

// The same for a possibly unknown vocabulary, from persistent state; extrapolated from two layers, so the cost is
// independent of their number.
std::optional<MemoryRefusal> minimum_refusal(const TrainConfig& job, int64_t local_world_size,
                                             const MemoryLimit& limit);

// Lower bound over all plans of a job's total memory: one replica's parameters, gradients and state, and the input of
// each layer.
struct MinimumMemory {
  double parameters = 0, trained = 0;  // elements
  double values = 0, state = 0;        // bytes of all parameters, and of the optimizer state of trainable ones
  double held = 0;                     // bytes of values, state and gradients
  double activations = 0;
};
MinimumMemory minimum_memory(const TrainConfig& job);

}  // namespace tessera
