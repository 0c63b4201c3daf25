// The NCCL and CUDA calls of the NCCL transport, as an interface so that tests can emulate both and observe every call.
//
// All calls of one rank come from one thread at a time and do not wait for other ranks; finished() polls completion.
// All communicators of a rank use one stream, because concurrent kernels of two communicators could deadlock waiting
// for each other's ranks. Graphs with captured collectives must be destroyed before their communicator.
#pragma once
#include <algorithm>
#include <array>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "parallel/comm/forwarding_transport.h"

namespace tessera {

struct NcclId {
  alignas(8) std::array<char, 128> bytes{};
};

class NcclApi : NotCopied {
 public:
  virtual ~NcclApi() = default;

  virtual NcclId make_id() = 0;
  virtual void begin(int ranks, const NcclId& id, int rank) = 0;
  // Whether the enqueued work has reached NCCL's stream, as point() requires. Throws CommError on an NCCL error.
  virtual bool queued() = 0;
  virtual bool finished() = 0;  // whether the enqueued work is complete; not during capture
  // No calls may follow. Returns immediately, so that all communicators of a rank are aborted before one of them waits
  // for the GPU.
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

  // Orders subsequent work after everything queued on the arena's stream; if that stream is being captured as a CUDA
  // graph (tensor/cuda/gpus.h), the work becomes part of the graph.
  virtual void after(Arena& gpu) = 0;
  virtual bool is_captured(Arena& gpu) const = 0;
  // An event after everything queued on NCCL's stream.
  virtual std::shared_ptr<void> point() = 0;
  virtual void join(Arena& gpu, const std::shared_ptr<void>& point) = 0;
  // For another communicator with the same library, device and stream.
  virtual std::unique_ptr<NcclApi> another() const = 0;
};

// Must precede the first CUDA call of a process that uses NCCL. Sets two environment variables unless already set
// (CUDA_MODULE_LOADING, NCCL_GRAPH_REGISTER). Eager kernel loading: lazy loading may wait for an idle GPU, which
// deadlocks while an NCCL kernel waits for a rank whose next kernel is not loaded. No buffer registration in captured
// graphs: NCCL treats an address range as one allocation, but arenas combine several, so such graphs hang or access
// other memory (NVIDIA/nccl, issues 1820, 2332 and 2362).
void prepare_for_nccl();

// `device` is this rank's GPU. Throws Error if the machine has no NCCL or too few devices. Defined if the build has
// NCCL.
std::unique_ptr<NcclApi> real_nccl(int device, int devices_needed);

// Ranks with one GPU each: collectives of arrays on GPUs use NCCL, everything else (including the broadcast of NCCL's
// id) uses another transport, the carrier (threads or MPI).
//
//   array on a GPU    collectives by native(), with NCCL's summation order, also for bfloat16
//                     point-to-point messages: the carrier's; threads from GPU to GPU, MPI through the host
//   array on the host the carrier's, with its summation order
//
// A collective starts after earlier work on the rank's stream, runs on NCCL's stream, and precedes later work on the
// rank's stream. While the host waits for completion it polls the clock, failed ranks, and the ranks' call logs
// (parallel/comm/call.h), which identify a missing rank or a mismatched operation, where NCCL alone would hang. While
// the stream is captured as a CUDA graph the host does not wait: collectives become nodes of the graph, and the code
// that waits for the graph calls check_progress(). NCCL has no collectives for uneven chunks, so these become a group
// of one reduce or broadcast per rank, or for an all_to_all a group of sends and receives.
//
// NCCL requires all ranks to start the collectives of all their communicators in the same order, here program order:
// the communicators of a rank (all that were split from one) share NCCL's stream and one thread for background work,
// and no call bypasses that thread while it is busy (Communicator::run). If one communicator fails, all are aborted and
// unusable.

class NcclTransport final : public ForwardingTransport {
 public:
  // Joins the communicator of all ranks of the carrier. Collective.
  NcclTransport(std::unique_ptr<NcclApi> api, std::unique_ptr<Transport> carrier, double timeout_s);
  ~NcclTransport() override;

  std::string_view kind() const override { return "NCCL ranks"; }
  bool only_native(const Call& call) const override { return call.gpu && call.op != Op::barrier && size() > 1; }
  int64_t native(const Call& call) override;
  bool only_queues(const Call& call) const override { return only_native(call) && api_->is_captured(*call.gpu); }
  std::function<void()> start_native(const Call& call) override;
  std::shared_ptr<CommWorker> background() override;
  void check_progress(double waited_s, const std::string& during) override;
  std::unique_ptr<Transport> split(int color, int key) override;

 private:
  struct Family;
  NcclTransport(std::unique_ptr<NcclApi> api, std::unique_ptr<Transport> carrier, double timeout_s,
                std::shared_ptr<Family> family);
  void check_peers(const std::string& during) const;
  void compare(const Call& call) const;
  int late_rank(const Call* call) const;
  std::string last_operation(int rank, const Call& call) const;
  std::string timeout_cause(const Call* call) const;
  void wait_until(bool (NcclApi::*reached)(), const std::string& during, const Call* call = nullptr);
  std::shared_ptr<void> begin(const Call& call);
  void collective(const Call& call);
  void reduce_scatter(const Call& call, bool even);
  void all_gather(const Call& call, bool even);
  void exchange(const Call& call);
  Range range(const Call& call, int rank) const { return chunk_range(call.count, size(), rank); }

  std::unique_ptr<NcclApi> api_;
  double timeout_s_;
  std::shared_ptr<Family> family_;
  std::vector<CallLog*> logs_;  // by rank; empty if ranks are on several hosts
};

}  // namespace tessera
