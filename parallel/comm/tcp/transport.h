// TCP ranks, started without a launcher.
#pragma once
#include <netdb.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <thread>
#include <tuple>
#include <vector>

#include "base/write_file.h"
#include "parallel/comm/launch.h"
#include "parallel/comm/transport.h"

namespace tessera {

// Excludes time during which this process is stopped (AwakeTimer).
class Deadline {
 public:
  explicit Deadline(double seconds) : seconds_(seconds) {}
  bool is_over() const { return timer_.seconds() >= seconds_; }
  std::string within() const;  // " within 300 s"; empty for 0

 private:
  double seconds_;
  mutable AwakeTimer timer_;
};

// Waits until `fd` is readable (POLLIN), writable (POLLOUT), or broken; false: timeout.
bool wait_for(int fd, int16_t what, const Deadline& deadline);
// False if the peer has disconnected or the deadline has passed.
bool read_all(int fd, void* data, size_t bytes, const Deadline& deadline);
bool write_all(int fd, const void* data, size_t bytes, const Deadline& deadline);

// Splits "HOST:PORT". Throws FieldError (`rendezvous`), as resolved() does if the name does not resolve in time.
std::pair<std::string, std::string> parse_address(const std::string& address);
using Addresses = std::unique_ptr<addrinfo, decltype(&::freeaddrinfo)>;
Addresses resolved(const std::string& host, const std::string& port, const std::string& shown,
                   const Deadline& deadline = Deadline(0));

// An invalid socket, with errno, on failure.
Descriptor listening_on(const sockaddr* address, socklen_t size, int family);
// Retries until a peer answers or `is_over`; `why` is the last reason.
Descriptor connected(const addrinfo& first, const std::function<bool()>& is_over, std::string& why);

struct Endpoint {
  sockaddr_storage address{};
  socklen_t size = sizeof(address);
  sockaddr* get() { return reinterpret_cast<sockaddr*>(&address); }
  uint16_t port() const;
  void set_port(uint16_t port);
};
Endpoint own_end(int fd);

// Rendezvous: each process has rank 0's address and its own rank.
//
//   rank 0   listens at that address. Every other rank connects and sends its rank, world size and listening port; then
//            rank 0 sends each the addresses of the others.
//   rank r   then connects to the ranks from 1 to r - 1, and higher ranks connect to r.
//
// Connections from other programs (port scanners, browsers) are closed: the data read before a rank is verified has a
// fixed size, a magic number and a deadline, and connections between ranks carry a token that rank 0 distributes. The
// token is not a secret, so the network must be trusted, as with MPI.

struct RendezvousOptions {
  std::string address;  // "HOST:PORT", "[::1]:PORT"
  int rank = 0, ranks = 1;
  double timeout_s = 300;
};

// Connections are indexed by rank.
struct RendezvousResult {
  std::vector<Descriptor> peers;
  int local_rank = 0, local_world_size = 1;
};

// Collective. Throws FieldError (`rendezvous`, `rank`) for an address that is invalid or cannot be listened on, and on
// all ranks if two have the same rank or expect different world sizes; CommError if ranks do not connect in time.
RendezvousResult join_rendezvous(const RendezvousOptions& options);

// In native byte order.
struct Hello {
  static constexpr std::array<char, 8> kMagic = {'T', 'S', 'R', 'm', 'e', 'e', 't', '1'};
  std::array<char, 8> magic = kMagic;
  uint32_t ranks = 0, rank = 0;
  uint64_t host = 0;  // equal on one host
  uint16_t port = 0;
  std::array<char, 6> unused = {};
};
inline constexpr uint32_t kAddressSize = 46;  // numeric, with the terminating 0
// Rank 0's answer: a refusal followed by `bytes` of text, or one PeerPlace per rank. The latter may be followed by
// kAgain: a rank has disconnected, so the others join again.
struct Answer {
  static constexpr uint32_t kRefused = 1, kAgain = 2;
  std::array<char, 8> magic = Hello::kMagic;
  uint32_t refused = 0, bytes = 0;
  std::array<char, 16> token = {};
};
struct PeerPlace {
  std::array<char, kAddressSize> address = {};  // numeric, 0-terminated
  uint16_t port = 0;
  uint64_t host = 0;
};
// The reason to reject a rank, given the world size and the ranks already connected; empty: accepted.
std::string refusal(const Hello& hello, const std::vector<bool>& there);

// Messages over TCP, with one connection per pair of ranks; the direct exchange uses messages. Each connection has a
// reader thread, so a sender never waits for the receiver; a failed rank is detected when its connection closes. A
// message is a header (group, tag, size) and its bytes. A group has the same id on all of its ranks.

class TcpWorld : NotCopied {
 public:
  TcpWorld(RendezvousResult connections, int rank, double timeout_s);
  ~TcpWorld();

  int rank() const { return rank_; }
  int size() const { return static_cast<int>(connections_.peers.size()); }
  int local_rank() const { return connections_.local_rank; }
  int local_world_size() const { return connections_.local_world_size; }
  double timeout_s() const { return timeout_s_; }

  struct Head {
    uint64_t group = 0;
    int64_t bytes = 0;
    int32_t tag = 0;
    enum class Kind : uint32_t { message, failure, goodbye } kind = Kind::message;
  };
  void send(int to, const Head& head, const void* data);
  // The first message received with the header's group and tag; waits briefly for it.
  std::optional<std::vector<std::byte>> take(int from, const Head& head);
  FailureState& failure_state() { return failure_state_; }
  void fail(const std::string& cause);
  // Collective, after the body: waits until all sent messages have arrived.
  void end();

 private:
  using Address = std::tuple<int, uint64_t, int>;  // rank, group, tag
  void read_from(int peer);
  void wait_for_cause() const;

  RendezvousResult connections_;
  int rank_;
  double timeout_s_;
  FailureState failure_state_;
  std::vector<std::mutex> sending_;
  std::mutex mutex_;
  std::condition_variable arrived_;
  std::map<Address, std::deque<std::vector<std::byte>>> inbox_;
  int goodbyes_ = 0;
  std::atomic<bool> closing_{false}, reported_{false};
  std::vector<std::jthread> readers_;
};

class TcpTransport final : public Transport {
 public:
  explicit TcpTransport(std::shared_ptr<TcpWorld> world);

  int rank() const override { return rank_; }
  int size() const override { return static_cast<int>(world_ranks_.size()); }
  int world_rank(int rank) const override { return world_ranks_[static_cast<size_t>(rank)]; }
  int local_rank() const override { return world_->local_rank(); }
  std::string_view kind() const override { return "TCP ranks"; }
  void send(int to, int tag, const std::byte* data, int64_t bytes) override;
  void recv(int from, int tag, std::byte* data, int64_t bytes) override;
  std::unique_ptr<Transport> split(int color, int key) override;
  void fail(const std::string& cause) override { world_->fail(cause); }
  const FailureState* failure_state() const override { return &world_->failure_state(); }

 private:
  TcpTransport(std::shared_ptr<TcpWorld> world, std::vector<int> world_ranks, int rank, uint64_t group)
      : world_(std::move(world)), world_ranks_(std::move(world_ranks)), rank_(rank), group_(group) {}

  std::shared_ptr<TcpWorld> world_;
  std::vector<int> world_ranks_;
  int rank_;
  uint64_t group_ = 0, splits_ = 0;
};

// Runs launch() in this process as one rank. Rethrows the body's exception, prefixed with the rank.
void launch_over_tcp(const LaunchOptions& options, const std::function<void(Communicator& world)>& body);

}  // namespace tessera
