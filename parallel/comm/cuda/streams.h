// Stream synchronization between ranks on the GPU, without blocking the hosts: a rank records a mark (an event) in its
// stream (tensor/cuda/context.h), and another rank's stream waits for it. The waiting rank must first observe on the
// host that the mark was set: the awaited work is then queued before the wait, so streams cannot deadlock.
#pragma once
#include <cstdint>
#include <memory>

#include "tensor/tensor.h"

namespace tessera::cuda {

class Mark {
 public:
  void set(Arena& arena);
  // Makes subsequent work on the arena's stream wait for the mark. No-op if the mark was never set.
  void before(Arena& arena) const;
  // Blocks the host. Does not report kernel errors.
  void wait() const;

 private:
  std::shared_ptr<void> event_;
};

class DeviceMessage {
 public:
  DeviceMessage() = default;
  DeviceMessage(Arena& sender, const std::byte* data, int64_t bytes);
  bool empty() const { return !bytes_; }
  int64_t bytes() const { return bytes_->bytes(); }
  // Copies the message to the receiver's memory and releases the block after the copy.
  void unpack(Arena& receiver, std::byte* to);

 private:
  std::shared_ptr<Storage> bytes_;
  Mark packed_;
};

// Does not report kernel errors.
bool is_done(Arena& arena);
void copy(Arena& arena, std::byte* to, const std::byte* from, int64_t bytes);
void copy_rows(Arena& arena, std::byte* to, int64_t to_pitch, const std::byte* from, int64_t from_pitch, int64_t width,
               int64_t rows);
// The calling thread may be a background thread.
void use_arena_gpu(Arena& arena);

}  // namespace tessera::cuda
