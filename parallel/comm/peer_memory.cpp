// Mapping through /proc: the descriptor of another process is a link to its file there, open to processes of one user.
#include "parallel/comm/peer_memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

namespace tessera {

Reach reach_of(const Call& call) {
  if (!call.region || call.region->file().descriptor < 0) return {};
  const auto offset = [&](const std::byte* p) { return p ? p - call.region->base() : int64_t{-1}; };
  return {.process = getpid(),
          .file = call.region->file(),
          .size = call.region->capacity(),
          .in = offset(call.in),
          .out = offset(call.out)};
}

int open_of_process(int64_t process, int descriptor) {
  return open(("/proc/" + std::to_string(process) + "/fd/" + std::to_string(descriptor)).c_str(), O_RDWR | O_CLOEXEC);
}

PeerMemory::~PeerMemory() {
  for (const auto& [key, mapping] : mapped_) munmap(mapping.base, mapping.size);
}

std::byte* PeerMemory::base(const Reach& reach) {
  const std::lock_guard lock(mutex_);
  const std::pair<int64_t, int64_t> key(reach.process, reach.file.number);
  if (const auto found = mapped_.find(key); found != mapped_.end()) return found->second.base;
  const auto size = static_cast<size_t>(reach.size);
  void* p = MAP_FAILED;
  if (const int file = open_of_process(reach.process, reach.file.descriptor); file >= 0) {
    p = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, file, 0);
    const int cause = errno;
    close(file);
    errno = cause;
  }
  if (p == MAP_FAILED)
    throw CommError("cannot map the memory of process " + std::to_string(reach.process) + ": " + std::strerror(errno));
  madvise(p, size, MADV_HUGEPAGE);  // a hint
  auto* const base = static_cast<std::byte*>(p);
  mapped_[key] = {base, size};
  return base;
}

}  // namespace tessera
