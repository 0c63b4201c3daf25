// Mapping through /proc: the descriptor of another process is a link to its file there, open to processes of one user.
#include "parallel/comm/shared_exchange.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <optional>
#include <span>
#include <utility>

#include "parallel/comm/algorithms.h"
#include "parallel/comm/sums.h"

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

// In place, or in rounds over two slots.

namespace {

void put_bytes(std::byte* to, const std::byte* from, int64_t bytes) {
  if (to != from && bytes > 0) std::memcpy(to, from, static_cast<size_t>(bytes));
}

int64_t rounds_of(int64_t size, int64_t step) { return std::max<int64_t>(1, (size + step - 1) / step); }

}  // namespace

// Block `index` of the slot that a rank fills in a round.
std::byte* SharedExchange::block(int rank, uint32_t round, int index) const {
  return place(rank).slots[round % 2].data() + index * block_bytes_;
}

// Elements of rank's piece that round k moves, counted in the whole array.
Range SharedExchange::part(const Call& call, int rank, int64_t k) const {
  const Range whole = piece(call.count, n_, rank);
  const int64_t step = block_bytes_ / size_of(call.dtype);
  return {std::min(whole.end, whole.begin + k * step), std::min(whole.end, whole.begin + (k + 1) * step)};
}

void SharedExchange::abandon(Waited why, int waiting_for) const {
  const Call& mine = post(group_.rank);
  if (why == Waited::poisoned) throw PeerFailed(describe(mine) + ": " + group_.failure());
  group_.give_up();
  throw CommError(describe(mine) + ": rank " + std::to_string(group_.world_ranks[static_cast<size_t>(waiting_for)]) +
                  " did not come within " + seconds_text(group_.patience.timeout_s) + "; " + last_of(waiting_for));
}

std::string SharedExchange::last_of(int rank) const {
  const SharedPlace& missing = place(rank);
  const uint32_t reached = missing.flag.value.load(std::memory_order_acquire);
  if (static_cast<int32_t>(reached - first_round_) >= 0) return "it stopped in the middle of this";
  if (reached == 0) return "it has not communicated yet";
  return "the last it came to was " + describe(missing.posts[(calls_ + 1) % 2]);
}

void SharedExchange::compare_posts() const {
  const Call& mine = post(group_.rank);
  for (int r = 0; r < n_; ++r) {
    if (post(r).matches(mine)) continue;
    group_.give_up();
    throw CommError(describe(mine) + ": rank " + std::to_string(group_.world_ranks[static_cast<size_t>(r)]) +
                    " asks for " + describe(post(r)) +
                    " at the same time; every rank must communicate in the same order");
  }
}

void SharedExchange::meet(bool first) {
  raise(place(group_.rank).flag, round_);
  for (int r = 0; r < n_; ++r) {
    if (r == group_.rank) continue;
    std::optional<PeerWait> observer;
    if (group_.transport)
      observer.emplace(*group_.transport, r, [this, r] { return std::pair(describe(post(group_.rank)), last_of(r)); });
    const Waited waited = wait_for(place(r).flag, round_, group_.patience, observer ? &*observer : nullptr);
    if (waited != Waited::arrived) abandon(waited, r);
  }
  if (first) compare_posts();
}

template <class Put, class Take>
void SharedExchange::rounds(int64_t count, const Put& put, const Take& take) {
  if (!compared_) first_round_ = round_ + 1;
  for (int64_t k = 0; k < count; ++k) {
    ++round_;
    put(k);
    meet(!std::exchange(compared_, true));
    take(k);
  }
}

// Each puts its whole array and both add: one meeting for a block, and as many bytes through the cache as if each added
// its half.
void SharedExchange::all_reduce_of_two(const Call& call) {
  block_bytes_ = kSlotBytes;
  const int64_t element = size_of(call.dtype), step = block_bytes_ / element;
  const auto range = [&](int64_t k) { return Range{k * step, std::min(call.count, (k + 1) * step)}; };
  const auto put = [&](int64_t k) {
    put_bytes(block(group_.rank, round_, 0), call.in + range(k).begin * element, range(k).size() * element);
  };
  const auto take = [&](int64_t k) {
    std::byte* const out = call.out + range(k).begin * element;
    std::array<const std::byte*, 2> in = {out, out};
    in[static_cast<size_t>(1 - group_.rank)] = block(1 - group_.rank, round_, 0);
    reduce_ranks(call.dtype, call.reduction, in, std::span(&out, 1), {0, range(k).size()});
  };
  rounds(rounds_of(call.count, step), put, take);
}

// Each rank adds its part of every block; the sums of a block travel with the next block's arrays, in the place that a
// rank's own part would take.
void SharedExchange::all_reduce(const Call& call) {
  if (n_ == 2) return all_reduce_of_two(call);
  const int64_t element = size_of(call.dtype);
  const int me = group_.rank;
  const int64_t blocks = rounds_of((call.count + n_ - 1) / n_, block_bytes_ / element);
  const auto put = [&](int64_t k) {
    for (int r = 0; r < n_; ++r)
      if (r != me && k < blocks)
        put_bytes(block(me, round_, r), call.in + part(call, r, k).begin * element, part(call, r, k).size() * element);
  };
  std::vector<const std::byte*> in(static_cast<size_t>(n_));
  const auto take = [&](int64_t k) {
    for (int r = 0; r < n_; ++r)
      if (r != me && k > 0) {
        const Range done = part(call, r, k - 1);
        put_bytes(call.out + done.begin * element, block(r, round_, r), done.size() * element);
      }
    if (k == blocks) return;
    const Range mine = part(call, me, k);
    for (int r = 0; r < n_; ++r) in[static_cast<size_t>(r)] = block(r, round_, me);
    in[static_cast<size_t>(me)] = call.in + mine.begin * element;
    const std::array<std::byte*, 2> out = {call.out + mine.begin * element, block(me, round_ + 1, me)};
    reduce_ranks(call.dtype, call.reduction, in, out, {0, mine.size()});
  };
  rounds(blocks + 1, put, take);
}

void SharedExchange::reduce_scatter(const Call& call) {
  const int64_t element = size_of(call.dtype);
  const int me = group_.rank;
  const int64_t begin = piece(call.count, n_, me).begin;
  std::vector<const std::byte*> in(static_cast<size_t>(n_));
  const auto put = [&](int64_t k) {
    for (int r = 0; r < n_; ++r)
      if (r != me)
        put_bytes(block(me, round_, r), call.in + part(call, r, k).begin * element, part(call, r, k).size() * element);
  };
  const auto take = [&](int64_t k) {
    const Range mine = part(call, me, k);
    for (int r = 0; r < n_; ++r) in[static_cast<size_t>(r)] = block(r, round_, me);
    in[static_cast<size_t>(me)] = call.in + mine.begin * element;
    std::byte* const out = call.out + (mine.begin - begin) * element;
    reduce_ranks(call.dtype, call.reduction, in, std::span(&out, 1), {0, mine.size()});
  };
  rounds(rounds_of((call.count + n_ - 1) / n_, block_bytes_ / element), put, take);
}

// all_gather, or gather at the root.
void SharedExchange::all_gather(const Call& call, bool everywhere) {
  block_bytes_ = kSlotBytes;
  const int64_t element = size_of(call.dtype);
  const int me = group_.rank;
  const int64_t begin = piece(call.count, n_, me).begin;
  const bool takes = everywhere || me == call.root;
  const auto put = [&](int64_t k) {
    const Range mine = part(call, me, k);
    const std::byte* const own = call.in + (mine.begin - begin) * element;
    if (everywhere || !takes) put_bytes(block(me, round_, 0), own, mine.size() * element);
    if (takes) put_bytes(call.out + mine.begin * element, own, mine.size() * element);
  };
  const auto take = [&](int64_t k) {
    for (int r = 0; r < n_ && takes; ++r)
      if (r != me)
        put_bytes(call.out + part(call, r, k).begin * element, block(r, round_, 0), part(call, r, k).size() * element);
  };
  rounds(rounds_of((call.count + n_ - 1) / n_, block_bytes_ / element), put, take);
}

// broadcast: the root puts, everybody takes.
void SharedExchange::from_root(const Call& call) {
  block_bytes_ = kSlotBytes;
  const int64_t all = call.bytes();
  const auto size = [&](int64_t k) { return std::min(block_bytes_, all - k * block_bytes_); };
  const auto put = [&](int64_t k) {
    if (group_.rank == call.root) put_bytes(block(call.root, round_, 0), call.in + k * block_bytes_, size(k));
  };
  const auto take = [&](int64_t k) {
    if (group_.rank != call.root) put_bytes(call.out + k * block_bytes_, block(call.root, round_, 0), size(k));
  };
  rounds(rounds_of(all, block_bytes_), put, take);
}

// reduce: everybody puts, the root adds.
void SharedExchange::to_root(const Call& call) {
  block_bytes_ = kSlotBytes;
  const int64_t element = size_of(call.dtype), step = block_bytes_ / element;
  const auto range = [&](int64_t k) { return Range{k * step, std::min(call.count, (k + 1) * step)}; };
  std::vector<const std::byte*> in(static_cast<size_t>(n_));
  const auto put = [&](int64_t k) {
    if (group_.rank != call.root)
      put_bytes(block(group_.rank, round_, 0), call.in + range(k).begin * element, range(k).size() * element);
  };
  const auto take = [&](int64_t k) {
    if (group_.rank != call.root) return;
    for (int r = 0; r < n_; ++r) in[static_cast<size_t>(r)] = block(r, round_, 0);
    in[static_cast<size_t>(call.root)] = call.in + range(k).begin * element;
    std::byte* const out = call.out + range(k).begin * element;
    reduce_ranks(call.dtype, call.reduction, in, std::span(&out, 1), {0, range(k).size()});
  };
  rounds(rounds_of(call.count, step), put, take);
}

// scatter (only the root puts, pieces land at the start of out) and all_to_all (everybody puts, each at its place).
void SharedExchange::pieces(const Call& call) {
  const int64_t element = size_of(call.dtype);
  const int me = group_.rank;
  const bool scatters = call.op == Op::scatter;
  const auto put = [&](int64_t k) {
    for (int r = 0; r < n_ && (!scatters || me == call.root); ++r)
      if (r != me)
        put_bytes(block(me, round_, r), call.in + part(call, r, k).begin * element, part(call, r, k).size() * element);
  };
  const auto take = [&](int64_t k) {
    const Range mine = part(call, me, k);
    const int64_t offset = mine.begin - piece(call.count, n_, me).begin;
    for (int r = 0; r < n_; ++r) {
      if (scatters && r != call.root) continue;
      const std::byte* const from = r == me ? call.in + mine.begin * element : block(r, round_, me);
      const int64_t to = (scatters ? 0 : piece(call.count, n_, r).begin) + offset;
      put_bytes(call.out + to * element, from, mine.size() * element);
    }
  };
  rounds(rounds_of((call.count + n_ - 1) / n_, block_bytes_ / element), put, take);
}

void SharedExchange::meet_for(const Call& call) {
  place(group_.rank).posts[++calls_ % 2] = call;
  compared_ = false;
  rounds(
      1, [](int64_t) {}, [](int64_t) {});
}

// Comes together, and where all arrays can be reached, exchanges them; false: it is still to be done.
bool SharedExchange::in_place(const Call& call) {
  place(group_.rank).reaches[(calls_ + 1) % 2] = reach_of(call);
  meet_for(call);
  for (int r = 0; r < n_; ++r)
    if (!place(r).reaches[calls_ % 2].known()) return false;
  for (int r = 0; r < n_; ++r) {
    Call& seen = in_place_.seen(r) = call;
    if (r == group_.rank) continue;
    const Reach& reach = place(r).reaches[calls_ % 2];
    std::byte* const base = group_.peers->base(reach);
    seen.in = reach.in < 0 ? nullptr : base + reach.in;
    seen.out = reach.out < 0 ? nullptr : base + reach.out;
  }
  in_place_.run(call);
  ++round_;
  meet(false);
  return true;
}

void SharedExchange::through_window(const Call& call) {
  block_bytes_ = kSlotBytes / n_ / 64 * 64;
  switch (call.op) {
    case Op::all_reduce:
      return all_reduce(call);
    case Op::reduce_scatter:
      return reduce_scatter(call);
    case Op::all_gather:
    case Op::gather:
      return all_gather(call, call.op == Op::all_gather);
    case Op::broadcast:
      return from_root(call);
    case Op::reduce:
      return to_root(call);
    default:
      return pieces(call);
  }
}

int64_t SharedExchange::run(const Call& call) {
  if (call.op == Op::barrier) {
    meet_for(call);
    return 0;
  }
  if (group_.peers && call.bytes() >= kInPlaceBytes) {
    if (!in_place(call)) through_window(call);
  } else {
    place(group_.rank).posts[++calls_ % 2] = call;
    compared_ = false;
    through_window(call);
  }
  return sent_directly(call, n_, group_.rank);
}

}  // namespace tessera
