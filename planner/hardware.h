// What ranks compute on and send over: numbers of data sheets and of public microbenchmarks, each with its source in
// planner/hardware/NAME.toml, or measured on this machine.
#pragma once
#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

namespace tessera::planner {

// Attention over s tokens runs at `flops` s / (s + half_tokens).
struct AttentionRate {
  double flops = 0, half_tokens = 0;
  bool operator==(const AttentionRate&) const = default;
};

struct Hardware {
  std::string name = {};
  double peak_flops = 0;  // FLOP/s of dense products of the training dtype
  double hbm_bytes_per_s = 0, memory_bytes = 0;
  int64_t multiprocessors = 0;  // that share the tiles of a product
  int64_t ranks_per_node = 0;
  double intra_bytes_per_s = 0, inter_bytes_per_s = 0;  // of a rank, in one direction, within a node and between nodes
  double intra_latency_s = 0, inter_latency_s = 0;      // of a message
  double launch_s = 0;                                  // of a kernel, or of a call, where the device waits for it
  double product_efficiency = 0.85;                     // of peak_flops, that long products reach
  double memory_efficiency = 0.85;                      // of hbm_bytes_per_s, that elementwise kernels reach
  double intra_efficiency = 0.78, inter_efficiency = 0.85;  // of the links' rates, that collectives reach
  double contention = 0.15;  // of the time of communication that hides: what the compute beside it takes longer
  std::map<std::string, AttentionRate> attention = {};  // by kernel: unfused, flash1, flash2, cudnn, ...
  double reserved_bytes = 0;                            // of memory_bytes: the driver's and the libraries'
  int64_t processors = 0;                               // that the ranks of a node share; 0: each has its own
  double range_fastest = 1, range_slowest = 1;          // times a predicted time; both 1: measured here
  bool operator==(const Hardware&) const = default;
};

// "a100-40", "a100-80", ..., in the order of the alphabet.
const std::vector<std::string>& hardware_names();
// Throws FieldError that lists the names.
Hardware hardware_named(std::string_view name);
// Of a file of KEY = VALUE lines that `path` names; what it does not say is as `base` in it says, or as above.
Hardware hardware_from_file(std::string_view text, const std::string& path);
// Throws FieldError for rates, sizes and times that cannot be.
void check(const Hardware& hardware);

}  // namespace tessera::planner
