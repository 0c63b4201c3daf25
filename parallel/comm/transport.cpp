// The parts of a transport that need no memory in common.
#include "parallel/comm/transport.h"

#include "parallel/comm/algorithms.h"

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

int64_t Transport::direct(const Call& call) { return direct_by_messages(*this, call); }

int64_t Transport::native(const Call& call) {
  throw Error("[comm] " + std::string(kind()) + " have no collective of their own for " + describe(call) +
              "; expected the algorithm direct, ring, tree or root");
}

}  // namespace tessera
