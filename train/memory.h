// Memory: what every rank of a plan holds, what its passes add, and how much of it there is. All of it is known before
// there is a rank: between two steps by closed forms, worked out from the model's sizes and the plan (Rajbhandari et
// al. 2020, section 5), and inside of a step by measure_stages().
#pragma once
#include <limits>

#include "parallel/pipeline/schedule.h"
#include "tensor/memory_limit.h"
#include "train/job.h"

namespace tessera {

// --- what is held ---

struct MemoryByCategory {
  int64_t parameters = 0, gradients = 0, optimizer = 0;
  bool operator==(const MemoryByCategory&) const = default;
};
// Between two steps, of each rank.
std::vector<MemoryByCategory> expected_memory(const Job& job);

// At its peak. Activations are all that passes hold: of layers, of logits, and workspace.
struct RankMemory {
  bool operator==(const RankMemory&) const = default;
  MemoryByCategory held;
  int64_t activations = 0, communication = 0;
  int64_t total() const { return held.parameters + held.gradients + held.optimizer + activations + communication; }
};
// The memory of each rank, on its host or its GPU (there without what libraries take while they compute), of a job with
// a known vocabulary that check() has not refused. Takes milliseconds and no memory, whatever the sizes; fewer where
// the model's layers are `alike`. Throws OutOfMemory where a rank needs more addresses than this process may have.
std::vector<RankMemory> memory_of_ranks(const Job& job, bool alike = false);

// --- what passes add ---

// The peak of a pipeline rank's memory, from what single micro-batches hold of its stages.
//
// One rank alone takes one micro-batch after another through all stages, so that what each pass takes and gives back
// is seen by itself; the ranks that it would speak to are not there, and nothing is computed (cpu::Idle): a model
// that is larger than the machine has its figures in milliseconds, and so has a rank on a GPU, whose ops take what
// they take there (tensor/cpu/loops.h). The rest is counting: a rank goes through its list, and holds of every
// micro-batch what it has between its passes, and the most that the pass under way takes. Nothing is run in the
// order of the plan, so a runtime that keeps what it should have let go is seen.
//
//   rank 0:   F0      F1      B0      F2      B1      B2          kept: between F and B of a micro-batch
//   holds    kept   2 kept    kept  2 kept    kept     0          the peak: kept + the most during F or B

// Bytes of one micro-batch and stage, beside parameters, gradients and optimizer state.
struct StageMemory {
  int64_t kept = 0;           // from F to B, or to I
  int64_t deferred = 0;       // from I to W
  int64_t forward = 0;        // the most during F,
  int64_t backward = 0;       // during B,
  int64_t input = 0;          // during I,
  int64_t weight = 0;         // and during W; each with what is received, kept and deferred
  int64_t packs = 0;          // packed copies of the weights, which stay
  int64_t communication = 0;  // the most of all this that is for other ranks, in any pass of any stage
};
// Measures every stage of the plan, without what the strategy of the data axis does, or with what it does on a rank of
// that axis. `alike`: the model's layers are, so that what more than five of them hold follows from four and from five.
std::vector<StageMemory> measure_stages(const Job& job, std::optional<int> data_rank = {}, bool alike = false);

// Bytes that one stage hands to the next.
int64_t handed_bytes(const Job& job);

// The most that each pipeline rank holds at a time.
std::vector<int64_t> peaks_of_ranks(const Schedule& plan, const std::vector<StageMemory>& stages, int64_t handed);

// --- the limit ---

// Memory is asked for before it is missed: what all ranks of this host will hold, against what they may use.

// Memory that a run needs on one host: `ranks` of its ranks, from `first` on; what rank 0 gathers when its activations
// are gone; and `more`, which is no rank's.
struct HostMemory {
  int64_t first = 0, ranks = 0;
  int64_t gathered = 0, more = 0;
  std::string more_is = {};  // "the oracle"
};

// The refusal of a run that would not fit.
struct MemoryRefusal {
  std::string table;  // by rank and category, lines
  std::string line;   // memory that is needed and there, and the nearest that would fit
};

// Nothing where the job fits, or may: then it takes milliseconds. The job has a known vocabulary and is one that
// check() has not refused.
std::optional<MemoryRefusal> memory_refusal(const Job& job, const HostMemory& here, const MemoryLimit& limit);

// A refusal for a vocabulary that may not be known, by the bytes that are held between steps alone: counted from two
// layers, so that it takes no time for any number of them.
std::optional<MemoryRefusal> least_refusal(const Job& job, int64_t local_world_size, const MemoryLimit& limit);

// Bytes that no plan of the job can do without, over all ranks: of the parameters, gradients and state of one model,
// and of what goes into each layer.
struct MinimumMemory {
  double parameters = 0, trained = 0;  // numbers of them
  double values = 0, state = 0;  // bytes of all parameters, and of the optimizer's state for those that are trained
  double held = 0;               // bytes of both, and of gradients
  double activations = 0;
};
MinimumMemory least_memory(const Job& job);

}  // namespace tessera
