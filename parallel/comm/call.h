// One communication as a rank asks for it, in raw memory: what a transport and an algorithm are given.
#pragma once
#include <atomic>

#include "tensor/dtype.h"
#include "tensor/error.h"

namespace tessera {

class Arena;
class Region;

enum class Op : uint8_t {
  all_reduce,
  reduce_scatter,
  all_gather,
  broadcast,
  reduce,
  gather,
  scatter,
  all_to_all,
  send,
  recv,
  barrier
};
inline constexpr int kOps = 11;
std::string_view to_string(Op op);

enum class Reduction : uint8_t { sum, max };

// Elements [begin, end).
struct Range {
  int64_t begin = 0, end = 0;
  int64_t size() const { return end - begin; }
};
// Piece `index` of `count` elements that are cut evenly over n ranks: from index * count / n to the next one's begin.
inline Range piece(int64_t count, int n, int index) { return {index * count / n, (index + 1) * count / n}; }

// An all_to_all's pieces of any sizes, in elements: sent[r] of `in` go to rank r, and received[r] of `out` come from
// it, one rank's after another's.
struct UnevenSplits {
  std::vector<int64_t> sent, received;
};

// `count` elements are the whole array: what every rank holds of all_reduce, broadcast and reduce, and the pieces of
// all ranks together of the others. `in` and `out` are the whole array or this rank's piece of it:
//
//   all_reduce, broadcast    whole -> whole, in == out      reduce_scatter, scatter   whole -> piece
//   reduce                   whole -> whole (at the root)   all_gather, gather        piece -> whole
//   all_to_all               whole -> whole: piece r of out is this rank's piece of rank r's in. With `pieces` each
//                            rank has arrays of its own sizes, and `count` is that of this rank's `in`
//
// A piece may lie where it belongs inside the whole.
struct Call {
  Op op = Op::barrier;
  DType dtype = DType::float32;
  Reduction reduction = Reduction::sum;
  int32_t root = 0;  // or the other end of a send
  int64_t count = 0;
  const std::byte* in = nullptr;
  std::byte* out = nullptr;
  const Region* region = nullptr;  // region of the host that `in` and `out` are both known to lie in
  Arena* gpu = nullptr;  // where `in` and `out` lie on a GPU: this rank's arena there; null: in the host's memory
  const UnevenSplits* pieces = nullptr;  // pieces of an uneven all_to_all; null: the pieces are even
  // Rows of the whole, of an all_gather or reduce_scatter that cuts each of them: a piece, which lies packed, has the
  // same columns of every row. Only for transports that take rows.
  int64_t rows = 1;

  int64_t bytes() const { return count * element_size(dtype); }
  // True when two ranks mean the same communication.
  bool matches(const Call& other) const {
    return op == other.op && dtype == other.dtype && reduction == other.reduction && root == other.root &&
           (pieces == nullptr) == (other.pieces == nullptr) && (pieces || count == other.count) && rows == other.rows &&
           (gpu == nullptr) == (other.gpu == nullptr);
  }
};
// "all_reduce of 4096 bytes (float32)", "... (float32, on a GPU)"
std::string describe(const Call& call);

// A rank that failed, did not come in time, or asked for something else than the others.
struct CommError : Error {
  explicit CommError(const std::string& message) : Error(message, Status::communication) {}
};

// Another rank has failed, so this one cannot go on; the launch reports the other's cause.
struct PeerFailed : CommError {
  using CommError::CommError;
};
// Runs f; what it throws of these two begins with the text of what() then.
template <class What, class F>
auto named_in_errors(const What& what, const F& f) {
  try {
    return f();
  } catch (const PeerFailed& e) {
    throw PeerFailed(what() + e.what());
  } catch (const CommError& e) {
    throw CommError(what() + e.what());
  }
}

// "30 s"
std::string seconds_text(double seconds);
// "recv of 48 bytes", "rank 2 sent nothing within 30 s"
std::string receiving(int64_t bytes);
std::string sent_nothing(int world_rank, double timeout_s);
// "rank 2 did not come within 30 s; it has not communicated yet"
std::string did_not_come(int world_rank, double timeout_s, const std::string& last);
// Another rank asks for something else than this one.
CommError differ(const Call& mine, int world_rank, const Call& theirs);

// The calls that a rank has made. It writes each down as it makes it, and others read, without waiting for it. So where
// ranks do not meet on the host, since a library takes their collectives, one that does not come, or asks for something
// else, can still be named. The log lies in memory that all ranks of a group see, and the last calls are kept.
//
// Each word is atomic; an entry that is written while it is read is recognised by its number.

class CallLog {
 public:
  // By its own rank alone. Returns the call's number; the first is 1.
  uint64_t add(const Call& call) {
    const uint64_t number = made_.load(std::memory_order_relaxed) + 1;
    Entry& e = entry(number);
    e.number.store(0, std::memory_order_seq_cst);
    e.kind.store(packed(call), std::memory_order_seq_cst);
    e.count.store(call.count, std::memory_order_seq_cst);
    e.number.store(number, std::memory_order_seq_cst);
    made_.store(number, std::memory_order_seq_cst);
    return number;
  }
  uint64_t made() const { return made_.load(std::memory_order_seq_cst); }
  // Nothing where the rank has not come to it yet, or so many others since that it is no longer kept. Arrays and the
  // sizes of uneven pieces are not kept: only that these are uneven.
  std::optional<Call> find(uint64_t number) const {
    const Entry& e = entry(number);
    if (number == 0 || e.number.load(std::memory_order_seq_cst) != number) return {};
    const Call call = unpacked(e.kind.load(std::memory_order_seq_cst), e.count.load(std::memory_order_seq_cst));
    if (e.number.load(std::memory_order_seq_cst) != number) return {};
    return call;
  }

 private:
  static constexpr uint64_t kKept = 64;
  static inline const UnevenSplits kUnknown = {};
  struct Entry {
    std::atomic<uint64_t> number = 0, kind = 0;
    std::atomic<int64_t> count = 0;
  };
  Entry& entry(uint64_t number) { return entries_[number % kKept]; }
  const Entry& entry(uint64_t number) const { return entries_[number % kKept]; }

  static uint64_t packed(const Call& c) {
    return static_cast<uint64_t>(static_cast<uint32_t>(c.root)) << 32 |
           static_cast<uint64_t>(c.pieces != nullptr) << 24 | static_cast<uint64_t>(c.op) << 16 |
           static_cast<uint64_t>(c.dtype) << 8 | static_cast<uint64_t>(c.reduction);
  }
  static Call unpacked(uint64_t kind, int64_t count) {
    return {.op = static_cast<Op>(kind >> 16 & 0xff),
            .dtype = static_cast<DType>(kind >> 8 & 0xff),
            .reduction = static_cast<Reduction>(kind & 0xff),
            .root = static_cast<int32_t>(kind >> 32),
            .count = count,
            .pieces = (kind >> 24 & 1) != 0 ? &kUnknown : nullptr};
  }

  std::atomic<uint64_t> made_ = 0;
  std::array<Entry, kKept> entries_;
};

}  // namespace tessera
