// Ranks that no launcher has joined: TCP connections with deadlines, how the ranks meet, and how they talk.
#pragma once
#include <netdb.h>
#include <sys/socket.h>

#include <tuple>

#include "parallel/comm/launch.h"
#include "parallel/comm/transport.h"
#include "tensor/write_file.h"

namespace tessera {

// Of time in which this process is not stopped (AwakeTimer).
class Deadline {
 public:
  explicit Deadline(double seconds) : seconds_(seconds) {}
  bool is_over() const { return timer_.seconds() >= seconds_; }
  int ms() const;              // that poll() may wait, which is then called again
  std::string within() const;  // " within 300 s"; empty for 0

 private:
  double seconds_;
  mutable AwakeTimer timer_;
};

// Until it can be read (POLLIN) or written (POLLOUT), or is broken; false: the time is over.
bool wait_for(int fd, int16_t what, const Deadline& deadline);
// False when the other end has gone or the time is over.
bool read_all(int fd, void* data, size_t bytes, const Deadline& deadline);
bool write_all(int fd, const void* data, size_t bytes, const Deadline& deadline);

// "HOST:PORT" in two. Throws FieldError (`rendezvous`), and so does the next for a name that does not resolve in time.
std::pair<std::string, std::string> parse_address(const std::string& address);
using Addresses = std::unique_ptr<addrinfo, decltype(&::freeaddrinfo)>;
Addresses resolved(const std::string& host, const std::string& port, const std::string& shown,
                   const Deadline& deadline = Deadline(0));

// No socket where it cannot be; errno says why.
Descriptor listening_on(const sockaddr* address, socklen_t size, int family);
// Connects until somebody answers; no socket when nobody does, and `why`, the last reason.
Descriptor connected(const addrinfo& first, const Deadline& deadline, std::string& why);

// Sets a connection up so that messages leave as soon as they are written, and a host that has gone is noticed.
void set_up_for_messages(const Descriptor& socket);

// An end of a connection.
struct Endpoint {
  sockaddr_storage address{};
  socklen_t size = sizeof(address);
  sockaddr* get() { return reinterpret_cast<sockaddr*>(&address); }
  uint16_t port() const;
  void set_port(uint16_t port);
};
Endpoint own_end(int fd);

// A meeting of processes that no launcher has joined: each knows an address on the host of rank 0, and its own rank.
//
//   rank 0   listens there. Every other rank connects and says who it is: its rank, how many ranks it expects, and the
//            port where it listens itself. When all have come, rank 0 tells each where the others listen.
//   rank r   then connects to the ranks from 1 to r - 1, and the ranks behind it connect to r.
//
// In the end every pair of ranks has a connection. Whoever connects and is no rank (a scanner of ports, a browser) is
// hung up on: what is read before a rank is known has a fixed size, a magic number and a deadline, and between ranks a
// number that only they were told. There is no secret in it, so the network has to be trusted, as with MPI.

struct RendezvousOptions {
  std::string address;  // "HOST:PORT", "[::1]:PORT"
  int rank = 0, ranks = 1;
  double timeout_s = 300;  // for all to come
};

// The connections to the other ranks, by rank, and this rank's place among those of its host.
struct RendezvousResult {
  std::vector<Descriptor> peers;
  int local_rank = 0, local_world_size = 1;
};

// Every rank calls it. Throws FieldError (`rendezvous`, `rank`) for an address that is none or that cannot be listened
// on, and where two ranks have the same number or expect different numbers of ranks, which all of them are told;
// CommError when ranks do not come in time.
RendezvousResult meet(const RendezvousOptions& meeting);

// The first message of a rank to rank 0, in the bytes of this machine.
struct Hello {
  static constexpr std::array<char, 8> kMagic = {'T', 'S', 'R', 'm', 'e', 'e', 't', '1'};
  std::array<char, 8> magic = kMagic;
  uint32_t ranks = 0, rank = 0;
  uint64_t host = 0;  // the same number on one host
  uint16_t port = 0;
  std::array<char, 6> unused = {};
};
// Why it cannot be let in, where so many ranks are expected and those are there; empty: it can be.
std::string refusal(const Hello& hello, const std::vector<bool>& there);

// Ranks that are processes which met at an address: messages over TCP, a connection between every two of them. The
// direct exchange is made of messages. Each connection has a thread that reads what comes, so that a sender never waits
// for the receiver; a rank that has gone is seen when its connection ends.
//
// A message is a head (which group, tag, how many bytes) and its bytes. Groups that are split from another have the
// same number on all of their ranks.

// The connections of one process.
class TcpWorld : NotCopied {
 public:
  TcpWorld(RendezvousResult met, int rank, double timeout_s);
  ~TcpWorld();

  int rank() const { return rank_; }
  int size() const { return static_cast<int>(met_.peers.size()); }
  int local_rank() const { return met_.local_rank; }
  int local_world_size() const { return met_.local_world_size; }
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
  FailureState& board() { return board_; }
  // This rank cannot go on, and tells all others.
  void fail(const std::string& cause);
  // Every rank has come to its end: what was sent has arrived.
  void end();

 private:
  using Address = std::tuple<int, uint64_t, int>;  // rank, group, tag
  void read_from(int peer);
  void wait_for_a_cause() const;

  RendezvousResult met_;
  int rank_;
  double timeout_s_;
  FailureState board_;
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
  int local_rank() const override { return world_->local_rank(); }
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
