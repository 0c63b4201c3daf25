// Refusals of configurations that need more memory than a host has, with the nearest configuration that fits.
#pragma once
#include <cstdint>
#include <optional>
#include <string>

#include "base/memory_limit.h"
#include "train/config.h"

namespace tessera {

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
