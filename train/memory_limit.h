// How much more memory this process may use: the least of what the machine has available, what the cgroups around it
// leave (versions 1 and 2), and what its limit on address space leaves (ulimit -v).
#pragma once
#include <cstdint>
#include <filesystem>
#include <limits>
#include <string>

namespace tessera {

struct MemoryLimit {
  int64_t bytes = std::numeric_limits<int64_t>::max();
  std::string of = {};  // "the machine has available", "/sys/fs/cgroup/job/memory.max leaves"
};

// Where the system says so. What is not there, or says nothing, is no limit.
struct MemorySources {
  std::filesystem::path proc = "/proc", cgroups = "/sys/fs/cgroup";
  int64_t address_space = limit_of_address_space();

  // RLIMIT_AS; the largest number where there is none.
  static int64_t limit_of_address_space();
};
// `threads`: how many will be started, each of which takes addresses for its stack.
MemoryLimit memory_limit(int64_t threads = 0, const MemorySources& sources = {});

}  // namespace tessera
