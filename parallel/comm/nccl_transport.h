// Ranks with a GPU each: collectives of arrays on GPUs are NCCL's, everything else goes over another transport, the
// carrier (threads or MPI), which also hands around NCCL's id.
//
//   array on a GPU    collectives by native(); sums in NCCL's order, bfloat16 too
//                     messages: the carrier's; of threads from GPU to GPU, of MPI through the host
//   array on the host the carrier's, with its own order of sums
//
// A collective comes after what the rank's stream was given before it, runs on a stream of NCCL's, and returns when it
// is done: what the rank queues next comes after it. Those in the background (Communicator::start_...) run beside the
// kernels that are queued meanwhile. While a collective waits it looks at the clock and at ranks that fail. Pieces that
// are uneven, which NCCL has no collective for, go as a group of one reduce or broadcast for each rank.
//
// What can be tested without a GPU is: which calls are made, in which order and with which pointers
// (tests/parallel/nccl_test.cpp). That NCCL does with them what is expected here has to be tested on GPUs.
#pragma once
#include <memory>
#include <string>

#include "parallel/comm/nccl_api.h"
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
  void set_axis(const std::string& axis) override { carrier_->set_axis(axis); }
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
  std::unique_ptr<Transport> split(int color, int key) override;
  void fail(const std::string& cause) override { carrier_->fail(cause); }
  int failed_rank() const override { return carrier_->failed_rank(); }
  bool maps_peers() const override { return carrier_->maps_peers(); }

 private:
  void wait(const std::string& during);
  void collective(const Call& call);
  void reduce_scatter(const Call& call, bool even);
  void all_gather(const Call& call, bool even);
  void exchange(const Call& call);
  Range range(const Call& call, int rank) const { return piece(call.count, size(), rank); }

  std::unique_ptr<NcclApi> api_;
  std::unique_ptr<Transport> carrier_;
  double timeout_s_;
  bool broken_ = false;
};

}  // namespace tessera
