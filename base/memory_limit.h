// Memory that this process may still allocate, and the resulting bound on files read in full.
#pragma once
#include <cstdint>
#include <filesystem>
#include <limits>
#include <string>

namespace tessera {

// The minimum of the machine's available memory, the headroom of all enclosing cgroups (v1 and v2) and the headroom of
// RLIMIT_AS (ulimit -v).
struct MemoryLimit {
  int64_t bytes = std::numeric_limits<int64_t>::max();
  std::string of = {};  // "this machine has available", "/sys/fs/cgroup/job/memory.max leaves"
};

// A source that is missing or unreadable imposes no limit.
struct MemorySources {
  std::filesystem::path proc = "/proc", cgroups = "/sys/fs/cgroup";
  int64_t address_space = limit_of_address_space();

  // RLIMIT_AS; INT64_MAX if unlimited.
  static int64_t limit_of_address_space();
};
// `threads`: number of threads yet to be started, each of which reserves address space for its stack.
MemoryLimit memory_limit(int64_t threads = 0, const MemorySources& sources = {});

// Throws InputError, naming `what` and the bound, if parsing `bytes` of text, which needs up to `growth` times its
// size, would exceed the available memory. 1 MiB is always allowed.
constexpr int64_t kParsedGrowth = 16;
void require_memory(const std::string& what, int64_t bytes, int64_t growth = kParsedGrowth,
                    const MemorySources& sources = {});

}  // namespace tessera
