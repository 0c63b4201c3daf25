// Memory that this process may still use, and the bound that follows for files that are read as a whole.
#pragma once
#include <cstdint>
#include <filesystem>
#include <limits>
#include <string>

namespace tessera {

// How much more memory this process may use: the least of what the machine has available, what the cgroups around it
// leave (versions 1 and 2), and what its limit on address space leaves (ulimit -v).
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

// Throws InputError, which names `what` and the bound, if `bytes` of text, which take up to `growth` times as many
// while they are parsed, are more than the memory allows. 1 MiB is always allowed.
constexpr int64_t kParsedGrowth = 16;
void require_memory(const std::string& what, int64_t bytes, int64_t growth = kParsedGrowth,
                    const MemorySources& sources = {});

}  // namespace tessera
