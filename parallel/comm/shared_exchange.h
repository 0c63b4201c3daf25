// A rank publishes the location of its arrays (SharedArrayRef), and its peers map the underlying file (tensor/arena.h,
// shared_region()) once.
#pragma once
#include <array>
#include <cstdint>
#include <map>
#include <mutex>
#include <span>
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

// Not known() if the call's arrays are outside shareable regions.
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

// The direct exchange of ranks that are processes of one host, with a shared memory window.
//
// Large arrays in mappable memory (Communicator::make_arena()) are exchanged in place between two barriers
// (parallel/comm/meeting.h). If any rank's array is not mappable, or too small to be worth a second barrier, the data
// is copied through the window, in which each rank has two slots. In each round a rank writes the next block of its
// array to the current slot, raises its flag, waits for the flags of the others, and reads its data from their slots:
//
//   rank 0   put 0 | barrier | take 0, put 1 | barrier | take 1, put 2 | ...        slots  0 1 0 1 ...
//   rank 1   put 0 | barrier | take 0, put 1 | barrier | take 1, put 2 | ...
//
// A rank that reaches a barrier has read all data of the previous round, so two slots suffice, no rank waits for the
// end of a call, and a call of one block costs one barrier (an all-reduce of more than two ranks: two). A block fits
// into the cache, so arrays cross the memory bus once. Sums are added in rank order, as in the thread transport.

inline constexpr int64_t kSlotBytes = 128 << 10;
inline constexpr int64_t kInPlaceBytes = 8 << 10;  // minimum array size for the in-place exchange

struct alignas(4096) SharedPlace : RankState {
  std::array<SharedArrayRef, 2> refs;
  alignas(4096) std::array<std::array<std::byte, kSlotBytes>, 2> slots;
};

class SharedExchange {
 public:
  // `places` are indexed by rank and mapped in this process. `peers`: null if everything uses the window. The transport
  // must outlive the exchange.
  SharedExchange(Transport& transport, std::vector<SharedPlace*> places, WaitOptions wait_options, PeerMemory* peers);
  int ranks() const { return n_; }
  // Returns the bytes counted as sent. Throws like Transport::direct().
  int64_t run(const Call& call);
  // Barrier that also checks that all ranks post the same call.
  void synchronize_for(const Call& call);

 private:
  template <class Put, class Take>
  void rounds(int64_t count, const Put& put, const Take& take);
  bool in_place(const Call& call);
  void through_window(const Call& call);
  SharedPlace& place(int rank) const { return *places_[static_cast<size_t>(rank)]; }
  std::byte* block(int rank, uint32_t round, int index) const;
  Range slice(const Call& call, int rank, int64_t k) const;
  void put_slices(const Call& call, int64_t k) const;
  void sum(const Call& call, int index, const std::byte* own, std::span<std::byte* const> out, int64_t count);

  void all_reduce(const Call& call);
  void full_arrays(const Call& call);
  void from_owners(const Call& call);
  void chunks(const Call& call);

  std::vector<SharedPlace*> places_;
  PeerMemory* peers_;
  int n_, me_;
  HostBarrier barrier_;
  uint32_t round_ = 0;
  InPlaceExchange in_place_;
  int64_t block_bytes_ = 0;  // per slot: one block, or one per rank
  std::vector<const std::byte*> in_;
};

}  // namespace tessera
