// In-place exchange: maps files of peers through /proc/PID/fd, which requires the same user.
#include "parallel/comm/shared_exchange.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <cstring>
#include <map>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "parallel/comm/algorithms.h"

namespace tessera {

SharedArrayRef make_shared_ref(const Call& call) {
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

std::byte* PeerMemory::base(const SharedArrayRef& ref) {
  const std::lock_guard lock(mutex_);
  const std::pair<int64_t, int64_t> key(ref.process, ref.file.number);
  if (const auto found = mapped_.find(key); found != mapped_.end()) return found->second.base;
  const auto size = static_cast<size_t>(ref.size);
  void* p = MAP_FAILED;
  if (const int file = open_of_process(ref.process, ref.file.descriptor); file >= 0) {
    p = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, file, 0);
    const int cause = errno;
    close(file);
    errno = cause;
  }
  if (p == MAP_FAILED)
    throw CommError("cannot map the memory of process " + std::to_string(ref.process) + ": " + std::strerror(errno));
  madvise(p, size, MADV_HUGEPAGE);  // only a hint
  auto* const base = static_cast<std::byte*>(p);
  mapped_[key] = {base, size};
  return base;
}

SharedExchange::SharedExchange(Transport& transport, std::vector<SharedPlace*> places, WaitOptions wait_options,
                               PeerMemory* peers)
    : transport_(transport),
      places_(std::move(places)),
      peers_(peers),
      barrier_(transport, transport.rank(), {places_.begin(), places_.end()}, std::move(wait_options),
               [&transport] { transport.fail(""); }),
      in_place_(transport.size(), transport.rank()) {}

void SharedExchange::synchronize_for(const Call& call) {
  barrier_.post(call);
  barrier_.wait();
}

// Returns false if an array is not mappable.
bool SharedExchange::in_place(const Call& call) {
  const auto ref = [&](int r) -> SharedArrayRef& {
    return places_[static_cast<size_t>(r)]->refs[barrier_.calls() % 2];
  };
  const int n = transport_.size(), me = transport_.rank();
  for (int r = 0; r < n; ++r)
    if (!ref(r).known()) return false;
  for (int r = 0; r < n; ++r) {
    Call& peer = in_place_.peer_call(r) = call;
    if (r == me) continue;
    std::byte* const base = peers_->base(ref(r));
    peer.in = ref(r).in < 0 ? nullptr : base + ref(r).in;
    peer.out = ref(r).out < 0 ? nullptr : base + ref(r).out;
  }
  in_place_.run(call);
  barrier_.wait();
  return true;
}

int64_t SharedExchange::run(const Call& call) {
  const int me = transport_.rank();
  places_[static_cast<size_t>(me)]->refs[(barrier_.calls() + 1) % 2] =
      peers_ ? make_shared_ref(call) : SharedArrayRef{};
  synchronize_for(call);
  if (call.op != Op::barrier && !in_place(call)) return direct_by_messages(transport_, call);
  return sent_directly(call, transport_.size(), me);
}

}  // namespace tessera
