// Sockets with deadlines, and the rendezvous protocol.
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <charconv>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <exception>
#include <fstream>
#include <functional>
#include <iostream>
#include <map>
#include <memory>
#include <random>
#include <set>
#include <string>
#include <system_error>
#include <thread>
#include <vector>

#include "base/error.h"
#include "parallel/comm/tcp/transport.h"
#include "parallel/comm/trace.h"
#include "tensor/cpu/vectorize.h"
#include "tensor/random.h"

namespace tessera {

namespace {
constexpr std::chrono::milliseconds kRetry{100};
}

std::string Deadline::within() const { return seconds_ > 0 ? " within " + seconds_text(seconds_) : ""; }

int Deadline::ms() const {
  const double left = 1e3 * (seconds_ - timer_.seconds());
  return static_cast<int>(std::clamp(left + 1, 0.0, 100.0));
}

bool wait_for(int fd, int16_t what, const Deadline& deadline) {
  while (!deadline.is_over()) {
    pollfd one{fd, what, 0};
    if (::poll(&one, 1, deadline.ms()) > 0) return true;
  }
  return false;
}
namespace {
// wait_for(), but until `is_over`, which is called often enough for its AwakeTimers.
bool poll_until(int fd, int16_t what, const std::function<bool()>& is_over) {
  while (!is_over()) {
    pollfd one{fd, what, 0};
    if (::poll(&one, 1, static_cast<int>(kRetry.count())) > 0) return true;
  }
  return false;
}
}  // namespace

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
    throw FieldError("rendezvous", "expected HOST:PORT, with a port from 1 to 65535, got '" + address + "'");
  return {host, port};
}

Addresses resolved(const std::string& host, const std::string& port, const std::string& shown,
                   const Deadline& deadline) {
  addrinfo hints{}, *found = nullptr;
  hints.ai_socktype = SOCK_STREAM;
  int error = 0;
  while ((error = ::getaddrinfo(host.c_str(), port.c_str(), &hints, &found)) != 0 && !deadline.is_over())
    std::this_thread::sleep_for(kRetry);  // a name service may start after the ranks
  if (error != 0)
    throw FieldError("rendezvous", "'" + shown + "' does not resolve" + deadline.within() + ": " +
                                       ::gai_strerror(error) + "; expected the name or the address of rank 0's host");
  return {found, &::freeaddrinfo};
}

Descriptor listening_on(const sockaddr* address, socklen_t size, int family) {
  Descriptor out(::socket(family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  const int yes = 1;
  if (out) ::setsockopt(out.get(), SOL_SOCKET, SO_REUSEADDR, &yes, sizeof(yes));
  if (!out || ::bind(out.get(), address, size) != 0 || ::listen(out.get(), SOMAXCONN) != 0) return Descriptor();
  return out;
}

Descriptor connected(const addrinfo& first, const std::function<bool()>& is_over, std::string& why) {
  while (!is_over()) {
    for (const addrinfo* a = &first; a != nullptr; a = a->ai_next) {
      Descriptor s(::socket(a->ai_family, a->ai_socktype | SOCK_CLOEXEC | SOCK_NONBLOCK, a->ai_protocol));
      if (!s) continue;
      int error = ::connect(s.get(), a->ai_addr, a->ai_addrlen) == 0 ? 0 : errno;
      if (error == EINPROGRESS && poll_until(s.get(), POLLOUT, is_over)) {
        socklen_t size = sizeof(error);
        ::getsockopt(s.get(), SOL_SOCKET, SO_ERROR, &error, &size);
      }
      if (error == 0) return s;
      why = std::strerror(error);
    }
    std::this_thread::sleep_for(kRetry);
  }
  return Descriptor();
}

void set_up_for_messages(const Descriptor& socket) {
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

namespace {

constexpr size_t kMaxUnverified = 64;  // connections
constexpr size_t kMaxRefusal = 500;
constexpr double kLookupInterval = 3;  // seconds until the name is resolved again

// The first message between two ranks other than rank 0.
struct PeerHello {
  std::array<char, 16> token = {};
  uint32_t from = 0, to = 0;
};
static_assert(sizeof(Hello) == 32 && sizeof(Answer) == 32 && sizeof(PeerPlace) == 56 && sizeof(PeerHello) == 24);

uint64_t this_host() {
  std::array<char, 256> name{};
  ::gethostname(name.data(), name.size() - 1);
  std::string boot;
  std::getline(std::ifstream("/proc/sys/kernel/random/boot_id"), boot);
  const Philox::Block words = Philox::named(0, name.data() + boot)(0);
  return uint64_t{words[0]} << 32 | words[1];
}

// "ranks 2, 3"
std::string missing(const RendezvousResult& result, int first) {
  std::vector<int> out;
  for (int r = first; r < std::ssize(result.peers); ++r)
    if (!result.peers[static_cast<size_t>(r)]) out.push_back(r);
  return fmt::format("rank{} {}", out.size() == 1 ? "" : "s", fmt::join(out, ", "));
}

struct UnverifiedPeer {
  Descriptor socket;
  Hello hello = {};
  size_t got = 0;
};

// Whether the peer has closed the connection; does not consume data.
bool has_ended(const Descriptor& socket) {
  char next = 0;
  const ssize_t n = ::recv(socket.get(), &next, 1, MSG_PEEK | MSG_DONTWAIT);
  return n == 0 || (n < 0 && errno != EAGAIN && errno != EINTR);
}

class Host {
 public:
  explicit Host(const RendezvousOptions& m) : m_(m), deadline_(m.timeout_s), places_(static_cast<size_t>(m.ranks)) {
    out_.peers.resize(places_.size());
  }
  RendezvousResult join_rendezvous() {
    listen();
    places_[0].host = this_host();
    do {
      while (!all_connected()) {
        if (deadline_.is_over()) give_up();
        look();
      }
    } while (!answer_all());
    return std::move(out_);
  }
  const std::vector<PeerPlace>& places() const { return places_; }

 private:
  // A previous process of rank 0 may still be exiting and occupy the port.
  void listen() {
    const auto [host, port] = parse_address(m_.address);
    int cause = 0;
    while (true) {
      const Addresses addresses = resolved(host, port, m_.address, deadline_);
      for (const addrinfo* a = addresses.get(); a != nullptr; a = a->ai_next) {
        listener_ = listening_on(a->ai_addr, a->ai_addrlen, a->ai_family);
        if (listener_) return;
        cause = errno;
        if (cause == EADDRINUSE) break;
      }
      if (cause != EADDRINUSE || deadline_.is_over()) break;
      std::this_thread::sleep_for(kRetry);
    }
    throw FieldError("rendezvous",
                     fmt::format("rank 0 cannot listen on {}{}: {}; expected an address of this host and a free "
                                 "port",
                                 m_.address, cause == EADDRINUSE ? deadline_.within() : "", std::strerror(cause)));
  }

  bool is_connected(int rank) const { return rank == 0 || out_.peers[static_cast<size_t>(rank)]; }
  // A rank that has exited may be restarted, so its place becomes free.
  bool all_connected() {
    for (size_t r = 1; r < out_.peers.size(); ++r)
      if (out_.peers[r] && has_ended(out_.peers[r])) leave(r);
    return std::all_of(out_.peers.begin() + 1, out_.peers.end(), [](const Descriptor& peer) { return bool(peer); });
  }

  void look() {
    std::vector<pollfd> polled{{listener_.get(), POLLIN, 0}};
    for (const UnverifiedPeer& s : unverified_) polled.push_back({s.socket.get(), POLLIN, 0});
    if (::poll(polled.data(), polled.size(), deadline_.ms()) <= 0) return;
    for (size_t i = unverified_.size(); i-- > 0;)
      if (polled[i + 1].revents != 0 && !read_hello(unverified_[i]))
        unverified_.erase(unverified_.begin() + static_cast<std::ptrdiff_t>(i));
    if (polled[0].revents != 0)
      if (Descriptor s(::accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC)); s)
        unverified_.push_back({std::move(s)});
    if (unverified_.size() > kMaxUnverified) unverified_.pop_front();
  }
  void leave(size_t rank) {
    out_.peers[rank] = Descriptor();
    left_.insert(rank);
  }

  // Returns false once the peer is verified or its connection is closed.
  bool read_hello(UnverifiedPeer& s) {
    const ssize_t n =
        ::recv(s.socket.get(), reinterpret_cast<char*>(&s.hello) + s.got, sizeof(Hello) - s.got, MSG_DONTWAIT);
    if (n <= 0) return n < 0 && (errno == EAGAIN || errno == EINTR);
    s.got += static_cast<size_t>(n);
    if (s.got < sizeof(Hello)) return true;
    if (s.hello.magic != Hello::kMagic) return false;
    if (s.hello.rank > 0 && s.hello.rank < out_.peers.size())  // the old process may have exited since poll()
      if (const Descriptor& old = out_.peers[s.hello.rank]; old && has_ended(old)) leave(s.hello.rank);
    std::vector<bool> there;
    for (int r = 0; r < m_.ranks; ++r) there.push_back(is_connected(r));
    if (const std::string why = refusal(s.hello, there); !why.empty()) {
      refuse(s.socket, why);
      for (const Descriptor& peer : out_.peers)
        if (peer) refuse(peer, why);
      throw FieldError("rank", why);
    }
    PeerPlace& place = places_[s.hello.rank];
    Endpoint theirs;
    ::getpeername(s.socket.get(), theirs.get(), &theirs.size);
    ::getnameinfo(theirs.get(), theirs.size, place.address.data(), socklen_t{kAddressSize}, nullptr, 0, NI_NUMERICHOST);
    place.port = s.hello.port, place.host = s.hello.host;
    out_.peers[s.hello.rank] = std::move(s.socket);
    left_.erase(s.hello.rank);
    return false;
  }

  void refuse(const Descriptor& socket, const std::string& why) const {
    const std::string text = why.substr(0, kMaxRefusal);
    const Answer answer{.refused = Answer::kRefused, .bytes = static_cast<uint32_t>(text.size())};
    const Deadline soon(1);
    if (write_all(socket.get(), &answer, sizeof(answer), soon)) write_all(socket.get(), text.data(), text.size(), soon);
  }

  // Returns false if a rank has disconnected: the ranks already answered would wait for it, so all join again.
  bool answer_all() {
    Answer answer{.bytes = static_cast<uint32_t>(places_.size() * sizeof(PeerPlace))};
    std::random_device random;
    for (char& c : answer.token) c = static_cast<char>(random());
    for (size_t r = 1; r < out_.peers.size(); ++r) {
      const int fd = out_.peers[r].get();
      if (write_all(fd, &answer, sizeof(answer), deadline_) && write_all(fd, places_.data(), answer.bytes, deadline_))
        continue;
      answer.refused = Answer::kAgain, answer.bytes = 0;
      for (size_t done = 1; done < r; ++done) write_all(out_.peers[done].get(), &answer, sizeof(answer), Deadline(1));
      left_.insert(r);
      for (Descriptor& peer : out_.peers) peer = Descriptor();
      return false;
    }
    return true;
  }

  [[noreturn]] void give_up() const {
    std::string why = fmt::format("[rendezvous] {} did not connect to {} within {}", missing(out_, 1), m_.address,
                                  seconds_text(m_.timeout_s));
    if (!left_.empty())
      why += fmt::format("; rank{} {} had connected and exited", left_.size() == 1 ? "" : "s", fmt::join(left_, ", "));
    for (const Descriptor& peer : out_.peers)
      if (peer) refuse(peer, why);
    throw CommError(why);
  }

  const RendezvousOptions& m_;
  Deadline deadline_;
  Descriptor listener_;
  std::deque<UnverifiedPeer> unverified_;
  std::set<size_t> left_;
  std::vector<PeerPlace> places_;
  RendezvousResult out_;
};

class Joiner {
 public:
  explicit Joiner(const RendezvousOptions& m) : m_(m), deadline_(m.timeout_s) {
    out_.peers.resize(static_cast<size_t>(m.ranks));
  }

  RendezvousResult join_rendezvous() {
    Descriptor listener;
    do {
      for (Descriptor& peer : out_.peers) peer = Descriptor();
      while (!join_rank_0(listener)) {  // if rank 0 has exited, it may be restarted
        if (deadline_.is_over()) gone();
        std::this_thread::sleep_for(kRetry);
      }
    } while (!reach_peers(listener));
    return std::move(out_);
  }
  const std::vector<PeerPlace>& places() const { return places_; }

 private:
  // Returns false if rank 0 exits before it answers.
  bool join_rank_0(Descriptor& listener) {
    const auto [host, port] = parse_address(m_.address);
    std::string why = "not attempted";
    Descriptor first;
    do {  // the name's address may change
      const Addresses addresses = resolved(host, port, m_.address, deadline_);
      const Deadline lookup(kLookupInterval);
      first = connected(
          *addresses,
          [&] {
            const bool expired = deadline_.is_over();
            return lookup.is_over() || expired;
          },
          why);
    } while (!first && !deadline_.is_over());
    if (!first)
      throw CommError(fmt::format("[rendezvous] no answer at {} within {}: {}; expected rank 0's address", m_.address,
                                  seconds_text(m_.timeout_s), why));
    Endpoint own = own_end(first.get());
    own.set_port(0);
    listener = listening_on(own.get(), own.size, own.address.ss_family);
    if (!listener) throw CommError(std::string("[rendezvous] this rank cannot listen: ") + std::strerror(errno));
    const Hello hello{.ranks = static_cast<uint32_t>(m_.ranks),
                      .rank = static_cast<uint32_t>(m_.rank),
                      .host = this_host(),
                      .port = own_end(listener.get()).port()};
    // rank 0 reports missing ranks itself, so it gets extra time
    const Deadline later(m_.timeout_s + 5);
    if (!write_all(first.get(), &hello, sizeof(hello), deadline_) || !wait_for(first.get(), POLLIN, later) ||
        has_ended(first))
      return false;
    read_places(first, later);
    out_.peers[0] = std::move(first);
    return true;
  }

  [[noreturn]] void gone() const {
    throw CommError("[rendezvous] the process at " + m_.address + " is not rank 0 of Tessera, or has exited");
  }

  void read_places(const Descriptor& first, const Deadline& later) {
    Answer answer;
    if (!read_all(first.get(), &answer, sizeof(answer), later) || answer.magic != Hello::kMagic) gone();
    const size_t all = out_.peers.size() * sizeof(PeerPlace);
    if (answer.refused == Answer::kRefused) {
      std::string text(std::min<size_t>(answer.bytes, kMaxRefusal), ' ');
      if (!read_all(first.get(), text.data(), text.size(), later)) gone();
      if (text.starts_with("[rendezvous]")) throw CommError(text);
      throw FieldError("rank", text);
    }
    if (answer.bytes != all) gone();
    token_ = answer.token;
    places_.resize(out_.peers.size());
    if (!read_all(first.get(), places_.data(), all, later)) gone();
    for (PeerPlace& p : places_) p.address.back() = 0;
  }

  // Connects this rank and all others. Returns false if rank 0 requests that all join again.
  bool reach_peers(const Descriptor& listener) {
    for (int r = 1; r < m_.rank; ++r)
      if (!connect_to(r)) return false;
    for (int remaining = m_.ranks - 1 - m_.rank; remaining > 0;) {
      if (!poll_until(listener.get(), POLLIN, [&] { return is_over(); })) {
        if (joins_again()) return false;
        throw CommError(fmt::format("[rendezvous] {} did not reach rank {} within {}", missing(out_, m_.rank + 1),
                                    m_.rank, seconds_text(m_.timeout_s)));
      }
      remaining -= accept_one(listener) ? 1 : 0;
    }
    return true;
  }

  // Any other first message on this connection differs from kAgain in token and length.
  bool joins_again() const {
    Answer next;
    return ::recv(out_.peers[0].get(), &next, sizeof(next), MSG_PEEK | MSG_DONTWAIT) ==
               static_cast<ssize_t>(sizeof(next)) &&
           next.magic == Hello::kMagic && next.refused == Answer::kAgain && next.token == token_;
  }
  bool is_over() const {
    const bool expired = deadline_.is_over();
    return joins_again() || expired;
  }

  bool connect_to(int rank) {
    const PeerPlace& place = places_[static_cast<size_t>(rank)];
    std::string why;
    Descriptor s = connected(
        *resolved(place.address.data(), std::to_string(place.port), place.address.data()), [&] { return is_over(); },
        why);
    if (!s && joins_again()) return false;
    const PeerHello hello{.token = token_, .from = static_cast<uint32_t>(m_.rank), .to = static_cast<uint32_t>(rank)};
    if (!s || !write_all(s.get(), &hello, sizeof(hello), deadline_))
      throw CommError(fmt::format("[rendezvous] rank {} cannot be reached at {} port {} within {}: {}", rank,
                                  place.address.data(), place.port, seconds_text(m_.timeout_s), why));
    out_.peers[static_cast<size_t>(rank)] = std::move(s);
    return true;
  }

  // Returns false for a connection that is not from a rank.
  bool accept_one(const Descriptor& listener) {
    Descriptor s(::accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC));
    PeerHello hello;
    if (!s || !read_all(s.get(), &hello, sizeof(hello), Deadline(2)) || hello.token != token_) return false;
    const bool right = hello.to == static_cast<uint32_t>(m_.rank) && hello.from > hello.to &&
                       hello.from < out_.peers.size() && !out_.peers[hello.from];
    if (right) out_.peers[hello.from] = std::move(s);
    return right;
  }

  const RendezvousOptions& m_;
  Deadline deadline_;
  std::array<char, 16> token_ = {};
  std::vector<PeerPlace> places_;
  RendezvousResult out_;
};

template <class Side>
RendezvousResult join_as(const RendezvousOptions& m) {
  Side side(m);
  RendezvousResult result = side.join_rendezvous();
  const std::vector<PeerPlace>& places = side.places();
  const auto here = [&](int r) {
    return places[static_cast<size_t>(r)].host == places[static_cast<size_t>(m.rank)].host;
  };
  result.local_world_size = 0;
  for (int r = 0; r < m.ranks; ++r) {
    if (r < m.rank) result.local_rank += here(r) ? 1 : 0;
    result.local_world_size += here(r) ? 1 : 0;
  }
  for (const Descriptor& s : result.peers)
    if (s) set_up_for_messages(s);
  return result;
}

}  // namespace

std::string refusal(const Hello& hello, const std::vector<bool>& there) {
  const auto ranks = there.size();
  if (hello.ranks != ranks)
    return fmt::format("rank {} expects {} ranks, and rank 0 expects {}; expected the same `ranks` on all ranks",
                       hello.rank, hello.ranks, ranks);
  if (hello.rank >= ranks)
    return fmt::format("rank {} is out of range for {} ranks; expected 0 to {}", hello.rank, ranks, ranks - 1);
  return there[hello.rank]
             ? fmt::format("rank {} connected to the rendezvous twice; expected each rank once", hello.rank)
             : "";
}

RendezvousResult join_rendezvous(const RendezvousOptions& options) {
  if (options.ranks < 1) throw FieldError("ranks", "expected at least 1, got " + std::to_string(options.ranks));
  if (options.rank < 0 || options.rank >= options.ranks)
    throw FieldError("rank",
                     "expected 0 to " + std::to_string(options.ranks - 1) + ", got " + std::to_string(options.rank));
  return options.rank == 0 ? join_as<Host>(options) : join_as<Joiner>(options);
}

void launch_over_tcp(const LaunchOptions& o, const std::function<void(Communicator&)>& body) {
  const auto world = std::make_shared<TcpWorld>(
      join_rendezvous({.address = o.rendezvous, .rank = o.rank, .ranks = o.ranks, .timeout_s = o.timeout_s}), o.rank,
      o.timeout_s);
  const int threads_before = cpu::threads(), cores = static_cast<int>(std::thread::hardware_concurrency());
  cpu::set_threads(threads_of_rank(o.threads_per_rank, cores, world->local_world_size()));
  try {
    run_process(o, std::make_unique<TcpTransport>(world), world->local_world_size(), body);
  } catch (const Error& e) {
    world->fail(e.what());
    cpu::set_threads(threads_before);
    throw Error("[rank " + std::to_string(o.rank) + "] " + e.what(), e.status());
  }
  world->end();
  cpu::set_threads(threads_before);
}

}  // namespace tessera
