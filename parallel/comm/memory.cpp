// The two kinds of memory.
#include "parallel/comm/memory.h"

#include <cstring>

#include "parallel/comm/cuda/streams.h"
#include "parallel/comm/cuda/sums.h"
#include "parallel/comm/sums.h"
#include "tensor/cpu/vectorize.h"
#include "tensor/tensor.h"

namespace tessera {
namespace {

Device device_of(const Call& call) { return call.gpu ? Device::cuda : Device::cpu; }

}  // namespace

void Memory::copy(std::byte* to, const std::byte* from, int64_t bytes) const {
  const auto on_host = [&] {
    if (to != from && bytes > 0 && !cpu::Idle::here()) std::memmove(to, from, static_cast<size_t>(bytes));
  };
  on_device(device_of(call_), on_host, [&] { cuda::copy(*call_.gpu, to, from, bytes); });
}

void Memory::reduce_ranks(std::span<const std::byte* const> in, std::span<std::byte* const> out, Range range) const {
  on_device(
      device_of(call_), [&] { tessera::reduce_ranks(call_.dtype, call_.reduction, in, out, range); },
      [&] { cuda::reduce_ranks(call_, in, out, range); });
}

// A sum of two on a GPU, rounded once as well.
void Memory::reduce_into(std::byte* total, const std::byte* x, int64_t count) const {
  const auto on_gpu = [&] {
    const std::byte* const in[] = {total, x};
    cuda::reduce_ranks(call_, in, std::span(&total, 1), {0, count});
  };
  on_device(
      device_of(call_), [&] { tessera::reduce_into(call_.dtype, call_.reduction, total, x, count); }, on_gpu);
}

void Memory::send(Transport& t, int to, int tag, const std::byte* data, int64_t bytes) const {
  if (call_.gpu)
    t.send_from_gpu(to, tag, data, bytes, *call_.gpu);
  else
    t.send(to, tag, data, bytes);
}

void Memory::recv(Transport& t, int from, int tag, std::byte* data, int64_t bytes) const {
  if (call_.gpu)
    t.recv_to_gpu(from, tag, data, bytes, *call_.gpu);
  else
    t.recv(from, tag, data, bytes);
}

Scratch::Scratch(const Call& call, int64_t bytes) : on_host_(call.gpu ? 0 : static_cast<size_t>(bytes)) {
  if (call.gpu) on_gpu_ = std::make_shared<Storage>(call.gpu->shared_from_this(), bytes, Category::communication);
}

std::byte* Scratch::gpu_data() const { return on_gpu_->data(); }

}  // namespace tessera
