// NcclApi with the real libraries; compiled if both are available or emulated (tests/cuda_emulator).
#include <nccl.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <thread>
#include <utility>

#include "parallel/comm/nccl/transport.h"
#include "tensor/cuda/context.h"

namespace tessera {

namespace {

void check(cudaError_t code, const char* call) {
  if (cuda::expected(code) != cudaSuccess) throw CommError(std::string(call) + ": " + cudaGetErrorString(code));
}

// A non-blocking communicator returns "in progress" for pending operations.
void check(ncclResult_t code, const char* call) {
  if (code != ncclSuccess && code != ncclInProgress)
    throw CommError(std::string(call) + ": " + ncclGetErrorString(code));
}

ncclDataType_t to_nccl_type(DType dtype) {
  switch (dtype) {
    case DType::float64:
      return ncclFloat64;
    case DType::float32:
      return ncclFloat32;
    case DType::bfloat16:
      return ncclBfloat16;
    case DType::int32:
      return ncclInt32;
    case DType::uint8:
      return ncclUint8;
    default:
      return ncclInt64;
  }
}

ncclRedOp_t to_nccl_op(Reduction reduction) { return reduction == Reduction::sum ? ncclSum : ncclMax; }
size_t size(int64_t count) { return static_cast<size_t>(count); }

struct NcclStream {
  explicit NcclStream(int gpu) : device(gpu) {
    check(cudaSetDevice(device), "cudaSetDevice");
    check(cudaStreamCreateWithFlags(stream.receive(), cudaStreamNonBlocking), "cudaStreamCreate");
    queued = cuda::make_event();
  }
  int device;
  cuda::Stream stream;
  cuda::Event queued;
};

class RealNccl final : public NcclApi {
 public:
  explicit RealNccl(std::shared_ptr<NcclStream> on) : on_(std::move(on)), stream_(on_->stream.get()) {}
  ~RealNccl() override {
    cudaSetDevice(on_->device);
    if (aborting_.joinable()) aborting_.join();
    if (comm_) ncclCommAbort(comm_);  // all operations are complete
  }

  NcclId make_id() override {
    ncclUniqueId made;
    check(ncclGetUniqueId(&made), "ncclGetUniqueId");
    NcclId id;
    static_assert(sizeof(made) == sizeof(id.bytes));
    std::memcpy(id.bytes.data(), &made, sizeof(made));
    return id;
  }
  void begin(int ranks, const NcclId& id, int rank) override {
    enter();
    ncclUniqueId unique_id;
    std::memcpy(&unique_id, id.bytes.data(), sizeof(unique_id));
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.blocking = 0;
    check(ncclCommInitRankConfig(&comm_, ranks, unique_id, rank, &config), "ncclCommInitRankConfig");
  }
  bool queued() override {
    enter();
    ncclResult_t state = ncclSuccess;
    check(ncclCommGetAsyncError(comm_, &state), "ncclCommGetAsyncError");
    check(state, "NCCL");
    return state != ncclInProgress;
  }
  bool finished() override {
    if (!queued()) return false;
    const cudaError_t done = cuda::expected(cudaStreamQuery(stream_));
    if (done == cudaErrorNotReady) return false;
    check(done, "cudaStreamQuery");
    return true;
  }
  // NCCL stops its kernels, then waits until no graph contains collectives of the communicator. A thread runs this
  // because the caller may still be waiting for such a graph.
  void abort() override {
    if (!comm_) return;
    aborting_ = std::thread([comm = std::exchange(comm_, nullptr), device = on_->device] {
      cudaSetDevice(device);
      ncclCommAbort(comm);
    });
  }
  void group_start() override {
    enter();
    check(ncclGroupStart(), "ncclGroupStart");
  }
  void group_end() override { check(ncclGroupEnd(), "ncclGroupEnd"); }
  void all_reduce(const void* in, void* out, int64_t count, DType dtype, Reduction reduction) override {
    enter();
    check(ncclAllReduce(in, out, size(count), to_nccl_type(dtype), to_nccl_op(reduction), comm_, stream_),
          "ncclAllReduce");
  }
  void reduce_scatter(const void* in, void* out, int64_t count, DType dtype, Reduction reduction) override {
    enter();
    check(ncclReduceScatter(in, out, size(count), to_nccl_type(dtype), to_nccl_op(reduction), comm_, stream_),
          "ncclReduceScatter");
  }
  void all_gather(const void* in, void* out, int64_t count, DType dtype) override {
    enter();
    check(ncclAllGather(in, out, size(count), to_nccl_type(dtype), comm_, stream_), "ncclAllGather");
  }
  void broadcast(const void* in, void* out, int64_t count, DType dtype, int root) override {
    enter();
    check(ncclBroadcast(in, out, size(count), to_nccl_type(dtype), root, comm_, stream_), "ncclBroadcast");
  }
  void reduce(const void* in, void* out, int64_t count, DType dtype, Reduction reduction, int root) override {
    enter();
    check(ncclReduce(in, out, size(count), to_nccl_type(dtype), to_nccl_op(reduction), root, comm_, stream_),
          "ncclReduce");
  }
  void send(const void* data, int64_t count, DType dtype, int to) override {
    enter();
    check(ncclSend(data, size(count), to_nccl_type(dtype), to, comm_, stream_), "ncclSend");
  }
  void recv(void* data, int64_t count, DType dtype, int from) override {
    enter();
    check(ncclRecv(data, size(count), to_nccl_type(dtype), from, comm_, stream_), "ncclRecv");
  }
  void after(Arena& gpu) override {
    enter();
    const cudaEvent_t queued = on_->queued.get();
    check(cudaEventRecord(queued, gpu.local<cuda::Context>().stream()), "cudaEventRecord");
    check(cudaStreamWaitEvent(stream_, queued, 0), "cudaStreamWaitEvent");
  }
  bool is_captured(Arena& gpu) const override { return gpu.local<cuda::Context>().is_capturing(); }
  std::shared_ptr<void> point() override {
    enter();
    auto event = std::make_shared<cuda::Event>(cuda::make_event());
    check(cudaEventRecord(event->get(), stream_), "cudaEventRecord");
    return event;
  }
  void join(Arena& gpu, const std::shared_ptr<void>& point) override {
    enter();
    const cudaEvent_t event = static_cast<cuda::Event*>(point.get())->get();
    check(cudaStreamWaitEvent(gpu.local<cuda::Context>().stream(), event, 0), "cudaStreamWaitEvent");
  }
  std::unique_ptr<NcclApi> another() const override { return std::make_unique<RealNccl>(on_); }

 private:
  // Each thread has its own current device, and background work runs on a separate thread.
  void enter() const { check(cudaSetDevice(on_->device), "cudaSetDevice"); }
  std::shared_ptr<NcclStream> on_;
  cudaStream_t stream_;
  ncclComm_t comm_ = nullptr;
  std::thread aborting_;
};

}  // namespace

void prepare_for_nccl() {
  setenv("CUDA_MODULE_LOADING", "EAGER", 0);
  setenv("NCCL_GRAPH_REGISTER", "0", 0);
}

std::unique_ptr<NcclApi> real_nccl(int device, int devices_needed) {
  int devices = 0;
  if (cuda::expected(cudaGetDeviceCount(&devices)) != cudaSuccess) devices = 0;
  if (devices < devices_needed)
    throw Error("`backend` nccl: every rank needs a separate GPU; expected " + std::to_string(devices_needed) +
                " GPUs on this machine, got " + std::to_string(devices));
  return std::make_unique<RealNccl>(std::make_shared<NcclStream>(device));
}

}  // namespace tessera
