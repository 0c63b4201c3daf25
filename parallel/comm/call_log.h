// What a rank has come to: it writes its calls down as it makes them, and others read, without waiting for it. So where
// ranks do not meet on the host, since a library takes their collectives, one that does not come, or asks for something
// else, can still be named. It lies in memory that all ranks of a group see, and the last calls are kept.
//
// Each word is atomic; an entry that is written while it is read is recognised by its number.
#pragma once
#include <array>
#include <atomic>
#include <cstdint>
#include <optional>

#include "parallel/comm/call.h"

namespace tessera {

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
  static inline const UnevenPieces kUnknown = {};
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
