// TCP connections with deadlines: what ranks without a launcher meet and talk by.
#pragma once
#include <netdb.h>
#include <sys/socket.h>

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace tessera {

// A descriptor that is closed at its end.
class Socket {
 public:
  Socket() = default;
  explicit Socket(int descriptor) : descriptor_(descriptor) {}
  Socket(Socket&& other) noexcept : descriptor_(std::exchange(other.descriptor_, -1)) {}
  Socket& operator=(Socket&& other) noexcept {
    std::swap(descriptor_, other.descriptor_);
    return *this;
  }
  ~Socket();
  int get() const { return descriptor_; }
  explicit operator bool() const { return descriptor_ >= 0; }

 private:
  int descriptor_ = -1;
};

class Deadline {
 public:
  explicit Deadline(double seconds);
  bool is_over() const { return Clock::now() >= end_; }
  int ms() const;  // that poll() may wait, which is then called again

 private:
  using Clock = std::chrono::steady_clock;
  Clock::time_point end_;
};

// Until it can be read (POLLIN) or written (POLLOUT), or is broken; false: the time is over.
bool wait_for(int fd, int16_t what, const Deadline& deadline);
// False when the other end has gone or the time is over.
bool read_all(int fd, void* data, size_t bytes, const Deadline& deadline);
bool write_all(int fd, const void* data, size_t bytes, const Deadline& deadline);

// "HOST:PORT" in two. Throws FieldError (`rendezvous`), and so does the next for a name that nobody knows.
std::pair<std::string, std::string> parse_address(const std::string& address);
using Addresses = std::unique_ptr<addrinfo, decltype(&::freeaddrinfo)>;
Addresses resolved(const std::string& host, const std::string& port, const std::string& shown);

// No socket where it cannot be; errno says why.
Socket listening_on(const sockaddr* address, socklen_t size, int family);
// Connects until somebody answers; no socket when nobody does, and `why`, the last reason.
Socket connected(const addrinfo& first, const Deadline& deadline, std::string& why);

// Sets a connection up so that messages leave as soon as they are written, and a host that has gone is noticed.
void set_up_for_messages(const Socket& socket);

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

struct Meeting {
  std::string address;  // "HOST:PORT", "[::1]:PORT"
  int rank = 0, ranks = 1;
  double timeout_s = 300;  // for all to come
};

// The connections to the other ranks, by rank, and this rank's place among those of its host.
struct Met {
  std::vector<Socket> peers;
  int rank_here = 0, ranks_here = 1;
};

// Every rank calls it. Throws FieldError (`rendezvous`, `rank`) for an address that is none or that cannot be listened
// on, and where two ranks have the same number or expect different numbers of ranks, which all of them are told;
// CommError when ranks do not come in time.
Met meet(const Meeting& meeting);

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

}  // namespace tessera
