// One communication call, with raw memory.
#pragma once
#include <array>
#include <atomic>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/error.h"
#include "tensor/dtype.h"

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

// pair_sum adds ranks by the binary tree ((0 + 1) + (2 + 3)) + ..., in the accumulation dtype, and rounds once.
enum class Reduction : uint8_t { sum, max, pair_sum };

struct Range {
  int64_t begin = 0, end = 0;
  int64_t size() const { return end - begin; }
};
// Chunk `index` of `count` elements split evenly over n ranks.
inline Range chunk_range(int64_t count, int n, int index) { return {index * count / n, (index + 1) * count / n}; }

// Chunk sizes of an uneven all_to_all, in elements and rank order: sent[r] of `in` to rank r, received[r] of `out` from
// rank r.
struct UnevenSplits {
  std::vector<int64_t> sent, received;
};

// `count` is the size of the full array: each rank's array in all_reduce, broadcast and reduce, otherwise the chunks of
// all ranks together. `in` and `out` are the full array or this rank's chunk, which may be in its place inside the full
// array:
//
//   all_reduce, broadcast    full -> full, in == out        reduce_scatter, scatter   full -> chunk
//   reduce                   full -> full (at the root)     all_gather, gather        chunk -> full
//   all_to_all               full -> full: chunk r of out is this rank's chunk of rank r's in. With `splits` the sizes
//                            of arrays differ between ranks, and `count` is the size of this rank's `in`
struct Call {
  Op op = Op::barrier;
  DType dtype = DType::float32;
  Reduction reduction = Reduction::sum;
  int32_t root = 0;  // or the peer of a send or recv
  int64_t count = 0;
  const std::byte* in = nullptr;
  std::byte* out = nullptr;
  const Region* region = nullptr;        // host region that contains `in` and `out`, if known
  Arena* gpu = nullptr;                  // if the arrays are on a GPU; null: host memory
  const UnevenSplits* splits = nullptr;  // of an uneven all_to_all; null: even chunks
  // Rows of the full array of an all_gather or reduce_scatter that splits each row: a chunk is packed and contains the
  // same columns of every row. Requires supports_row_slices().
  int64_t rows = 1;

  int64_t bytes() const { return count * element_size(dtype); }
  bool matches(const Call& other) const {
    return op == other.op && dtype == other.dtype && reduction == other.reduction && root == other.root &&
           (splits == nullptr) == (other.splits == nullptr) && (splits || count == other.count) && rows == other.rows &&
           (gpu == nullptr) == (other.gpu == nullptr);
  }
};
// "all_reduce of 4096 bytes (float32)", "... (float32, on a GPU)"
std::string describe(const Call& call);

struct CommError : Error {
  explicit CommError(const std::string& message) : Error(message, Status::communication) {}
};

struct PeerFailed : CommError {
  using CommError::CommError;
};
// Prefixes the messages of these two exceptions with what().
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

std::string seconds_text(double seconds);
// "recv of 48 bytes", "rank 2 sent nothing within 30 s"
std::string receiving(int64_t bytes);
std::string sent_nothing(int world_rank, double timeout_s);
// "rank 2 did not arrive within 30 s; it has not communicated yet"
std::string did_not_arrive(int world_rank, double timeout_s, const std::string& last);
CommError mismatch(const Call& mine, int world_rank, const Call& theirs);

// A lock-free log of one rank's most recent calls, readable by all ranks of a group. It identifies a missing rank or a
// mismatched operation even if a library runs the collectives without host synchronization. An entry's number reveals
// whether it was overwritten while being read.

class CallLog {
 public:
  // Called only by the log's own rank. Returns the call's number, from 1.
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
  // Empty if the rank has not reached this call, or the entry has been overwritten. Does not restore arrays or uneven
  // chunk sizes.
  std::optional<Call> find(uint64_t number) const {
    const Entry& e = entry(number);
    if (number == 0 || e.number.load(std::memory_order_seq_cst) != number) return {};
    const Call call = unpacked(e.kind.load(std::memory_order_seq_cst), e.count.load(std::memory_order_seq_cst));
    if (e.number.load(std::memory_order_seq_cst) != number) return {};
    return call;
  }

 private:
  static constexpr uint64_t kEntries = 64;
  static inline const UnevenSplits kUnknown = {};
  struct Entry {
    std::atomic<uint64_t> number = 0, kind = 0;
    std::atomic<int64_t> count = 0;
  };
  Entry& entry(uint64_t number) { return entries_[number % kEntries]; }
  const Entry& entry(uint64_t number) const { return entries_[number % kEntries]; }

  static uint64_t packed(const Call& c) {
    return static_cast<uint64_t>(static_cast<uint32_t>(c.root)) << 32 |
           static_cast<uint64_t>(c.splits != nullptr) << 24 | static_cast<uint64_t>(c.op) << 16 |
           static_cast<uint64_t>(c.dtype) << 8 | static_cast<uint64_t>(c.reduction);
  }
  static Call unpacked(uint64_t kind, int64_t count) {
    return {.op = static_cast<Op>(kind >> 16 & 0xff),
            .dtype = static_cast<DType>(kind >> 8 & 0xff),
            .reduction = static_cast<Reduction>(kind & 0xff),
            .root = static_cast<int32_t>(kind >> 32),
            .count = count,
            .splits = (kind >> 24 & 1) != 0 ? &kUnknown : nullptr};
  }

  std::atomic<uint64_t> made_ = 0;
  std::array<Entry, kEntries> entries_;
};

}  // namespace tessera
