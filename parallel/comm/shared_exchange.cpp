// Maps files of peer processes through /proc/PID/fd, which requires the same user.
#include "parallel/comm/shared_exchange.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <map>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "parallel/comm/algorithms.h"
#include "parallel/comm/memory.h"

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

namespace {

void put_data(std::byte* to, const std::byte* from, int64_t bytes) {
  if (to != from && bytes > 0) std::memcpy(to, from, static_cast<size_t>(bytes));
}

int64_t count_rounds(int64_t size, int64_t step) { return std::max<int64_t>(1, (size + step - 1) / step); }

}  // namespace

SharedExchange::SharedExchange(Transport& transport, std::vector<SharedPlace*> places, WaitOptions wait_options,
                               PeerMemory* peers)
    : places_(std::move(places)),
      peers_(peers),
      n_(transport.size()),
      me_(transport.rank()),
      barrier_(transport, me_, {places_.begin(), places_.end()}, std::move(wait_options),
               [&transport] { transport.fail(""); }),
      in_place_(n_, me_),
      in_(static_cast<size_t>(n_)) {}

std::byte* SharedExchange::block(int rank, uint32_t round, int index) const {
  return place(rank).slots[round % 2].data() + index * block_bytes_;
}

// Round k's range of the rank's chunk, in the full array. In a broadcast the root's chunk is the full array.
Range SharedExchange::slice(const Call& call, int rank, int64_t k) const {
  const Range chunk = call.op != Op::broadcast ? chunk_range(call.count, n_, rank)
                      : rank == call.root      ? Range{0, call.count}
                                               : Range{};
  const int64_t step = block_bytes_ / element_size(call.dtype);
  return {std::min(chunk.end, chunk.begin + k * step), std::min(chunk.end, chunk.begin + (k + 1) * step)};
}

template <class Put, class Take>
void SharedExchange::rounds(int64_t count, const Put& put, const Take& take) {
  for (int64_t k = 0; k < count; ++k) {
    round_ = barrier_.generation() + 1;
    put(k);
    barrier_.wait();
    take(k);
  }
}

void SharedExchange::put_slices(const Call& call, int64_t k) const {
  const int64_t element = element_size(call.dtype);
  for (int r = 0; r < n_; ++r)
    if (r != me_)
      put_data(block(me_, round_, r), call.in + slice(call, r, k).begin * element, slice(call, r, k).size() * element);
}

void SharedExchange::sum(const Call& call, int index, const std::byte* own, std::span<std::byte* const> out,
                         int64_t count) {
  for (int r = 0; r < n_; ++r) in_[static_cast<size_t>(r)] = r == me_ ? own : block(r, round_, index);
  reduce_ranks(call.dtype, call.reduction, in_, out, {0, count});
}

// all_reduce of two ranks, and reduce: each source writes its full array, and the destinations add. For two ranks this
// costs one barrier per block, with the same cache traffic as if each added its half.
void SharedExchange::full_arrays(const Call& call) {
  block_bytes_ = kSlotBytes;
  const int64_t element = element_size(call.dtype), step = block_bytes_ / element;
  const bool all = call.op == Op::all_reduce;
  const auto range = [&](int64_t k) { return Range{k * step, std::min(call.count, (k + 1) * step)}; };
  const auto put = [&](int64_t k) {
    if (all || me_ != call.root)
      put_data(block(me_, round_, 0), call.in + range(k).begin * element, range(k).size() * element);
  };
  const auto take = [&](int64_t k) {
    std::byte* const out = call.out + range(k).begin * element;
    if (all || me_ == call.root) sum(call, 0, call.in + range(k).begin * element, std::span(&out, 1), range(k).size());
  };
  rounds(count_rounds(call.count, step), put, take);
}

// Each rank reduces its slice of every block. The sums of a block are sent in the next round, in the otherwise unused
// block for the rank's own slice.
void SharedExchange::all_reduce(const Call& call) {
  const int64_t element = element_size(call.dtype);
  const int64_t blocks = count_rounds((call.count + n_ - 1) / n_, block_bytes_ / element);
  const auto put = [&](int64_t k) {
    if (k < blocks) put_slices(call, k);
  };
  const auto take = [&](int64_t k) {
    for (int r = 0; r < n_; ++r)
      if (r != me_ && k > 0) {
        const Range done = slice(call, r, k - 1);
        put_data(call.out + done.begin * element, block(r, round_, r), done.size() * element);
      }
    if (k == blocks) return;
    const Range mine = slice(call, me_, k);
    const std::array<std::byte*, 2> out = {call.out + mine.begin * element, block(me_, round_ + 1, me_)};
    sum(call, me_, call.in + mine.begin * element, out, mine.size());
  };
  rounds(blocks + 1, put, take);
}

// all_gather, gather and broadcast: owners write their chunks, and destinations read all other chunks.
void SharedExchange::from_owners(const Call& call) {
  block_bytes_ = kSlotBytes;
  const int64_t element = element_size(call.dtype);
  const int64_t begin = slice(call, me_, 0).begin;
  const bool takes = call.op != Op::gather || me_ == call.root;
  const auto put = [&](int64_t k) {
    const Range mine = slice(call, me_, k);
    const std::byte* const own = call.in + (mine.begin - begin) * element;
    if (call.op != Op::gather || !takes) put_data(block(me_, round_, 0), own, mine.size() * element);
    if (takes) put_data(call.out + mine.begin * element, own, mine.size() * element);
  };
  const auto take = [&](int64_t k) {
    for (int r = 0; r < n_ && takes; ++r)
      if (r != me_)
        put_data(call.out + slice(call, r, k).begin * element, block(r, round_, 0), slice(call, r, k).size() * element);
  };
  const int64_t largest = call.op == Op::broadcast ? call.count : (call.count + n_ - 1) / n_;
  rounds(count_rounds(largest, block_bytes_ / element), put, take);
}

// reduce_scatter and all_to_all (all ranks write) and scatter (only the root writes). A single chunk is stored at the
// start of `out`.
void SharedExchange::chunks(const Call& call) {
  const int64_t element = element_size(call.dtype);
  const bool scatters = call.op == Op::scatter;
  const auto put = [&](int64_t k) {
    if (!scatters || me_ == call.root) put_slices(call, k);
  };
  const auto take = [&](int64_t k) {
    const Range mine = slice(call, me_, k);
    const int64_t offset = mine.begin - chunk_range(call.count, n_, me_).begin;
    const auto own = [&] { return call.in + mine.begin * element; };
    if (call.op == Op::reduce_scatter) {
      std::byte* const out = call.out + offset * element;
      return sum(call, me_, own(), std::span(&out, 1), mine.size());
    }
    for (int r = 0; r < n_; ++r) {
      if (scatters && r != call.root) continue;
      const int64_t to = (scatters ? 0 : chunk_range(call.count, n_, r).begin) + offset;
      put_data(call.out + to * element, r == me_ ? own() : block(r, round_, me_), mine.size() * element);
    }
  };
  rounds(count_rounds((call.count + n_ - 1) / n_, block_bytes_ / element), put, take);
}

void SharedExchange::synchronize_for(const Call& call) {
  barrier_.post(call);
  barrier_.wait();
}

// Returns false if an array is not mappable, so the call must use the window.
bool SharedExchange::in_place(const Call& call) {
  place(me_).refs[(barrier_.calls() + 1) % 2] = make_shared_ref(call);
  synchronize_for(call);
  const auto ref = [&](int r) -> const SharedArrayRef& { return place(r).refs[barrier_.calls() % 2]; };
  for (int r = 0; r < n_; ++r)
    if (!ref(r).known()) return false;
  for (int r = 0; r < n_; ++r) {
    Call& peer = in_place_.peer_call(r) = call;
    if (r == me_) continue;
    std::byte* const base = peers_->base(ref(r));
    peer.in = ref(r).in < 0 ? nullptr : base + ref(r).in;
    peer.out = ref(r).out < 0 ? nullptr : base + ref(r).out;
  }
  in_place_.run(call);
  barrier_.wait();
  return true;
}

void SharedExchange::through_window(const Call& call) {
  block_bytes_ = kSlotBytes / n_ / 64 * 64;
  switch (call.op) {
    case Op::all_reduce:
      return n_ == 2 ? full_arrays(call) : all_reduce(call);
    case Op::reduce:
      return full_arrays(call);
    case Op::all_gather:
    case Op::gather:
    case Op::broadcast:
      return from_owners(call);
    default:
      return chunks(call);
  }
}

int64_t SharedExchange::run(const Call& call) {
  if (call.op == Op::barrier) {
    synchronize_for(call);
    return 0;
  }
  if (peers_ && call.bytes() >= kInPlaceBytes) {
    if (!in_place(call)) through_window(call);
  } else {
    barrier_.post(call);
    through_window(call);
  }
  return sent_directly(call, n_, me_);
}

}  // namespace tessera
