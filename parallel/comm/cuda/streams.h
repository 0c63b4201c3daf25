// How the GPU work of one rank waits for another's: on the GPU, while the hosts go on.
//
// A rank's kernels and copies run in the order of its stream (tensor/cuda/context.h). A mark is a point in it, and
// another rank's stream can be told to come after that point. Whoever is told to must have heard, on the host, that the
// mark was set: so everything that is waited for was queued before the waiting was, and no two streams wait for each
// other.
#pragma once

#include "tensor/tensor.h"

namespace tessera::cuda {

class Mark {
 public:
  // After all that is queued on the arena's stream.
  void set(Arena& arena);
  // Lets work that is queued on the arena's stream from now on come after the mark. Does nothing for a mark that was
  // never set.
  void before(Arena& arena) const;
  // The host waits. A kernel that failed is not reported here.
  void wait() const;

 private:
  std::shared_ptr<void> event_;
};

// Bytes that a rank's GPU holds for another rank, in a block of the sender's arena.
class DeviceMessage {
 public:
  DeviceMessage() = default;
  DeviceMessage(Arena& sender, const std::byte* data, int64_t bytes);
  bool empty() const { return !bytes_; }
  int64_t bytes() const { return bytes_->bytes(); }
  // Copies them to the receiver's memory and gives the block back, for use after the copy.
  void unpack(Arena& receiver, std::byte* to);

 private:
  std::shared_ptr<Storage> bytes_;
  Mark packed_;
};

// Whether all that is queued on the arena's stream is done. A kernel that failed is not reported here.
bool is_done(Arena& arena);
// Any direction, queued on the arena's stream.
void copy(Arena& arena, std::byte* to, const std::byte* from, int64_t bytes);
void copy_rows(Arena& arena, std::byte* to, int64_t to_pitch, const std::byte* from, int64_t from_pitch, int64_t width,
               int64_t rows);
// Makes the arena's GPU that of the calling thread, which may be another than the rank's own.
void use_arena_gpu(Arena& arena);

}  // namespace tessera::cuda
