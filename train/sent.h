// What ranks send, added up collective by collective.
#pragma once
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "parallel/comm/call.h"
#include "train/expected_bytes.h"

namespace tessera {

// Adds up what groups of ranks do, by axis and operation, in the order of axes and of operations.
class Sent {
 public:
  explicit Sent(bool through_root) : through_root_(through_root) {}

  // `ranks` ranks make `calls` collectives each, that send `bytes` in all together.
  void add(const std::string& axis, Op op, int64_t ranks, int64_t calls, int64_t bytes) {
    if (ranks < 2 || calls == 0) return;
    SentBytes& entry = sent_[{axis, op}];
    entry.calls += ranks * calls * steps_;
    entry.bytes += bytes * steps_;
  }
  // Of `bytes` each.
  void all_reduce(const std::string& axis, int64_t n, int64_t calls, int64_t bytes) {
    add(axis, Op::all_reduce, n, calls, 2 * (n - 1) * bytes * calls);
  }
  void reduce_scatter(const std::string& axis, int64_t n, int64_t calls, int64_t bytes) {
    add(axis, Op::reduce_scatter, n, calls, half(n, bytes) * calls);
  }
  void all_gather(const std::string& axis, int64_t n, int64_t calls, int64_t bytes) {
    add(axis, Op::all_gather, n, calls, half(n, bytes) * calls);
  }
  // `count` messages, sent by some ranks of an axis and received by others.
  void messages(const std::string& axis, int64_t count, int64_t bytes) {
    if (count == 0) return;
    for (const Op op : {Op::send, Op::recv}) {
      SentBytes& entry = sent_[{axis, op}];
      entry.calls += count * steps_;
      entry.bytes += op == Op::send ? count * bytes * steps_ : 0;
    }
  }

  // What follows happens in so many steps.
  void in_steps(int64_t steps) { steps_ = steps; }

  std::vector<SentBytes> result() const {
    std::vector<SentBytes> out;
    for (const char* axis : {"world", "pp", "dp", "cp", "tp", "dp+cp", "dp.shard", "dp.replicate", "ep", "edp", "tied"})
      for (const auto& [key, entry] : sent_)
        if (key.first == axis) out.push_back({axis, std::string(name_of(key.second)), entry.calls, entry.bytes, 0});
    return out;
  }

 private:
  int64_t half(int64_t n, int64_t bytes) const { return (n - 1) * bytes + (through_root_ ? (n - 1) * bytes / n : 0); }
  bool through_root_;
  int64_t steps_ = 1;
  std::map<std::pair<std::string, Op>, SentBytes> sent_;
};

}  // namespace tessera
