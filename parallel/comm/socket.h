// TCP connections with deadlines: what ranks without a launcher meet and talk by.
#pragma once
#include <netdb.h>
#include <sys/socket.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>

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

// What is written leaves at once, and a host that has gone is noticed.
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

}  // namespace tessera
