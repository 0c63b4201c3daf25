// Reads available memory and cgroup limits from kernel files.
#include "base/memory_limit.h"

#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <optional>

#include "base/error.h"

namespace tessera {

namespace fs = std::filesystem;
namespace {

std::optional<int64_t> number_in(const fs::path& file) {
  std::ifstream in(file);
  if (int64_t n = 0; in >> n) return n;
  return {};  // also for "max"
}

std::optional<int64_t> number_after(const std::string& name, const fs::path& file) {
  std::ifstream in(file);
  for (std::string word; in >> word; in.ignore(std::numeric_limits<std::streamsize>::max(), '\n'))
    if (int64_t n = 0; word == name && in >> n) return n;
  return {};
}

// The kernel first reclaims the inactive file pages of the page cache, so they count as available.
struct Names {
  const char *limit, *used, *reclaimable;
};
constexpr Names kVersion1{"memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"};
constexpr Names kVersion2{"memory.max", "memory.current", "inactive_file"};

// Applies the limits of a cgroup and its ancestors. In a container, `path` may be the host's path; the cgroup is then
// `top`.
void apply_cgroup(MemoryLimit& result, const fs::path& top, const std::string& path, const Names& names) {
  for (fs::path group = fs::path(path).relative_path().lexically_normal();; group = group.parent_path()) {
    const fs::path at = group.empty() || group == "." ? top : top / group;
    const std::optional<int64_t> limit = number_in(at / names.limit);
    if (limit) {
      const int64_t used = number_in(at / names.used).value_or(0),
                    cached = number_after(names.reclaimable, at / "memory.stat").value_or(0);
      const int64_t left = std::max<int64_t>(0, *limit - std::max<int64_t>(0, used - cached));
      if (left < result.bytes) result = {left, (at / names.limit).string() + " leaves"};
    }
    if (group.empty()) return;
  }
}

// The C library's stack size per thread.
int64_t stack_size() {
  constexpr int64_t kWithoutLimit = 2 << 20;
  rlimit limit{};
  const bool known = getrlimit(RLIMIT_STACK, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY;
  return known ? static_cast<int64_t>(limit.rlim_cur) : kWithoutLimit;
}

}  // namespace

int64_t MemorySources::limit_of_address_space() {
  rlimit limit{};
  constexpr auto kMax = std::numeric_limits<int64_t>::max();
  if (getrlimit(RLIMIT_AS, &limit) != 0 || limit.rlim_cur > static_cast<rlim_t>(kMax)) return kMax;
  return static_cast<int64_t>(limit.rlim_cur);
}

MemoryLimit memory_limit(int64_t threads, const MemorySources& s) {
  MemoryLimit result;
  if (const auto kilobytes = number_after("MemAvailable:", s.proc / "meminfo"))
    result = {*kilobytes * 1024, "this machine has available"};
  std::ifstream groups(s.proc / "self/cgroup");
  for (std::string line; std::getline(groups, line);) {  // "4:memory:/job", "0::/job"
    const size_t first = line.find(':'), second = line.find(':', first + 1);
    if (second == std::string::npos) continue;
    const std::string kinds = "," + line.substr(first + 1, second - first - 1) + ",", path = line.substr(second + 1);
    if (kinds == ",,") apply_cgroup(result, s.cgroups, path, kVersion2);
    if (kinds.find(",memory,") != std::string::npos) apply_cgroup(result, s.cgroups / "memory", path, kVersion1);
  }
  if (s.address_space < std::numeric_limits<int64_t>::max()) {
    const int64_t used = number_in(s.proc / "self/statm").value_or(0) * sysconf(_SC_PAGESIZE);
    const int64_t left = std::max<int64_t>(0, s.address_space - used - threads * stack_size());
    if (left < result.bytes) result = {left, "the limit on address space (ulimit -v) leaves"};
  }
  return result;
}

void require_memory(const std::string& what, int64_t bytes, int64_t growth, const MemorySources& sources) {
  constexpr int64_t kAlwaysThere = 1 << 20;
  if (bytes <= kAlwaysThere) return;
  const MemoryLimit limit = memory_limit(0, sources);
  if (bytes > limit.bytes / growth)
    throw InputError(what + ": " + std::to_string(bytes) + " bytes; expected at most " +
                     std::to_string(limit.bytes / growth) + ", 1/" + std::to_string(growth) + " of the memory that " +
                     limit.of);
}

}  // namespace tessera
