// poll(), getaddrinfo() and their kin.
#include "parallel/comm/socket.h"

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstring>
#include <thread>

#include "tensor/field_error.h"

namespace tessera {

Socket::~Socket() {
  if (descriptor_ >= 0) ::close(descriptor_);
}

Deadline::Deadline(double seconds)
    : end_(Clock::now() + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds))) {}

int Deadline::ms() const {
  const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(end_ - Clock::now()).count();
  return static_cast<int>(std::clamp<int64_t>(left + 1, 0, 1000));
}

bool wait_for(int fd, int16_t what, const Deadline& deadline) {
  while (!deadline.is_over()) {
    pollfd one{fd, what, 0};
    if (::poll(&one, 1, deadline.ms()) > 0) return true;
  }
  return false;
}

bool read_all(int fd, void* data, size_t bytes, const Deadline& deadline) {
  auto* at = static_cast<char*>(data);
  while (bytes > 0) {
    if (!wait_for(fd, POLLIN, deadline)) return false;
    const ssize_t n = ::recv(fd, at, bytes, MSG_DONTWAIT);
    if (n == 0 || (n < 0 && errno != EAGAIN && errno != EINTR)) return false;
    if (n > 0) at += n, bytes -= static_cast<size_t>(n);
  }
  return true;
}
bool write_all(int fd, const void* data, size_t bytes, const Deadline& deadline) {
  const auto* at = static_cast<const char*>(data);
  while (bytes > 0) {
    if (!wait_for(fd, POLLOUT, deadline)) return false;
    const ssize_t n = ::send(fd, at, bytes, MSG_DONTWAIT | MSG_NOSIGNAL);
    if (n < 0 && errno != EAGAIN && errno != EINTR) return false;
    if (n > 0) at += n, bytes -= static_cast<size_t>(n);
  }
  return true;
}

std::pair<std::string, std::string> parse_address(const std::string& address) {
  const size_t colon = address.rfind(':');
  std::string host = address.substr(0, std::min(colon, address.size()));
  if (host.size() > 2 && host.front() == '[' && host.back() == ']') host = host.substr(1, host.size() - 2);
  const std::string port = colon == address.npos ? "" : address.substr(colon + 1);
  uint32_t number = 0;
  const auto [end, error] = std::from_chars(port.data(), port.data() + port.size(), number);
  if (host.empty() || error != std::errc() || end != port.data() + port.size() || number < 1 || number > 65535)
    throw FieldError("rendezvous", "expected HOST:PORT, with a port from 1 to 65535, found '" + address + "'");
  return {host, port};
}

Addresses resolved(const std::string& host, const std::string& port, const std::string& shown) {
  addrinfo hints{}, *found = nullptr;
  hints.ai_socktype = SOCK_STREAM;
  if (const int error = ::getaddrinfo(host.c_str(), port.c_str(), &hints, &found); error != 0)
    throw FieldError("rendezvous", "'" + shown + "' leads nowhere: " + ::gai_strerror(error));
  return {found, &::freeaddrinfo};
}

Socket listening_on(const sockaddr* address, socklen_t size, int family) {
  Socket out(::socket(family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  const int yes = 1;
  if (out) ::setsockopt(out.get(), SOL_SOCKET, SO_REUSEADDR, &yes, sizeof(yes));
  if (!out || ::bind(out.get(), address, size) != 0 || ::listen(out.get(), SOMAXCONN) != 0) return Socket();
  return out;
}

Socket connected(const addrinfo& first, const Deadline& deadline, std::string& why) {
  while (!deadline.is_over()) {
    for (const addrinfo* a = &first; a != nullptr; a = a->ai_next) {
      Socket s(::socket(a->ai_family, a->ai_socktype | SOCK_CLOEXEC | SOCK_NONBLOCK, a->ai_protocol));
      if (!s) continue;
      int error = ::connect(s.get(), a->ai_addr, a->ai_addrlen) == 0 ? 0 : errno;
      if (error == EINPROGRESS && wait_for(s.get(), POLLOUT, deadline)) {
        socklen_t size = sizeof(error);
        ::getsockopt(s.get(), SOL_SOCKET, SO_ERROR, &error, &size);
      }
      if (error == 0) return s;
      why = std::strerror(error);
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
  }
  return Socket();
}

void set_up_for_messages(const Socket& socket) {
  const int yes = 1;
  ::setsockopt(socket.get(), IPPROTO_TCP, TCP_NODELAY, &yes, sizeof(yes));
  ::setsockopt(socket.get(), SOL_SOCKET, SO_KEEPALIVE, &yes, sizeof(yes));
}

uint16_t Endpoint::port() const {
  return ntohs(address.ss_family == AF_INET6 ? reinterpret_cast<const sockaddr_in6&>(address).sin6_port
                                             : reinterpret_cast<const sockaddr_in&>(address).sin_port);
}

void Endpoint::set_port(uint16_t port) {
  (address.ss_family == AF_INET6 ? reinterpret_cast<sockaddr_in6&>(address).sin6_port
                                 : reinterpret_cast<sockaddr_in&>(address).sin_port) = htons(port);
}

Endpoint own_end(int fd) {
  Endpoint out;
  ::getsockname(fd, out.get(), &out.size);
  return out;
}

}  // namespace tessera
