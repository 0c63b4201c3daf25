// A transport that forwards to another one, for transports that replace or alter some of its operations.
#pragma once
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <utility>

#include "parallel/comm/transport.h"

namespace tessera {

class ForwardingTransport : public Transport {
 public:
  explicit ForwardingTransport(std::unique_ptr<Transport> inner) : inner_(std::move(inner)) {}
  int rank() const override { return inner_->rank(); }
  int size() const override { return inner_->size(); }
  int world_rank(int rank) const override { return inner_->world_rank(rank); }
  int local_rank() const override { return inner_->local_rank(); }
  std::string_view kind() const override { return inner_->kind(); }
  void set_axis(const std::string& axis) override {
    Transport::set_axis(axis);
    inner_->set_axis(axis);
  }
  void set_flight(std::shared_ptr<Flight> flight) override {
    inner_->set_flight(flight);
    Transport::set_flight(std::move(flight));
  }
  void send(int to, int tag, const std::byte* data, int64_t bytes) override { inner_->send(to, tag, data, bytes); }
  void recv(int from, int tag, std::byte* data, int64_t bytes) override { inner_->recv(from, tag, data, bytes); }
  void send_from_gpu(int to, int tag, const std::byte* data, int64_t bytes, Arena& gpu) override {
    inner_->send_from_gpu(to, tag, data, bytes, gpu);
  }
  void recv_to_gpu(int from, int tag, std::byte* data, int64_t bytes, Arena& gpu) override {
    inner_->recv_to_gpu(from, tag, data, bytes, gpu);
  }
  int64_t direct(const Call& call) override { return inner_->direct(call); }
  void fail(const std::string& cause) override { inner_->fail(cause); }
  const FailureState* failure_state() const override { return inner_->failure_state(); }
  std::string failure() const override { return inner_->failure(); }
  bool maps_peers() const override { return inner_->maps_peers(); }

 protected:
  Transport& inner() const { return *inner_; }

 private:
  std::unique_ptr<Transport> inner_;
};

}  // namespace tessera
