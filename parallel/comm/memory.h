// Operations of algorithms on bytes where a call's arrays lie: done at once in the host's memory, and on a GPU queued
// on the stream of the rank's arena.
#pragma once
#include <memory>
#include <span>
#include <vector>

#include "parallel/comm/transport.h"

namespace tessera {

class Storage;

// For the time of one call.
class Memory {
 public:
  explicit Memory(const Call& call) : call_(call) {}

  void copy(std::byte* to, const std::byte* from, int64_t bytes) const;  // nothing to do where they are the same
  // As reduce_ranks() and reduce_into() of parallel/comm/sums.h.
  void reduce_ranks(std::span<const std::byte* const> in, std::span<std::byte* const> out, Range range) const;
  void reduce_into(std::byte* total, const std::byte* x, int64_t count) const;
  void send(Transport& t, int to, int tag, const std::byte* data, int64_t bytes) const;
  void recv(Transport& t, int from, int tag, std::byte* data, int64_t bytes) const;

 private:
  const Call& call_;
};

// Bytes for an algorithm's own use, beside the call's arrays.
class Scratch {
 public:
  Scratch(const Call& call, int64_t bytes);
  std::byte* data() { return on_gpu_ ? gpu_data() : on_host_.data(); }

 private:
  std::byte* gpu_data() const;

  std::vector<std::byte> on_host_;
  std::shared_ptr<Storage> on_gpu_;
};

}  // namespace tessera
