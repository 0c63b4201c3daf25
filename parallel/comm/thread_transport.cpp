// Thread ranks: in-place direct exchange, and mailboxes.
#include "parallel/comm/thread_transport.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <numeric>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "parallel/comm/algorithms.h"
#include "parallel/comm/memory.h"

namespace tessera {

using namespace std::string_literals;
namespace {

[[noreturn]] void refuse_kind(int64_t bytes, int from, const char* sent, const char* expected) {
  throw CommError(receiving(bytes) + ": rank " + std::to_string(from) + " sent from " + sent + " memory; expected " +
                  expected);
}

}  // namespace

std::shared_ptr<ThreadGroup> make_thread_group(int ranks, double timeout_s, bool oversubscribed,
                                               std::shared_ptr<FailureState> failure_state) {
  std::vector<int> members(static_cast<size_t>(ranks));
  std::iota(members.begin(), members.end(), 0);
  return std::make_shared<ThreadGroup>(std::move(members), timeout_s, oversubscribed, std::move(failure_state));
}

namespace {

std::vector<RankState*> rank_states(ThreadGroup& group) {
  std::vector<RankState*> out;
  for (Place& place : group.places) out.push_back(&place);
  return out;
}

}  // namespace

ThreadTransport::ThreadTransport(std::shared_ptr<ThreadGroup> group, int rank)
    : group_(std::move(group)),
      rank_(rank),
      barrier_(*this, rank, rank_states(*group_), group_->wait_options, [this] { leave_barrier(); }),
      exchange_(static_cast<int>(group_->places.size()), rank) {}
ThreadTransport::~ThreadTransport() = default;

int ThreadTransport::size() const { return static_cast<int>(group_->world_ranks.size()); }
int ThreadTransport::world_rank(int rank) const { return group_->world_ranks[static_cast<size_t>(rank)]; }
void ThreadTransport::fail(const std::string& cause) { group_->failure_state->fail(world_rank(rank_), cause); }
std::vector<CallLog*> ThreadTransport::logs() {
  std::vector<CallLog*> logs;
  for (Place& place : group_->places) logs.push_back(&place.log);
  return logs;
}

void ThreadTransport::begin_work() {
  place(rank_).working.store(true, std::memory_order_seq_cst);
  if (group_->failure_state->flag().load(std::memory_order_seq_cst) < 0) return;
  end_work();
  give_up(barrier_.current_post(rank_));
}

void ThreadTransport::end_work() { place(rank_).working.store(false, std::memory_order_release); }

void ThreadTransport::leave_barrier() {
  fail("");
  for (const Place& place : group_->places)
    while (place.working.load(std::memory_order_seq_cst)) std::this_thread::yield();
  if constexpr (kWithCuda)
    for (const Place& place : group_->places) place.done.wait();
}

void ThreadTransport::give_up(const Call& call) {
  leave_barrier();
  throw PeerFailed(describe(call) + ": " + failure());
}

// Nothing is posted after a failure, because another rank may be reading this rank's last post for its error message.
void ThreadTransport::arrive(const Call& call) {
  if (failed_rank() >= 0) give_up(call);
  if constexpr (kWithCuda)
    if (call.gpu) place(rank_).ready.set(*call.gpu);
  barrier_.post(call);
  barrier_.wait();
  begin_work();
  if constexpr (kWithCuda)
    for (int r = 0; call.gpu && r < size(); ++r) place(r).ready.before(*call.gpu);
}

void ThreadTransport::depart(const Call& call) {
  if constexpr (kWithCuda)
    if (call.gpu) place(rank_).done.set(*call.gpu);
  end_work();
  barrier_.wait();
  if constexpr (kWithCuda)
    for (int r = 0; call.gpu && r < size(); ++r) place(r).done.before(*call.gpu);
}

// Two ranks and few bytes: each publishes a copy, so neither waits until the other has finished reading.
int64_t ThreadTransport::all_reduce_small(const Call& call) {
  const int64_t bytes = call.bytes();
  std::byte* const mine = place(rank_).small[(barrier_.calls() + 1) % 2].data();
  std::memcpy(mine, call.in, static_cast<size_t>(bytes));
  arrive(call);
  std::array<const std::byte*, 2> in{};
  for (size_t r = 0; r < in.size(); ++r) in[r] = group_->places[r].small[barrier_.calls() % 2].data();
  std::byte* const out = call.out;
  reduce_ranks(call.dtype, call.reduction, in, std::span(&out, 1), {0, call.count});
  end_work();
  return bytes;
}

int64_t ThreadTransport::exchange(const Call& call) {
  if (call.op == Op::all_reduce && size() == 2 && call.bytes() <= kSmall && !call.gpu) return all_reduce_small(call);
  arrive(call);
  if (call.op == Op::barrier) {
    end_work();
    return 0;
  }
  for (int r = 0; r < size(); ++r) exchange_.peer_call(r) = barrier_.current_post(r);
  exchange_.run(call);
  depart(call);
  return sent_directly(call, size(), rank_);
}

int64_t ThreadTransport::direct(const Call& call) {
  try {
    return exchange(call);
  } catch (...) {
    end_work();  // otherwise a failing rank would wait for this one
    throw;
  }
}

void ThreadTransport::put(int to, MailboxMessage message) {
  Mailbox& box = group_->mailbox(rank_, to);
  const std::lock_guard lock(box.mutex);
  box.messages.push_back(std::move(message));
  raise(box.arrivals, box.arrivals.value.load(std::memory_order_relaxed) + 1);
}

// Throws if the message's size is not `bytes`.
MailboxMessage ThreadTransport::take(int from, int tag, int64_t bytes) {
  Mailbox& box = group_->mailbox(from, rank_);
  for (;;) {
    const uint32_t observed = box.arrivals.value.load(std::memory_order_acquire);
    {
      const std::lock_guard lock(box.mutex);
      const auto found = std::ranges::find_if(box.messages, [&](const MailboxMessage& l) { return l.tag == tag; });
      if (found != box.messages.end()) {
        const int64_t size = found->device_bytes.empty() ? std::ssize(found->bytes) : found->device_bytes.bytes();
        check_size(from, bytes, size);
        MailboxMessage message = std::move(*found);
        box.messages.erase(found);
        return message;
      }
    }
    PeerWait observer(*this, from, [bytes] { return std::pair(receiving(bytes), ""s); });
    const WaitResult waited = wait_for(box.arrivals, observed + 1, group_->wait_options, &observer);
    if (waited == WaitResult::peer_failed) throw PeerFailed(receiving(bytes) + ": " + failure());
    if (waited == WaitResult::timed_out)
      throw CommError(receiving(bytes) + ": " + sent_nothing(world_rank(from), group_->wait_options.timeout_s));
  }
}

void ThreadTransport::send(int to, int tag, const std::byte* data, int64_t bytes) {
  put(to, {tag, std::vector<std::byte>(data, data + bytes), {}});
}

void ThreadTransport::recv(int from, int tag, std::byte* data, int64_t bytes) {
  const MailboxMessage message = take(from, tag, bytes);
  if (!message.device_bytes.empty()) refuse_kind(bytes, world_rank(from), "a GPU's", "the host's");
  if (bytes > 0) std::memcpy(data, message.bytes.data(), static_cast<size_t>(bytes));
}

void ThreadTransport::send_from_gpu(int to, int tag, const std::byte* data, int64_t bytes, Arena& gpu) {
  if constexpr (kWithCuda) put(to, {tag, {}, cuda::DeviceMessage(gpu, data, bytes)});
}

void ThreadTransport::recv_to_gpu(int from, int tag, std::byte* data, int64_t bytes, Arena& gpu) {
  MailboxMessage message = take(from, tag, bytes);
  if (message.device_bytes.empty()) refuse_kind(bytes, world_rank(from), "the host's", "a GPU's");
  if constexpr (kWithCuda) message.device_bytes.unpack(gpu, data);
}

std::unique_ptr<Transport> ThreadTransport::split(int color, int key) {
  const std::vector<int> members = group_members(color, key);
  // Stored in the group, so a rank can read it even if the first rank fails during this call.
  std::shared_ptr<ThreadGroup>& offered = group_->places[static_cast<size_t>(members[0])].offered;
  if (members[0] == rank_) {
    std::vector<int> world;
    for (const int r : members) world.push_back(world_rank(r));
    offered = std::make_shared<ThreadGroup>(std::move(world), group_->wait_options.timeout_s,
                                            group_->wait_options.oversubscribed, group_->failure_state);
  }
  direct({.op = Op::barrier});
  std::shared_ptr<ThreadGroup> group = offered;
  direct({.op = Op::barrier});
  if (members[0] == rank_) offered.reset();
  const auto place = std::ranges::find(members, rank_) - members.begin();
  return std::make_unique<ThreadTransport>(std::move(group), static_cast<int>(place));
}

}  // namespace tessera
