// Marks, implemented as CUDA events.
#include "parallel/comm/cuda/streams.h"

#include <cstdint>
#include <memory>

#include "tensor/cuda/context.h"

namespace tessera::cuda {
namespace {

cudaEvent_t to_cuda_event(const std::shared_ptr<void>& event) { return static_cast<Event*>(event.get())->get(); }

}  // namespace

void use_arena_gpu(Arena& arena) { check(cudaSetDevice(arena.local<Context>().gpu()), "gpu"); }

void Mark::set(Arena& arena) {
  if (!event_) {
    use_arena_gpu(arena);  // an event belongs to the stream's GPU
    event_ = std::make_shared<Event>(make_event());
  }
  check(cudaEventRecord(to_cuda_event(event_), arena.local<Context>().stream()), "mark");
}

void Mark::before(Arena& arena) const {
  if (event_) check(cudaStreamWaitEvent(arena.local<Context>().stream(), to_cuda_event(event_), 0), "wait for a rank");
}

void Mark::wait() const {
  if (event_) cudaEventSynchronize(to_cuda_event(event_));
}

DeviceMessage::DeviceMessage(Arena& sender, const std::byte* data, int64_t bytes)
    : bytes_(std::make_shared<Storage>(sender.shared_from_this(), bytes, Category::communication)) {
  copy(sender, bytes_->data(), data, bytes);
  packed_.set(sender);
}

void DeviceMessage::unpack(Arena& receiver, std::byte* to) {
  packed_.before(receiver);
  copy(receiver, to, bytes_->data(), bytes_->bytes());
  Mark unpacked;
  unpacked.set(receiver);
  unpacked.before(*bytes_->arena());
  bytes_.reset();
}

bool is_done(Arena& arena) { return expected(cudaStreamQuery(arena.local<Context>().stream())) != cudaErrorNotReady; }

void copy(Arena& arena, std::byte* to, const std::byte* from, int64_t bytes) {
  if (to == from || bytes == 0) return;
  Context& c = arena.local<Context>();
  use_arena_gpu(arena);  // a background thread has not selected a GPU
  c.queued("copy between ranks", cudaMemcpyAsync(to, from, static_cast<size_t>(bytes), cudaMemcpyDefault, c.stream()));
}

void copy_rows(Arena& arena, std::byte* to, int64_t to_pitch, const std::byte* from, int64_t from_pitch, int64_t width,
               int64_t rows) {
  if (width == 0 || rows == 0) return;
  Context& c = arena.local<Context>();
  use_arena_gpu(arena);
  c.queued("copy between ranks",
           cudaMemcpy2DAsync(to, static_cast<size_t>(to_pitch), from, static_cast<size_t>(from_pitch),
                             static_cast<size_t>(width), static_cast<size_t>(rows), cudaMemcpyDefault, c.stream()));
}

}  // namespace tessera::cuda
