// Copies, conversions and fills on a GPU.
#include <cstdint>
#include <memory>

#include "tensor/cuda/copy.h"
#include "tensor/cuda/gpus.h"
#include "tensor/cuda/loops.cuh"

namespace tessera::cuda {
namespace {

template <class To, class From>
struct Convert {
  __device__ To operator()(From x) const { return converted<To>(x); }
};

template <class T>
struct Constant {
  T value;
  __device__ T operator()() const { return value; }
};

__global__ void fill_range_kernel(int32_t* t, int64_t n) {
  if (const int64_t i = global_thread(); i < n) t[i] = static_cast<int32_t>(i);
}

}  // namespace

void copy_bytes(const Tensor& to, const Tensor& from) {
  const Tensor& on_gpu = to.device() == Device::cuda ? to : from;
  Context& c = context(on_gpu);
  c.require_no_capture("copy");
  c.queued("copy", cudaMemcpyAsync(to.address(), from.address(), static_cast<size_t>(from.nbytes()), cudaMemcpyDefault,
                                   c.stream()));
  c.synchronize();
}

void copy(const Tensor& to, const Tensor& from) {
  with_dtype(to.dtype(), [&](auto t) {
    with_dtype(from.dtype(), [&](auto f) {
      using T = decltype(t);
      using F = decltype(f);
      map<T, F>("copy", Convert<T, F>{}, to, from);
    });
  });
}

bool has_code_here() {
  cudaFuncAttributes attributes{};
  return expected(cudaFuncGetAttributes(&attributes, reinterpret_cast<const void*>(fill_range_kernel))) == cudaSuccess;
}

bool has_float64_kernels() { return kFloat64Kernels; }

void synchronize(Arena& arena) { arena.local<Context>().synchronize(); }

std::shared_ptr<std::byte> pinned_memory(int64_t bytes) {
  void* memory = nullptr;
  check(cudaHostAlloc(&memory, static_cast<size_t>(bytes), cudaHostAllocDefault), "pinned memory");
  return {static_cast<std::byte*>(memory), [](std::byte* p) { cudaFreeHost(p); }};
}

void queue_copy(const Tensor& to, const std::byte* pinned) {
  Context& c = context(to);
  c.queued("copy",
           cudaMemcpyAsync(to.address(), pinned, static_cast<size_t>(to.nbytes()), cudaMemcpyHostToDevice, c.stream()));
}

std::shared_ptr<void> start_copy(const Tensor& to, const std::byte* pinned) {
  Context& c = context(to);
  const auto event = std::make_shared<Event>(make_event());  // recorded after the queued work, then after the copy
  c.queued("copy", cudaEventRecord(event->get(), c.stream()));
  c.queued("copy", cudaStreamWaitEvent(c.copies(), event->get(), 0));
  c.queued("copy",
           cudaMemcpyAsync(to.address(), pinned, static_cast<size_t>(to.nbytes()), cudaMemcpyHostToDevice, c.copies()));
  c.queued("copy", cudaEventRecord(event->get(), c.copies()));
  return event;
}

void join_copy(const Tensor& to, const std::shared_ptr<void>& copy) {
  Context& c = context(to);
  c.queued("copy", cudaStreamWaitEvent(c.stream(), static_cast<Event*>(copy.get())->get(), 0));
}

void fill_range(const Tensor& t) {
  launch(context(t), "count up", {.blocks = blocks_for(t.numel(), kThreads)}, fill_range_kernel,
         t.device_data<int32_t>(), t.numel());
}

void fill(const Tensor& t, double value) {
  with_dtype(t.dtype(), [&](auto zero) {
    using T = decltype(zero);
    map<T>("fill", Constant<T>{converted<T>(value)}, t);
  });
}

}  // namespace tessera::cuda
