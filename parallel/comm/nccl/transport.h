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
// not: then collectives are nodes of the graph, and who waits for the graph looks after the ranks (look_after). Those
// that are started (Communicator::start_...) run beside the kernels that are queued meanwhile. Pieces that are uneven,
// which NCCL has no collective for, go as a group of one reduce or broadcast for each rank, or of an all_to_all as a
// group of sends and receives.
//
// Order: NCCL wants all ranks to begin the collectives of all their communicators in the same order. Here that is the
// order of the program, which is one for all ranks: the communicators of a rank (all that were split from one) share
// NCCL's stream, one thread for what is started in the background, and nothing passes by that thread while it has work
// (Communicator::run). In a graph they are a chain, since they lie on one stream. When one of them has failed, all are
// aborted, and nothing may follow in any.
//
// Tests see which calls are made, in which order and with which pointers (tests/parallel/nccl_test.cpp), and run them
// over an emulated NCCL (nccl_gpu_test.cpp); that NCCL itself does with them what is expected here has to be
// tested on GPUs.
#pragma once
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "parallel/comm/nccl/api.h"
#include "parallel/comm/transport.h"

namespace tessera {

class NcclTransport final : public Transport {
 public:
  // Joins the communicator of all ranks of the carrier; every rank calls it.
  NcclTransport(std::unique_ptr<NcclApi> api, std::unique_ptr<Transport> carrier, double timeout_s);
  ~NcclTransport() override;

  int rank() const override { return carrier_->rank(); }
  int size() const override { return carrier_->size(); }
  int world_rank(int rank) const override { return carrier_->world_rank(rank); }
  int rank_here() const override { return carrier_->rank_here(); }
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
  void look_after(double waited_s, const std::string& during) override;
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
  std::string last_of(int rank, const Call& call) const;
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
