// Ranks that are processes which met at an address (parallel/comm/tcp/rendezvous.h): messages over TCP, a connection
// between every two of them. The direct exchange is made of messages. Each connection has a thread that reads what
// comes, so that a sender never waits for the receiver; a rank that has gone is seen when its connection ends.
//
// A message is a head (which group, tag, how many bytes) and its bytes. Groups that are split from another have the
// same number on all of their ranks.
#pragma once
#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

#include "parallel/comm/launch.h"
#include "parallel/comm/tcp/rendezvous.h"
#include "parallel/comm/transport.h"

namespace tessera {

// The connections of one process.
class TcpWorld {
 public:
  TcpWorld(Met met, int rank, double timeout_s);
  ~TcpWorld();
  TcpWorld(const TcpWorld&) = delete;
  TcpWorld& operator=(const TcpWorld&) = delete;

  int rank() const { return rank_; }
  int size() const { return static_cast<int>(met_.peers.size()); }
  int rank_here() const { return met_.rank_here; }
  int ranks_here() const { return met_.ranks_here; }
  double timeout_s() const { return timeout_s_; }

  struct Head {
    uint64_t group = 0;
    int64_t bytes = 0;
    int32_t tag = 0;
    enum class Kind : uint32_t { message, failure, goodbye } kind = Kind::message;
  };
  void send(int to, const Head& head, const void* data);
  // The first that has come with that head's group and tag; waits a moment for it.
  std::optional<std::vector<std::byte>> take(int from, const Head& head);
  Board& board() { return board_; }
  // This rank cannot go on, and tells all others.
  void fail(const std::string& cause);
  // Every rank has come to its end: what was sent has arrived.
  void end();

 private:
  using Address = std::tuple<int, uint64_t, int>;  // rank, group, tag
  void read_from(int peer);
  void wait_for_a_cause() const;

  Met met_;
  int rank_;
  double timeout_s_;
  Board board_;
  std::vector<std::mutex> sending_;
  std::mutex mutex_;
  std::condition_variable came_;
  std::map<Address, std::deque<std::vector<std::byte>>> inbox_;
  int goodbyes_ = 0;
  std::atomic<bool> closing_{false}, told_{false};
  std::vector<std::jthread> readers_;
};

class TcpTransport final : public Transport {
 public:
  explicit TcpTransport(std::shared_ptr<TcpWorld> world);  // the transport of all ranks

  int rank() const override { return rank_; }
  int size() const override { return static_cast<int>(world_ranks_.size()); }
  int world_rank(int rank) const override { return world_ranks_[static_cast<size_t>(rank)]; }
  int rank_here() const override { return world_->rank_here(); }
  std::string_view kind() const override { return "TCP ranks"; }
  void send(int to, int tag, const std::byte* data, int64_t bytes) override;
  void recv(int from, int tag, std::byte* data, int64_t bytes) override;
  std::unique_ptr<Transport> split(int color, int key) override;
  void fail(const std::string& cause) override { world_->fail(cause); }
  int failed_rank() const override { return world_->board().failed_rank(); }
  std::string failure() const override { return Transport::failure() + ": " + world_->board().cause(); }

 private:
  TcpTransport(std::shared_ptr<TcpWorld> world, std::vector<int> world_ranks, int rank, uint64_t group)
      : world_(std::move(world)), world_ranks_(std::move(world_ranks)), rank_(rank), group_(group) {}

  std::shared_ptr<TcpWorld> world_;
  std::vector<int> world_ranks_;
  int rank_;
  uint64_t group_ = 0, splits_ = 0;
};

// launch() of this process as one rank of those that meet. Throws what the body throws, said of this rank.
void launch_over_tcp(const LaunchOptions& options, const std::function<void(Communicator& world)>& body);

}  // namespace tessera
