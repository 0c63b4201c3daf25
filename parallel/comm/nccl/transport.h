// The calls that the NCCL transport makes of NCCL and CUDA, so that a test can stand in for both and see every call.
//
// All calls for the communicators of one rank come from one thread at a time. None of them waits for other ranks:
// finished() says when what was asked for is done. What NCCL does runs beside the rank's kernels, on one stream for all
// communicators of the rank: kernels of two communicators that run at the same time may wait for each other's ranks for
// ever, and on one stream they run in the order in which they were asked for. Graphs in which collectives of a
// communicator were captured must go before it does.
#pragma once

#include "parallel/comm/transport.h"

namespace tessera {

struct NcclId {
  alignas(8) std::array<char, 128> bytes{};
};

class NcclApi : NotCopied {
 public:
  virtual ~NcclApi() = default;

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
  // An object for another communicator, with this library, device and stream.
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

// Ranks with a GPU each: collectives of arrays on GPUs are NCCL's, everything else goes over another transport, the
// carrier (threads or MPI), which also hands around NCCL's id.
//
//   array on a GPU    collectives by native(); sums in NCCL's order, bfloat16 too
//                     other messages: the carrier's; of threads from GPU to GPU, of MPI through the host
//   array on the host the carrier's, with its own order of sums
//
// A collective comes after what the rank's stream was given before it, runs on NCCL's stream, and what the rank's
// stream is given later comes after it. The host waits for its end, and looks at the clock and at ranks that fail
// meanwhile, and at what they have come to (parallel/comm/call.h), which names a rank that does not come or asks
// for something else, where NCCL would wait for ever; only while the rank's stream is captured as a CUDA graph it does
// not: then collectives are nodes of the graph, and who waits for the graph looks after the ranks (check_progress).
// Those that are started (Communicator::start_...) run beside the kernels that are queued meanwhile. Pieces that are
// uneven, which NCCL has no collective for, go as a group of one reduce or broadcast for each rank, or of an all_to_all
// as a group of sends and receives.
//
// Order: NCCL wants all ranks to begin the collectives of all their communicators in the same order. Here that is the
// order of the program, which is one for all ranks: the communicators of a rank (all that were split from one) share
// NCCL's stream, one thread for what is started in the background, and nothing passes by that thread while it has work
// (Communicator::run). In a graph they are a chain, since they lie on one stream. When one of them has failed, all are
// aborted, and nothing may follow in any.
//
// Tests see which calls are made, in which order and with which pointers (tests/parallel/nccl_test.cpp), and run them
// over an emulated NCCL (tests/parallel/gpu_test.cpp); that NCCL itself does with them what is expected here has to be
// tested on GPUs.

class NcclTransport final : public Transport {
 public:
  // Joins the communicator of all ranks of the carrier; every rank calls it.
  NcclTransport(std::unique_ptr<NcclApi> api, std::unique_ptr<Transport> carrier, double timeout_s);
  ~NcclTransport() override;

  int rank() const override { return carrier_->rank(); }
  int size() const override { return carrier_->size(); }
  int world_rank(int rank) const override { return carrier_->world_rank(rank); }
  int local_rank() const override { return carrier_->local_rank(); }
  std::string_view kind() const override { return "NCCL ranks"; }
  void set_axis(const std::string& axis) override {
    Transport::set_axis(axis);
    carrier_->set_axis(axis);
  }
  void set_flight(std::shared_ptr<Flight> flight) override {
    carrier_->set_flight(flight);
    Transport::set_flight(std::move(flight));
  }
  void send(int to, int tag, const std::byte* data, int64_t bytes) override { carrier_->send(to, tag, data, bytes); }
  void recv(int from, int tag, std::byte* data, int64_t bytes) override { carrier_->recv(from, tag, data, bytes); }
  void send_from_gpu(int to, int tag, const std::byte* data, int64_t bytes, Arena& gpu) override {
    carrier_->send_from_gpu(to, tag, data, bytes, gpu);
  }
  void recv_to_gpu(int from, int tag, std::byte* data, int64_t bytes, Arena& gpu) override {
    carrier_->recv_to_gpu(from, tag, data, bytes, gpu);
  }
  bool only_native(const Call& call) const override { return call.gpu && call.op != Op::barrier && size() > 1; }
  int64_t direct(const Call& call) override { return carrier_->direct(call); }
  int64_t native(const Call& call) override;
  bool only_queues(const Call& call) const override { return only_native(call) && api_->is_captured(*call.gpu); }
  std::function<void()> native_beside(const Call& call) override;
  std::shared_ptr<CommWorker> background() override;
  void check_progress(double waited_s, const std::string& during) override;
  std::unique_ptr<Transport> split(int color, int key) override;
  void fail(const std::string& cause) override { carrier_->fail(cause); }
  int failed_rank() const override { return carrier_->failed_rank(); }
  std::string failure() const override { return carrier_->failure(); }
  bool maps_peers() const override { return carrier_->maps_peers(); }

 private:
  struct Family;  // the communicators of one rank
  NcclTransport(std::unique_ptr<NcclApi> api, std::unique_ptr<Transport> carrier, double timeout_s,
                std::shared_ptr<Family> family);
  void check_peers(const std::string& during) const;
  void compare(const Call& call) const;
  int behind(const Call* call) const;
  std::string last_operation(int rank, const Call& call) const;
  std::string in_vain(const Call* call) const;
  void wait_until(bool (NcclApi::*reached)(), const std::string& during, const Call* call = nullptr);
  std::shared_ptr<void> begin(const Call& call);
  void collective(const Call& call);
  void reduce_scatter(const Call& call, bool even);
  void all_gather(const Call& call, bool even);
  void exchange(const Call& call);
  Range range(const Call& call, int rank) const { return piece(call.count, size(), rank); }

  std::unique_ptr<NcclApi> api_;
  std::unique_ptr<Transport> carrier_;
  double timeout_s_;
  std::shared_ptr<Family> family_;
  std::vector<CallLog*> logs_;  // by rank; empty where ranks are on several machines
};

}  // namespace tessera
