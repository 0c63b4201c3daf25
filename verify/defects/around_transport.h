// A transport around another one that passes everything on: what spoils a call derives from it.
#pragma once
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "parallel/comm/transport.h"

namespace tessera {

class AroundTransport : public Transport {
 public:
  explicit AroundTransport(std::unique_ptr<Transport> inner) : inner_(std::move(inner)) {}
  int rank() const override { return inner_->rank(); }
  int size() const override { return inner_->size(); }
  int world_rank(int rank) const override { return inner_->world_rank(rank); }
  int rank_here() const override { return inner_->rank_here(); }
  std::string_view kind() const override { return inner_->kind(); }
  void set_axis(const std::string& axis) override {
    Transport::set_axis(axis);
    inner_->set_axis(axis);
  }
  void set_flight(std::shared_ptr<Flight> flight) override { inner_->set_flight(std::move(flight)); }
  void send(int to, int tag, const std::byte* data, int64_t bytes) override { inner_->send(to, tag, data, bytes); }
  void recv(int from, int tag, std::byte* data, int64_t bytes) override { inner_->recv(from, tag, data, bytes); }
  void send_from_gpu(int to, int tag, const std::byte* data, int64_t bytes, Arena& gpu) override {
    inner_->send_from_gpu(to, tag, data, bytes, gpu);
  }
  void recv_to_gpu(int from, int tag, std::byte* data, int64_t bytes, Arena& gpu) override {
    inner_->recv_to_gpu(from, tag, data, bytes, gpu);
  }
  int64_t direct(const Call& call) override { return inner_->direct(call); }
  int64_t native(const Call& call) override { return inner_->native(call); }
  bool only_queues(const Call& call) const override { return inner_->only_queues(call); }
  std::function<void()> native_beside(const Call& call) override { return inner_->native_beside(call); }
  std::shared_ptr<CommWorker> background() override { return inner_->background(); }
  void look_after(double waited_s, const std::string& during) override { inner_->look_after(waited_s, during); }
  // The groups made of this one are spoilt as it is.
  std::unique_ptr<Transport> split(int color, int key) override { return around(inner_->split(color, key)); }
  void fail(const std::string& cause) override { inner_->fail(cause); }
  bool only_native(const Call& call) const override { return inner_->only_native(call); }
  int failed_rank() const override { return inner_->failed_rank(); }
  std::string failure() const override { return inner_->failure(); }
  std::vector<CallLog*> logs() override { return inner_->logs(); }
  bool maps_peers() const override { return inner_->maps_peers(); }

 protected:
  virtual std::unique_ptr<Transport> around(std::unique_ptr<Transport> inner) const = 0;
  Transport& inner() const { return *inner_; }

 private:
  std::unique_ptr<Transport> inner_;
};

}  // namespace tessera
