// Ranks that are processes under MPI, on one host or several.
//
// Messages are MPI's. The direct exchange of ranks on one host goes through memory that they share
// (parallel/comm/shared_exchange.h); across hosts it is made of messages. native() is MPI's own collective, whose
// order of summation is the library's. Nothing waits without looking at failures and at the clock; what cannot be
// interrupted is under the eyes of the watch. Arrays on GPUs go through the host's memory, message by message.
#pragma once
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "parallel/comm/mpi/world.h"
#include "parallel/comm/transport.h"

namespace tessera {

class MpiTransport final : public Transport {
 public:
  MpiTransport(std::shared_ptr<MpiWorld> world, MpiGroup& group);

  int rank() const override { return group_.rank; }
  int size() const override { return static_cast<int>(group_.world_ranks.size()); }
  int world_rank(int rank) const override { return group_.world_ranks[static_cast<size_t>(rank)]; }
  int rank_here() const override { return world_->rank_here(); }
  std::string_view kind() const override { return "MPI ranks"; }
  void send(int to, int tag, const std::byte* data, int64_t bytes) override;
  void recv(int from, int tag, std::byte* data, int64_t bytes) override;
  int64_t direct(const Call& call) override;
  int64_t native(const Call& call) override;
  std::unique_ptr<Transport> split(int color, int key) override;
  void fail(const std::string& cause) override;
  int failed_rank() const override { return world_->watch().failed_rank(); }
  std::string failure() const override { return world_->watch().failure(); }
  std::vector<CallLog*> logs() override;
  bool maps_peers() const override { return shared_ && world_->peers() != nullptr; }

 private:
  // Until done() is true; throws when a rank fails or the time is over.
  template <class Done>
  void patiently(int from, int64_t bytes, const Done& done);

  std::shared_ptr<MpiWorld> world_;
  MpiGroup& group_;
  std::optional<SharedExchange> shared_;
};

// MPI's collective for a call; blocks until it is done.
void mpi_collective(MPI_Comm comm, const Call& call);

}  // namespace tessera
