// The calls that the NCCL transport makes of NCCL and CUDA, so that a test can stand in for both and see every call.
//
// All calls for the communicators of one rank come from one thread at a time. None of them waits for other ranks:
// finished() says when what was asked for is done. What NCCL does runs beside the rank's kernels, on one stream for all
// communicators of the rank: kernels of two communicators that run at the same time may wait for each other's ranks for
// ever, and on one stream they run in the order in which they were asked for. Graphs in which collectives of a
// communicator were captured must go before it does.
#pragma once
#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>

#include "parallel/comm/call.h"

namespace tessera {

struct NcclId {
  alignas(8) std::array<char, 128> bytes{};
};

class NcclApi {
 public:
  NcclApi() = default;
  virtual ~NcclApi() = default;
  NcclApi(const NcclApi&) = delete;
  NcclApi& operator=(const NcclApi&) = delete;

  virtual NcclId make_id() = 0;
  virtual void begin(int ranks, const NcclId& id, int rank) = 0;  // joins the communicator
  // Whether what was asked for is on NCCL's stream by now, which has to be before a point behind it is taken. Throws
  // CommError when NCCL has met an error.
  virtual bool queued() = 0;
  virtual bool finished() = 0;  // and whether it is done; not while it is captured
  // Ends what is under way; nothing may follow. Returns at once, so that all communicators of a rank can be told before
  // the first of them waits for the GPU.
  virtual void abort() = 0;

  virtual void group_start() = 0;
  virtual void group_end() = 0;
  virtual void all_reduce(const void* in, void* out, int64_t count, DType dtype, Reduction reduction) = 0;
  virtual void reduce_scatter(const void* in, void* out, int64_t count_each, DType dtype, Reduction reduction) = 0;
  virtual void all_gather(const void* in, void* out, int64_t count_each, DType dtype) = 0;
  virtual void broadcast(const void* in, void* out, int64_t count, DType dtype, int root) = 0;
  virtual void reduce(const void* in, void* out, int64_t count, DType dtype, Reduction reduction, int root) = 0;
  virtual void send(const void* data, int64_t count, DType dtype, int to) = 0;
  virtual void recv(void* data, int64_t count, DType dtype, int from) = 0;

  // Lets work that is asked for from now on come after all that is queued on the arena's stream; where that is captured
  // as a CUDA graph (tensor/cuda/gpus.h) the work becomes a part of the graph.
  virtual void after(Arena& gpu) = 0;
  virtual bool is_captured(Arena& gpu) const = 0;  // now
  // The end of all that is queued on NCCL's stream.
  virtual std::shared_ptr<void> point() = 0;
  // Lets work that is queued on the arena's stream from now on come after the point.
  virtual void join(Arena& gpu, const std::shared_ptr<void>& point) = 0;
  // The same library, device and stream, for another communicator.
  virtual std::unique_ptr<NcclApi> another() const = 0;
};

// To be called before the first call of CUDA's in a process that will use NCCL, and says two things in the environment,
// where the user has not (CUDA_MODULE_LOADING, NCCL_GRAPH_REGISTER). Kernels are loaded before they are first launched:
// CUDA loads lazily otherwise, and may wait for the GPU to be idle when it does, which it never is while a kernel of
// NCCL's waits for a rank whose next kernel is still to be loaded. And NCCL registers no buffers of a captured graph:
// it takes a run of addresses for one piece of memory, and an arena's is mapped piece by piece, so such graphs hang or
// access other memory (NVIDIA/nccl, issues 1820, 2332 and 2362).
void prepare_for_nccl();

// NCCL and CUDA as they are. `device`: of this rank. Throws Error where this build or this machine has none, or fewer
// devices. Defined where NCCL is on.
std::unique_ptr<NcclApi> real_nccl(int device, int devices_needed);

}  // namespace tessera
