// Any number of ranks without any: one rank of a world whose others do not exist. Nothing is moved and results are
// whatever was there before, but everything that this rank would send is counted, so bytes and calls of a plan for a
// thousand ranks can be known on a laptop.
#pragma once
#include <memory>

#include "parallel/comm/transport.h"
#include "tensor/error.h"

namespace tessera {

class FakeTransport final : public Transport {
 public:
  FakeTransport(int rank, int size) : rank_(rank), size_(size) {}
  int rank() const override { return rank_; }
  int size() const override { return size_; }
  int world_rank(int rank) const override { return rank; }
  std::string_view kind() const override { return "fake ranks"; }
  void send(int, int, const std::byte*, int64_t) override {}
  void recv(int, int, std::byte*, int64_t) override {}
  void send_from_gpu(int, int, const std::byte*, int64_t, Arena&) override {}
  void recv_to_gpu(int, int, std::byte*, int64_t, Arena&) override {}
  // What the other ranks would ask for is not known. Throws Error; make another FakeTransport instead.
  std::unique_ptr<Transport> split(int /*color*/, int /*key*/) override {
    throw Error("[comm] fake ranks cannot be split: the colors of the others are not known");
  }
  void fail(const std::string&) override {}

 private:
  int rank_, size_;
};

}  // namespace tessera
