// Messages, groups and failures over TCP.
#include "parallel/comm/tcp/transport.h"

#include <poll.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <memory>
#include <mutex>
#include <numeric>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "parallel/comm/trace.h"
#include "tensor/random.h"

namespace tessera {

namespace {

using MessageHead = TcpWorld::Head;
constexpr auto kMoment = std::chrono::milliseconds(20);
constexpr int64_t kMaxBytes = int64_t{1} << 40, kMaxText = 4096;

bool is_possible(const MessageHead& head) {
  const int64_t max_bytes = head.kind == MessageHead::Kind::message ? kMaxBytes : kMaxText;
  return head.kind <= MessageHead::Kind::goodbye && head.bytes >= 0 && head.bytes <= max_bytes;
}

// Without timeout: returns when all bytes have arrived or either end closes.
bool receive(int fd, void* data, size_t bytes) {
  auto* at = static_cast<char*>(data);
  while (bytes > 0) {
    const ssize_t n = ::recv(fd, at, bytes, 0);
    pollfd one{fd, POLLIN, 0};
    if (n > 0)
      at += n, bytes -= static_cast<size_t>(n);
    else if (n < 0 && errno == EAGAIN)
      ::poll(&one, 1, -1);
    else if (n == 0 || errno != EINTR)
      return false;
  }
  return true;
}

// Allocates only one block beyond the received bytes, regardless of the size in the header.
bool receive_all(int fd, std::vector<std::byte>& bytes, size_t all) {
  constexpr size_t kBlock = size_t{64} << 20;
  while (bytes.size() < all) {
    const size_t had = bytes.size(), block = std::min(kBlock, all - had);
    bytes.resize(had + block);
    if (!receive(fd, bytes.data() + had, block)) return false;
  }
  return true;
}

}  // namespace

TcpWorld::TcpWorld(RendezvousResult connections, int rank, double timeout_s)
    : connections_(std::move(connections)), rank_(rank), timeout_s_(timeout_s), sending_(connections_.peers.size()) {
  for (int peer = 0; peer < size(); ++peer)
    if (peer != rank_) readers_.emplace_back([this, peer] { read_from(peer); });
}

TcpWorld::~TcpWorld() {
  closing_ = true;
  for (const Descriptor& s : connections_.peers)
    if (s) ::shutdown(s.get(), SHUT_RDWR);
}

void TcpWorld::read_from(int peer) {
  const int fd = connections_.peers[static_cast<size_t>(peer)].get();
  const auto lost = [&](const std::string& why) {
    if (!closing_) failure_state_.fail(peer, why);
    arrived_.notify_all();
  };
  for (MessageHead head; receive(fd, &head, sizeof(head));) {
    if (!is_possible(head)) return lost("it sent an invalid message");
    std::vector<std::byte> bytes;
    try {
      if (!receive_all(fd, bytes, static_cast<size_t>(head.bytes))) break;
    } catch (const std::exception&) {
      return lost("a message of " + std::to_string(head.bytes) + " bytes does not fit in memory");
    }
    if (head.kind == MessageHead::Kind::failure)
      return lost(one_line({reinterpret_cast<const char*>(bytes.data()), bytes.size()}));
    const std::lock_guard lock(mutex_);
    if (head.kind == MessageHead::Kind::message)
      inbox_[{peer, head.group, head.tag}].push_back(std::move(bytes));
    else
      ++goodbyes_;
    arrived_.notify_all();
    if (head.kind == MessageHead::Kind::goodbye) return;
  }
  wait_for_cause();
  lost("its connection has closed");
}

// If a rank ends because another rank failed, the report of that failure will also reach this rank.
void TcpWorld::wait_for_cause() const {
  for (int i = 0; i < 25 && failure_state_.failed_rank() < 0 && !closing_; ++i) std::this_thread::sleep_for(kMoment);
}

void TcpWorld::send(int to, const MessageHead& head, const void* data) {
  const int fd = connections_.peers[static_cast<size_t>(to)].get();
  const std::lock_guard lock(sending_[static_cast<size_t>(to)]);
  const Deadline deadline(timeout_s_);
  if (write_all(fd, &head, sizeof(head), deadline) && write_all(fd, data, static_cast<size_t>(head.bytes), deadline))
    return;
  const std::string during = "send of " + std::to_string(head.bytes) + " bytes";
  if (!deadline.is_over()) {
    wait_for_cause();
    failure_state_.fail(to, "its connection has closed");
  }
  if (failure_state_.failed_rank() >= 0) throw PeerFailed(during + ": " + failure_state_.describe());
  throw CommError(during + ": rank " + std::to_string(to) + " received nothing within " + seconds_text(timeout_s_));
}

std::optional<std::vector<std::byte>> TcpWorld::take(int from, const MessageHead& head) {
  std::unique_lock lock(mutex_);
  const auto at = [&] { return inbox_.find({from, head.group, head.tag}); };
  const auto ready = [&] { return at() != inbox_.end(); };
  if (!arrived_.wait_for(lock, kMoment, [&] { return ready() || failure_state_.failed_rank() >= 0; }) || !ready())
    return {};
  const auto queue = at();
  std::vector<std::byte> out = std::move(queue->second.front());
  queue->second.pop_front();
  if (queue->second.empty()) inbox_.erase(queue);
  return out;
}

void TcpWorld::fail(const std::string& cause) {
  const bool is_own = failure_state_.fail(rank_, cause);
  arrived_.notify_all();
  // A failure without a cause is reported to the others once the cause is known.
  if (!is_own || cause.empty() || reported_.exchange(true)) return;
  const std::string text = cause.substr(0, static_cast<size_t>(kMaxText));
  for (int peer = 0; peer < size(); ++peer) try {
      if (peer != rank_) send(peer, {.bytes = std::ssize(text), .kind = MessageHead::Kind::failure}, text.data());
    } catch (const CommError&) {  // disconnected
    }
}

void TcpWorld::end() {
  for (int peer = 0; peer < size(); ++peer)
    if (peer != rank_) send(peer, {.kind = MessageHead::Kind::goodbye}, nullptr);
  std::unique_lock lock(mutex_);
  for (const Deadline deadline(timeout_s_);
       goodbyes_ < size() - 1 && failure_state_.failed_rank() < 0 && !deadline.is_over();)
    arrived_.wait_for(lock, kMoment);
  closing_ = true;
}

TcpTransport::TcpTransport(std::shared_ptr<TcpWorld> world)
    : world_(std::move(world)), world_ranks_(static_cast<size_t>(world_->size())), rank_(world_->rank()) {
  std::iota(world_ranks_.begin(), world_ranks_.end(), 0);
}

void TcpTransport::send(int to, int tag, const std::byte* data, int64_t bytes) {
  world_->send(world_rank(to), {.group = group_, .bytes = bytes, .tag = tag}, data);
}

void TcpTransport::recv(int from, int tag, std::byte* data, int64_t bytes) {
  std::optional<std::vector<std::byte>> found;
  await_message(from, bytes, world_->timeout_s(), [&](double /*waited*/) {
    found = world_->take(world_rank(from), {.group = group_, .tag = tag});
    return found.has_value();
  });
  check_size(from, bytes, std::ssize(*found));
  if (bytes > 0) std::memcpy(data, found->data(), found->size());  // empty chunks may have null addresses
}

std::unique_ptr<Transport> TcpTransport::split(int color, int key) {
  std::vector<int> members = group_members(color, key);
  const auto own = static_cast<int>(std::ranges::find(members, rank_) - members.begin());
  const Philox group = Philox::named(group_, std::to_string(++splits_) + " " + std::to_string(color));
  for (int& r : members) r = world_rank(r);
  return std::unique_ptr<Transport>(new TcpTransport(world_, std::move(members), own, group.bits(0)));
}

}  // namespace tessera
