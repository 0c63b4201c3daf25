// The parts of a transport that need no memory in common.
#include "parallel/comm/transport.h"

#include <string>
#include <vector>

#include "parallel/comm/algorithms.h"
#include "parallel/comm/cuda/streams.h"
#include "parallel/comm/flight.h"
#include "tensor/cuda/copy.h"

namespace tessera {

void Board::fail(int world_rank, const std::string& cause) {
  const std::lock_guard lock(mutex_);
  int none = -1;
  const bool first = failed_.compare_exchange_strong(none, world_rank, std::memory_order_seq_cst);
  if (first || (none == world_rank && cause_.empty())) cause_ = cause;
}

std::string Board::cause() const {
  const std::lock_guard lock(mutex_);
  return cause_;
}

void PeerWait::overdue(double seconds, bool again) {
  if (!transport_.flight_) return;
  const auto [during, last] = what_();
  transport_.flight_->overdue(transport_.axis_, during, transport_.world_rank(rank_), last, seconds, again);
}

void PeerWait::waited(double seconds) {
  if (transport_.flight_) transport_.flight_->waited(transport_.world_rank(rank_), seconds);
}

void Transport::send_from_gpu(int to, int tag, const std::byte* data, int64_t bytes, Arena& gpu) {
  std::vector<std::byte> copy(static_cast<size_t>(bytes));
  if constexpr (kWithCuda) {
    cuda::copy(gpu, copy.data(), data, bytes);
    cuda::synchronize(gpu);
  }
  send(to, tag, copy.data(), bytes);
}

void Transport::recv_to_gpu(int from, int tag, std::byte* data, int64_t bytes, Arena& gpu) {
  std::vector<std::byte> copy(static_cast<size_t>(bytes));
  recv(from, tag, copy.data(), bytes);
  if constexpr (kWithCuda) {
    cuda::copy(gpu, data, copy.data(), bytes);
    cuda::synchronize(gpu);
  }
}

int64_t Transport::direct(const Call& call) { return direct_by_messages(*this, call); }

std::function<void()> Transport::native_beside(const Call& call) {
  throw Error("[comm] " + std::string(kind()) + " cannot queue " + describe(call));
}

int64_t Transport::native(const Call& call) {
  throw Error("[comm] " + std::string(kind()) + " have no collective of their own for " + describe(call) +
              "; expected the algorithm direct, ring, tree or root");
}

}  // namespace tessera
