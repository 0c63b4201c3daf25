// How much more memory this process may use: the least of what the machine has available, what the cgroups around it
// leave (versions 1 and 2), and what its limit on address space leaves (ulimit -v).
#pragma once
#include <cstdint>
#include <filesystem>
#include <limits>
#include <optional>
#include <string>
#include <vector>

#include "train/memory.h"

namespace tessera {

struct MemoryLimit {
  int64_t bytes = std::numeric_limits<int64_t>::max();
  std::string of = {};  // "the machine has available", "/sys/fs/cgroup/job/memory.max leaves"
};

// The system's own words on memory. A source that is not there, or says nothing, is no limit.
struct MemorySources {
  std::filesystem::path proc = "/proc", cgroups = "/sys/fs/cgroup";
  int64_t address_space = limit_of_address_space();

  // RLIMIT_AS; the largest number where there is none.
  static int64_t limit_of_address_space();
};
// `threads`: how many will be started, each of which takes addresses for its stack.
MemoryLimit memory_limit(int64_t threads = 0, const MemorySources& sources = {});

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
