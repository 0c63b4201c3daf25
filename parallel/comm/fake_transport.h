// A single rank of a world of any size whose other ranks do not exist. No data is moved and results keep their previous
// contents, but calls and bytes sent are counted, so the traffic of a thousand-rank plan can be computed on a laptop.
#pragma once
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>

#include "base/error.h"
#include "parallel/comm/algorithms.h"
#include "tensor/cpu/vectorize.h"

namespace tessera {

class FakeTransport final : public Transport {
 public:
  FakeTransport(int rank, int size, std::string_view kind = "fake ranks", bool supports_row_slices = false)
      : rank_(rank), size_(size), kind_(kind), row_slices_(supports_row_slices) {}
  int rank() const override { return rank_; }
  int size() const override { return size_; }
  int world_rank(int rank) const override { return rank; }
  std::string_view kind() const override { return kind_; }
  void send(int, int, const std::byte*, int64_t) override {}
  void recv(int, int, std::byte*, int64_t) override {}
  void send_from_gpu(int, int, const std::byte*, int64_t, Arena&) override {}
  void recv_to_gpu(int, int, std::byte*, int64_t, Arena&) override {}
  // In a dry run (cpu::DryRun) there are no messages, and started communications retain their arrays until wait().
  bool supports_row_slices() const override { return row_slices_; }
  int64_t direct(const Call& call) override {
    return cpu::DryRun::here() ? sent_directly(call, size_, rank_) : Transport::direct(call);
  }
  bool only_queues(const Call&) const override { return cpu::DryRun::here(); }
  std::function<void()> start_native(const Call&) override {
    return [] {};
  }
  std::unique_ptr<Transport> split(int /*color*/, int /*key*/) override {
    throw Error("[comm] FakeTransport: split() is not supported, because the colors of the other ranks are unknown");
  }
  void fail(const std::string&) override {}

 private:
  int rank_, size_;
  std::string_view kind_;
  bool row_slices_;
};

}  // namespace tessera
