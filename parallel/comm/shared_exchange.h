// A rank publishes the location of its arrays (SharedArrayRef), and its peers map the underlying file (tensor/arena.h,
// shared_region()) once.
#pragma once
#include <array>
#include <cstdint>
#include <map>
#include <mutex>
#include <vector>

#include "parallel/comm/meeting.h"
#include "tensor/arena.h"

namespace tessera {

// Plain data, because it resides in shared memory.
struct SharedArrayRef {
  int64_t process = 0;
  Region::File file = {};
  int64_t size = 0;
  int64_t in = -1, out = -1;  // offsets in the file; negative: no such array
  bool known() const { return file.descriptor >= 0; }
};
// Opens another process's file descriptor; negative, with errno, if the system forbids it.
int open_of_process(int64_t process, int descriptor);

// known() is false if the call's arrays are outside shareable regions.
SharedArrayRef make_shared_ref(const Call& call);

class PeerMemory : NotCopied {
 public:
  ~PeerMemory();

  // The local address of the mapped file. Thread-safe. Throws CommError if the system forbids mapping.
  std::byte* base(const SharedArrayRef& ref);

 private:
  struct Mapping {
    std::byte* base;
    size_t size;
  };
  std::mutex mutex_;
  std::map<std::pair<int64_t, int64_t>, Mapping> mapped_;  // by process and region id
};

// The direct exchange of ranks that are processes of one host, whose flags and posted calls reside in a shared memory
// window. Arrays in mappable memory (Communicator::make_arena()) are exchanged in place between two barriers
// (parallel/comm/meeting.h). If any rank's array is not mappable, the ranks exchange messages after the first barrier.
// Both paths add in rank order, as the thread transport does.

struct SharedPlace : RankState {
  std::array<SharedArrayRef, 2> refs;
};

class SharedExchange {
 public:
  // `places` are indexed by rank and mapped in this process. `peers`: null if arrays cannot be mapped. The transport
  // must outlive the exchange.
  SharedExchange(Transport& transport, std::vector<SharedPlace*> places, WaitOptions wait_options, PeerMemory* peers);
  // Returns the bytes counted as sent. Throws like Transport::direct().
  int64_t run(const Call& call);
  // Barrier that also checks that all ranks post the same call.
  void synchronize_for(const Call& call);

 private:
  bool in_place(const Call& call);

  Transport& transport_;
  std::vector<SharedPlace*> places_;
  PeerMemory* peers_;
  HostBarrier barrier_;
  InPlaceExchange in_place_;
};

}  // namespace tessera
