// Other processes' memory, seen from this one: a rank of this host says where its arrays lie (Reach), and whoever is
// told maps the file behind them (tensor/arena.h, shared_region()) once and for good.
#pragma once

#include "parallel/comm/meeting.h"
#include "tensor/arena.h"

namespace tessera {

// The places of a call's arrays, for other processes of the host. Plain numbers: it stands in shared memory.
struct SharedArrayRef {
  int64_t process = 0;  // the rank's process
  Region::File file = {};
  int64_t size = 0;           // bytes of the file
  int64_t in = -1, out = -1;  // offsets in it; negative: there is no such array
  bool known() const { return file.descriptor >= 0; }
};
// Opens the file behind a descriptor of another process, to read and write; negative and errno where the system does
// not let it.
int open_of_process(int64_t process, int descriptor);

// The reach of a call of this process; not known where its arrays lie outside regions that others can map.
SharedArrayRef make_reach(const Call& call);

class PeerMemory : NotCopied {
 public:
  ~PeerMemory();

  // The address at which the file of `reach` begins in this process. Any thread may ask. Throws CommError naming the
  // cause when the system does not let it be mapped.
  std::byte* base(const SharedArrayRef& reach);

 private:
  struct Mapping {
    std::byte* base;
    size_t size;
  };
  std::mutex mutex_;
  std::map<std::pair<int64_t, int64_t>, Mapping> mapped_;  // by process and number of the region
};

// The direct exchange of ranks that are processes of one host, which share a window of memory.
//
// Large arrays that lie where the others can map them (Communicator::make_arena()) are exchanged in place, with two
// meetings: all have come, all are done (parallel/comm/meeting.h). Where an array of any rank does not, and for what
// is too small to be worth a second meeting, the bytes go through the window.
//
// Each rank has two slots in the shared memory. In a round it puts the next block of its array into the slot whose turn
// it is, raises its flag, waits for the flags of the others, and takes from their slots what is meant for it:
//
//   rank 0   put 0 | meet | take 0, put 1 | meet | take 1, put 2 | ...        slots  0 1 0 1 ...
//   rank 1   put 0 | meet | take 0, put 1 | meet | take 1, put 2 | ...
//
// Who has come to a meeting has taken everything of the round before, so two slots are enough, no rank waits for the
// end of a call, and a call of one block costs one meeting (an all-reduce of more than two ranks: two). A block fits
// into the cache, so that arrays cross the memory bus once. Sums are added in the order of ranks with the bits of the
// thread transport. With the first block each rank posts its call, so that calls that differ are named.

inline constexpr int64_t kSlotBytes = 128 << 10;
inline constexpr int64_t kInPlaceBytes = 8 << 10;  // arrays from this size on are exchanged in place

// One rank's part of the shared memory.
struct alignas(4096) SharedPlace : MeetingPlace {
  std::array<SharedArrayRef, 2> reaches;
  alignas(4096) std::array<std::array<std::byte, kSlotBytes>, 2> slots;
};

class SharedExchange {
 public:
  // `places`: by rank, as this rank sees them. `peers`: null where everything goes through the window. The transport,
  // whose waits these are, must outlive the exchange.
  SharedExchange(Transport& transport, std::vector<SharedPlace*> places, WaitOptions patience, PeerMemory* peers);
  int ranks() const { return n_; }
  // One collective. Returns the bytes that count as sent. Throws as Transport::direct() does.
  int64_t run(const Call& call);
  // Everybody has come, and to the same call.
  void meet_for(const Call& call);

 private:
  template <class Put, class Take>
  void rounds(int64_t count, const Put& put, const Take& take);
  bool in_place(const Call& call);
  void through_window(const Call& call);
  SharedPlace& place(int rank) const { return *places_[static_cast<size_t>(rank)]; }
  std::byte* block(int rank, uint32_t round, int index) const;
  Range part(const Call& call, int rank, int64_t k) const;
  void put_parts(const Call& call, int64_t k) const;
  void sum(const Call& call, int index, const std::byte* own, std::span<std::byte* const> out, int64_t count);

  void all_reduce(const Call& call);
  void wholes(const Call& call);
  void from_owners(const Call& call);
  void pieces(const Call& call);

  std::vector<SharedPlace*> places_;
  PeerMemory* peers_;
  int n_, me_;
  HostMeeting meeting_;
  uint32_t round_ = 0;  // under way
  InPlaceExchange in_place_;
  int64_t block_bytes_ = 0;           // bytes of a block in this call: a slot holds one block, or one for each rank
  std::vector<const std::byte*> in_;  // by rank, for a sum
};

}  // namespace tessera
