// Memory is asked for before it is missed: what all ranks of this host will hold, against what they may use.
#pragma once
#include <optional>
#include <string>
#include <vector>

#include "train/memory_limit.h"
#include "train/rank_memory.h"

namespace tessera {

// What a run needs on one host: `ranks` of them, from `first` on; what rank 0 gathers when its activations are gone;
// and `more`, which is no rank's.
struct HostMemory {
  int64_t first = 0, ranks = 0;
  int64_t gathered = 0, more = 0;
  std::string more_is = {};  // "the oracle"
};

// Of a run that would not fit.
struct MemoryRefusal {
  std::string table;  // by rank and category, lines
  std::string line;   // what is needed and there, and the nearest that would fit
};

// Nothing where the job fits, or may: then it takes milliseconds. The job has a known vocabulary and is one that
// check() has not refused.
std::optional<MemoryRefusal> memory_refusal(const Job& job, const HostMemory& here, const MemoryLimit& limit);

// The same of a vocabulary that may not be known, and of what is held between steps alone: counted from two layers, so
// that it takes no time for any number of them.
std::optional<MemoryRefusal> least_refusal(const Job& job, int64_t ranks_here, const MemoryLimit& limit);

// Bytes that no plan of the job can do without, over all ranks: of the parameters, gradients and state of one model,
// and of what goes into each layer.
struct LeastMemory {
  double parameters = 0, trained = 0;  // numbers of them
  double values = 0, state = 0;  // bytes of all parameters, and of the optimizer's state for those that are trained
  double held = 0;               // bytes of both, and of gradients
  double activations = 0;
};
LeastMemory least_memory(const Job& job);
// Elements of all parameters of a model.
double parameters_of(const ModelConfig& config, const ModelFactory& make);

}  // namespace tessera
