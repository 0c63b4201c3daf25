// CUDA streams and devices.
#include "tensor/cuda/context.h"

#include <fmt/format.h>
#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <string_view>

#include "tensor/cuda/copy.h"
#include "tensor/cuda/gpus.h"

namespace tessera::cuda {

namespace {

// Without a driver, the runtime reports an insufficient driver of version 0.
std::string why_no_gpu(cudaError_t found) {
  if (found == cudaSuccess || found == cudaErrorNoDevice) return "the NVIDIA driver lists none";
  if (found != cudaErrorInsufficientDriver) return cudaGetErrorString(found);
  int driver = 0, own = 0;
  check(cudaDriverGetVersion(&driver), "gpu");
  check(cudaRuntimeGetVersion(&own), "gpu");
  const auto name = [](int version) { return fmt::format("CUDA {}.{}", version / 1000, version % 1000 / 10); };
  return driver == 0
             ? "this machine has no NVIDIA driver, or the container has no access to it"
             : fmt::format("the NVIDIA driver is for {}, older than this program's {}", name(driver), name(own));
}

}  // namespace

Context::Context() {
  check(cudaGetDevice(&gpu_), "context");
  check(cudaDeviceGetAttribute(&max_shared_, cudaDevAttrMaxSharedMemoryPerBlockOptin, gpu_), "context");
  for (Stream* made : {&stream_, &copies_})
    check(cudaStreamCreateWithFlags(made->receive(), cudaStreamNonBlocking), "context");
}

void Context::finish() noexcept {
  cudaStreamSynchronize(copies());
  cudaStreamSynchronize(stream());
}

void open_stream(Arena& arena) { arena.local<Context>(); }
void finish_stream(Arena& arena) noexcept { arena.local<Context>().finish(); }

void Context::require_no_capture(const char* op) const {
  if (capturing_)
    throw Error(
        fmt::format("[{}] the host waits for the GPU during CUDA graph capture; expected only asynchronous work "
                    "(`cuda_graph` off disables capture)",
                    op));
}

void Context::synchronize() {
  require_no_capture(last_op());
  ++synchronizations_;
  if (const cudaError_t result = expected(cudaStreamSynchronize(stream())); result != cudaSuccess)
    throw Error(fmt::format("[{}] CUDA: {}, reported while waiting: this op or an earlier one failed; "
                            "CUDA_LAUNCH_BLOCKING=1 with `cuda_graph` off identifies it",
                            last_op(), cudaGetErrorString(result)),
                Status::communication);
  indices_.report();
}

Bounds Context::bounds(const Indices& indices) {
  Bounds found = indices_.bounds(indices);
  if (found.first) return found;
  synchronize();  // no kernel writes to a slot any more
  indices_.clear();
  return indices_.bounds(indices);
}

// Captures only this thread's work, so other ranks and threads that load modules are unaffected.
void Context::begin_capture() {
  check(cudaStreamBeginCapture(stream(), cudaStreamCaptureModeThreadLocal), "graph");
  capturing_ = true;
}

cudaError_t Context::end_capture(cudaGraph_t& graph) {
  return capturing_.exchange(false) ? expected(cudaStreamEndCapture(stream(), &graph)) : cudaSuccess;
}

int gpu_count() {
  int count = 0;
  return expected(cudaGetDeviceCount(&count)) == cudaSuccess ? count : 0;
}

namespace {

cudaDeviceProp properties_here() {
  int gpu = 0;
  cudaDeviceProp properties{};
  check(cudaGetDevice(&gpu), "gpu");
  check(cudaGetDeviceProperties(&properties, gpu), "gpu");
  return properties;
}

}  // namespace

std::string refuses_bfloat16() {
  const cudaDeviceProp info = properties_here();
  return info.major >= 8 ? ""
                         : fmt::format("{} has compute capability {}.{}, but bf16 matmuls require 8.0; expected fp32",
                                       info.name, info.major, info.minor);
}

std::string gpus_apart(int count) {
  for (int a = 0; a < count; ++a)
    for (int b = a + 1; b < count; ++b) {
      int reaches = 0;
      check(cudaDeviceCanAccessPeer(&reaches, a, b), "gpu");
      if (reaches == 0) return fmt::format("GPUs {} and {}", a, b);
    }
  return "";
}

std::string describe_gpu() {
  const cudaDeviceProp properties = properties_here();
  return fmt::format("{}, {} multiprocessors, {:.1f} GiB", properties.name, properties.multiProcessorCount,
                     static_cast<double>(properties.totalGlobalMem) / 0x1p30);
}

void use_gpu(int gpu) {
  int count = 0;
  if (const cudaError_t result = expected(cudaGetDeviceCount(&count)); result != cudaSuccess || count == 0)
    throw Error(fmt::format("`device` cuda: no GPU was found: {}; `device` cpu needs none", why_no_gpu(result)));
  if (gpu < 0 || gpu >= count)
    throw Error(fmt::format("`device` cuda: GPU {} was requested; this machine has {} (numbered from 0)", gpu, count));
  check(cudaSetDevice(gpu), "gpu");
  if (!has_code_here()) {
    const cudaDeviceProp info = properties_here();
    throw Error(
        fmt::format("`device` cuda: this program was not built for {} (compute capability {}.{}); rebuild with "
                    "-DTESSERA_CUDA=ON -DCMAKE_CUDA_ARCHITECTURES={}{}",
                    info.name, info.major, info.minor, info.major, info.minor));
  }
}

namespace {

// Owned by the arena (Arena::local), so a captured copy may read it during the arena's lifetime.
class PinnedConstants {
 public:
  const std::byte* find(std::span<const std::byte> values) {
    const std::string_view bytes(reinterpret_cast<const char*>(values.data()), values.size());
    const std::lock_guard lock(mutex_);
    auto found = pinned_.find(bytes);
    if (found == pinned_.end()) {
      const std::shared_ptr<std::byte> memory = pinned_memory(static_cast<int64_t>(bytes.size()));
      std::memcpy(memory.get(), bytes.data(), bytes.size());
      found = pinned_.emplace(bytes, memory).first;
    }
    return found->second.get();
  }

 private:
  std::mutex mutex_;
  std::map<std::string, std::shared_ptr<std::byte>, std::less<>> pinned_;
};

}  // namespace

void copy_cached_constant(const Tensor& to, std::span<const std::byte> values) {
  if (!values.empty()) queue_copy(to, to.arena()->local<PinnedConstants>().find(values));
}

namespace {

using Captured = Handle<cudaGraph_t, cudaGraphDestroy>;

class Capture {
 public:
  explicit Capture(Context& context) : context_(context) { context_.begin_capture(); }
  ~Capture() {
    cudaGraph_t unfinished = nullptr;
    context_.end_capture(unfinished);
    const Captured dropped(unfinished);
  }
  Capture(const Capture&) = delete;
  Capture& operator=(const Capture&) = delete;
  Captured end() {
    cudaGraph_t graph = nullptr;
    if (const cudaError_t result = context_.end_capture(graph); result != cudaSuccess)
      throw Error(std::string("[graph] CUDA: ") + cudaGetErrorString(result) + ", reported after '" +
                      context_.last_op() +
                      "' was captured: some earlier work cannot be captured; `cuda_graph` off disables capture",
                  Status::communication);
    return Captured(graph);
  }

 private:
  Context& context_;
};

}  // namespace

Graph::Graph(ArenaPtr arena, const std::function<void()>& f) : arena_(std::move(arena)), layout_(arena_->layout()) {
  Captured graph;
  {
    const Arena::Fixed fixed(*arena_);
    Capture capture(arena_->local<Context>());
    f();
    graph = capture.end();
  }
  cudaGraphExec_t executable = nullptr;
  check(cudaGraphInstantiate(&executable, graph.get(), 0), "graph");
  executable_ =
      std::shared_ptr<void>(executable, [](void* e) { cudaGraphExecDestroy(static_cast<cudaGraphExec_t>(e)); });
}

int64_t synchronizations(Arena& arena) { return arena.local<Context>().synchronizations(); }

void Graph::launch() const {
  const Arena::AllowReuse reuse(*arena_);
  Context& c = arena_->local<Context>();
  c.queued("captured step", cudaGraphLaunch(static_cast<cudaGraphExec_t>(executable_.get()), c.stream()));
}

IndexChecks::IndexChecks() {
  check(cudaHostAlloc(memory_.receive(), kMax * sizeof(*first_), cudaHostAllocDefault), "context");
  first_ = static_cast<unsigned long long*>(memory_.get());
  std::fill(first_, first_ + kMax, kNone);
}

Bounds IndexChecks::bounds(const Indices& indices) {
  const std::lock_guard lock(mutex_);
  size_t slot = 0;
  while (slot < count_ &&
         (known_[slot].limit != indices.limit || std::string_view(known_[slot].op) != std::string_view(indices.op)))
    ++slot;
  if (slot == kMax) return {};
  if (slot == count_) known_[count_++] = indices;
  return {first_ + slot, indices.limit};
}

void IndexChecks::report() {
  const std::lock_guard lock(mutex_);
  const auto* const found = std::find_if(first_, first_ + count_, [](unsigned long long f) { return f != kNone; });
  if (found == first_ + count_) return;
  const Indices of = known_[static_cast<size_t>(found - first_)];
  const auto place = *found >> 32;
  const auto value = static_cast<int32_t>(static_cast<uint32_t>(*found));
  std::fill(first_, first_ + count_, kNone);
  throw Error(fmt::format("[{}] {} {} {} {} is outside [0, {})", of.op, of.what, value, of.where, place, of.limit));
}

std::span<const unsigned long long> IndexChecks::complaints() {
  const std::lock_guard lock(mutex_);
  return {first_, count_};
}

void IndexChecks::clear() {
  const std::lock_guard lock(mutex_);
  count_ = 0;
}

namespace {

constexpr int64_t kCapacity = int64_t{1} << 38, kPinnedAtOnce = int64_t{16} << 20;

// Host memory that GPUs access, pinned in chunks as it grows.
class PinnedRegion final : public Region {
 public:
  PinnedRegion() : Region(Device::cpu) {
    int gpu = 0, same_address = 0;
    check(cudaGetDevice(&gpu), "offload");
    check(cudaDeviceGetAttribute(&same_address, cudaDevAttrCanUseHostPointerForRegisteredMem, gpu), "offload");
    if (same_address == 0) throw Error("`offload`: this GPU cannot access pinned host memory by its host address");
    void* const p =
        mmap(nullptr, kCapacity, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p == MAP_FAILED)
      throw Error("[arena] cannot reserve " + std::to_string(kCapacity) +
                  " bytes of address space: " + std::strerror(errno));
    base_ = static_cast<std::byte*>(p);
    capacity_ = kCapacity;
  }
  ~PinnedRegion() override {
    cudaDeviceSynchronize();  // kernels may still use the region
    for (int64_t at = 0; at < pinned_; at += kPinnedAtOnce) cudaHostUnregister(base_ + at);
    munmap(base_, kCapacity);
  }

  void commit(int64_t bytes) override {
    for (; pinned_ < bytes; pinned_ += kPinnedAtOnce)
      if (const cudaError_t result = expected(cudaHostRegister(base_ + pinned_, static_cast<size_t>(kPinnedAtOnce),
                                                               cudaHostRegisterPortable | cudaHostRegisterMapped));
          result != cudaSuccess)
        throw Error("[arena] CUDA: cannot pin " + std::to_string(kPinnedAtOnce) +
                    " bytes of host memory in addition to the " + std::to_string(pinned_) +
                    " in use: " + cudaGetErrorString(result));
  }

 private:
  int64_t pinned_ = 0;
};

}  // namespace

std::unique_ptr<Region> pinned_region() { return std::make_unique<PinnedRegion>(); }

}  // namespace tessera::cuda
