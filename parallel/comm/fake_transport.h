// Any number of ranks without any: one rank of a world whose others do not exist. Nothing is moved and results are
// whatever was there before, but everything that this rank would send is counted, so bytes and calls of a plan for a
// thousand ranks can be known on a laptop.
#pragma once

#include "parallel/comm/algorithms.h"
#include "tensor/cpu/vectorize.h"
#include "tensor/error.h"

namespace tessera {

class FakeTransport final : public Transport {
 public:
  // `supports_row_slices`: as the ranks do that it stands for (Transport::supports_row_slices()).
  FakeTransport(int rank, int size, std::string_view kind = "fake ranks", bool supports_row_slices = false)
      : rank_(rank), size_(size), kind_(kind), takes_rows_(supports_row_slices) {}
  int rank() const override { return rank_; }
  int size() const override { return size_; }
  int world_rank(int rank) const override { return rank; }
  std::string_view kind() const override { return kind_; }
  void send(int, int, const std::byte*, int64_t) override {}
  void recv(int, int, std::byte*, int64_t) override {}
  void send_from_gpu(int, int, const std::byte*, int64_t, Arena&) override {}
  void recv_to_gpu(int, int, std::byte*, int64_t, Arena&) override {}
  // Where nothing is computed (cpu::DryRun) there are no messages either, and what is started holds its arrays until it
  // is waited for.
  bool supports_row_slices() const override { return takes_rows_; }
  int64_t direct(const Call& call) override {
    return cpu::DryRun::here() ? sent_directly(call, size_, rank_) : Transport::direct(call);
  }
  bool only_queues(const Call&) const override { return cpu::DryRun::here(); }
  std::function<void()> native_beside(const Call&) override {
    return [] {};
  }
  // Throws Error, since it is not known what the other ranks would ask for; make another FakeTransport instead.
  std::unique_ptr<Transport> split(int /*color*/, int /*key*/) override {
    throw Error("[comm] fake ranks cannot be split: the colors of the others are not known");
  }
  void fail(const std::string&) override {}

 private:
  int rank_, size_;
  std::string_view kind_;
  bool takes_rows_;
};

}  // namespace tessera
