// Exchanges in the process that created the id.
#include "tests/cuda_emulator/nccl_exchange.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <map>
#include <mutex>

#include "tests/cuda_emulator/reach.h"

namespace tessera::emulator {
namespace {

// Whether the calls of two ranks match.
bool agree(const NcclCall& a, const NcclCall& b) {
  if (a.is_message()) return a.count == b.count && a.type == b.type;
  return a.kind == b.kind && a.count == b.count && a.type == b.type && a.op == b.op && a.root == b.root;
}

// A collective of all ranks or a message between two; lives as long as a rank waits for its completion.
struct Exchange {
  explicit Exchange(size_t members) : calls(members), came(members, false) {}
  std::vector<NcclCall> calls;  // by rank; for a message the sender's, then the receiver's
  std::vector<bool> came;
  std::atomic<bool> done = false;
};

class LocalExchange final : public NcclExchange {
 public:
  explicit LocalExchange(int ranks) : ranks_(ranks), collectives_(static_cast<size_t>(ranks), 0) {}

  int ranks() const override { return ranks_; }
  void join() override {
    const std::lock_guard lock(mutex_);
    ++joined_;
  }
  ncclResult_t state() override {
    const std::lock_guard lock(mutex_);
    return mismatched_ ? ncclInvalidUsage : joined_ == ranks_ ? ncclSuccess : ncclInProgress;
  }
  void close() override {
    const std::lock_guard lock(mutex_);
    closed_ = true;
  }
  std::function<bool()> come(int rank, const NcclCall& call) override {
    const Acting as(Side::kernel);
    const std::lock_guard lock(mutex_);
    const std::shared_ptr<Exchange> pending = exchange_point(rank, call);
    const size_t at = call.is_message() ? (call.kind == NcclCall::Kind::send ? 0 : 1) : static_cast<size_t>(rank);
    pending->calls[at] = call;
    pending->came[at] = true;
    for (size_t r = 0; r < pending->calls.size(); ++r)
      if (pending->came[r] && !agree(pending->calls[r], call)) mismatched_ = true;
    if (!mismatched_ && !closed_ && std::count(pending->came.begin(), pending->came.end(), false) == 0)
      pending->done = move_data(pending->calls);
    return [pending] { return pending->done.load(); };
  }

 private:
  static std::shared_ptr<Exchange> found(std::weak_ptr<Exchange>& place, int members) {
    std::shared_ptr<Exchange> pending = place.lock();
    if (!pending) place = pending = std::make_shared<Exchange>(static_cast<size_t>(members));
    return pending;
  }
  std::shared_ptr<Exchange> exchange_point(int rank, const NcclCall& call) {
    if (!call.is_message()) return found(exchanges_[collectives_[static_cast<size_t>(rank)]++], ranks_);
    const bool sends = call.kind == NcclCall::Kind::send;
    const int from = sends ? rank : call.root, to = sends ? call.root : rank;
    auto& [sent, received] = counts_[{from, to}];
    return found(messages_[{from, to, sends ? sent++ : received++}], 2);
  }

  const int ranks_;
  std::mutex mutex_;
  int joined_ = 0;
  bool mismatched_ = false, closed_ = false;
  std::vector<uint64_t> collectives_;                      // number of collectives that each rank has reached
  std::map<uint64_t, std::weak_ptr<Exchange>> exchanges_;  // by number
  std::map<std::pair<int, int>, std::pair<uint64_t, uint64_t>> counts_;  // (from, to): messages sent, received
  std::map<std::tuple<int, int, uint64_t>, std::weak_ptr<Exchange>> messages_;
};

}  // namespace

// Process id and sequence number.
std::string new_exchange() {
  static std::atomic<int> made = 0;
  accept_processes();
  return std::to_string(getpid()) + " " + std::to_string(made++);
}

std::shared_ptr<NcclExchange> exchange_named(const std::string& name, int ranks) {
  if (const pid_t process = std::stoi(name); process != getpid()) return remote_exchange(process, name, ranks);
  static std::mutex mutex;
  static std::map<std::string, std::weak_ptr<NcclExchange>> all;
  const std::lock_guard lock(mutex);
  std::weak_ptr<NcclExchange>& place = all[name];
  std::shared_ptr<NcclExchange> exchange = place.lock();
  if (!exchange) place = exchange = std::make_shared<LocalExchange>(ranks);
  return exchange;
}

}  // namespace tessera::emulator
