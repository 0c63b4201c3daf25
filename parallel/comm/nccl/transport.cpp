// Collectives as NCCL calls.
#include "parallel/comm/nccl/transport.h"

#include <algorithm>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "parallel/comm/algorithms.h"
#include "parallel/comm/launch.h"
#include "parallel/comm/trace.h"

namespace tessera {

struct NcclTransport::Family {
  std::mutex mutex;
  std::vector<NcclApi*> members;
  bool broken = false;
  std::shared_ptr<CommWorker> worker = std::make_shared<CommWorker>();

  void add(NcclApi* api) {
    const std::lock_guard lock(mutex);
    members.push_back(api);
  }
  void remove(NcclApi* api) {
    const std::lock_guard lock(mutex);
    std::erase(members, api);
  }
  // NCCL's kernels would wait forever for a failed rank and block later work on the stream.
  void abort() {
    const std::lock_guard lock(mutex);
    if (!std::exchange(broken, true))
      for (NcclApi* api : members) api->abort();
  }
  bool is_broken() {
    const std::lock_guard lock(mutex);
    return broken;
  }
};

NcclTransport::NcclTransport(std::unique_ptr<NcclApi> api, std::unique_ptr<Transport> carrier, double timeout_s)
    : NcclTransport(std::move(api), std::move(carrier), timeout_s, std::make_shared<Family>()) {}

NcclTransport::NcclTransport(std::unique_ptr<NcclApi> api, std::unique_ptr<Transport> carrier, double timeout_s,
                             std::shared_ptr<Family> family)
    : ForwardingTransport(std::move(carrier)),
      api_(std::move(api)),
      timeout_s_(timeout_s),
      family_(std::move(family)),
      logs_(inner().logs()) {
  if (size() == 1) return;
  NcclId id;
  if (rank() == 0) id = api_->make_id();
  auto* const memory = reinterpret_cast<std::byte*>(id.bytes.data());
  inner().direct({.op = Op::broadcast,
                  .dtype = DType::int64,
                  .count = static_cast<int64_t>(sizeof(id) / 8),
                  .in = memory,
                  .out = memory});
  api_->begin(size(), id, rank());
  family_->add(api_.get());
  wait_until(&NcclApi::queued, "joining NCCL");
}

NcclTransport::~NcclTransport() { family_->remove(api_.get()); }

void NcclTransport::check_peers(const std::string& during) const {
  if (failed_rank() >= 0) throw PeerFailed(during + ": " + failure());
}

void NcclTransport::compare(const Call& call) const {
  if (logs_.empty()) return;
  const uint64_t number = logs_[static_cast<size_t>(rank())]->made();
  for (int r = 0; r < size(); ++r) {
    std::optional<Call> theirs = logs_[static_cast<size_t>(r)]->find(number);
    if (!theirs) continue;
    theirs->gpu = call.gpu;
    if (!theirs->matches(call)) throw mismatch(call, world_rank(r), *theirs);
  }
}

// The first rank that has not reached this rank's last call; negative: none, or unknown.
int NcclTransport::late_rank(const Call* call) const {
  if (!call || logs_.empty()) return -1;
  const uint64_t number = logs_[static_cast<size_t>(rank())]->made();
  for (int r = 0; r < size(); ++r)
    if (logs_[static_cast<size_t>(r)]->made() < number) return r;
  return -1;
}

std::string NcclTransport::last_operation(int rank, const Call& call) const {
  const CallLog& log = *logs_[static_cast<size_t>(rank)];
  std::optional<Call> last = log.find(log.made());
  if (last) last->gpu = call.gpu;
  return last ? "its last operation was " + describe(*last) : "it has not communicated in this group yet";
}

// `call`: the last call if the wait is for its completion; null: unknown.
std::string NcclTransport::timeout_cause(const Call* call) const {
  const std::string within = " within " + seconds_text(timeout_s_);
  if (!call || logs_.empty())
    return "NCCL did not complete it" + within + "; a rank is missing or called a different operation";
  if (const int r = late_rank(call); r >= 0) return did_not_arrive(world_rank(r), timeout_s_, last_operation(r, *call));
  return "NCCL did not complete it" + within + ", although every rank has called it";
}

void NcclTransport::wait_until(bool (NcclApi::*reached)(), const std::string& during, const Call* call) {
  AwakeTimer timer;
  ReportInterval reminder;
  int late = -1;
  try {
    for (int64_t i = 0; !(*api_.*reached)(); ++i) {
      if (i % 64 != 0) continue;
      check_peers(during);
      if (call) compare(*call);
      const double waited = timer.seconds();
      if (waited > timeout_s_) throw CommError(during + ": " + timeout_cause(call));
      if (const int r = late_rank(call); r >= 0) late = r;
      if (flight_ && reminder.is_due(waited))
        flight_->overdue(axis_, during, late < 0 ? -1 : world_rank(late), late < 0 ? "" : last_operation(late, *call),
                         waited, reminder.again());
      std::this_thread::yield();
    }
  } catch (const CommError&) {
    family_->abort();
    throw;
  }
  if (flight_ && late >= 0) flight_->waited(world_rank(late), timer.seconds());
}

void NcclTransport::check_progress(double waited_s, const std::string& during) {
  if (size() == 1) return;
  try {
    check_peers(during);
    if (waited_s > timeout_s_) throw CommError(during + ": " + timeout_cause(nullptr));
    const std::lock_guard lock(family_->mutex);
    for (NcclApi* api : family_->members) api->queued();  // throws NCCL errors
  } catch (const CommError&) {
    family_->abort();
    throw;
  }
}

std::shared_ptr<CommWorker> NcclTransport::background() { return family_->worker; }

// Returns an event that follows the collective on NCCL's stream.
std::shared_ptr<void> NcclTransport::begin(const Call& call) {
  if (family_->is_broken()) throw CommError(describe(call) + ": NCCL failed in an earlier call");
  if (!logs_.empty()) logs_[static_cast<size_t>(rank())]->add(call);
  try {
    compare(call);
  } catch (const CommError&) {
    family_->abort();
    throw;
  }
  api_->after(*call.gpu);
  collective(call);
  wait_until(&NcclApi::queued, describe(call), &call);
  return api_->point();
}

int64_t NcclTransport::native(const Call& call) {
  if (!only_native(call)) return inner().direct(call);
  const std::shared_ptr<void> end = begin(call);
  // The rank's own thread is meanwhile free to queue other work. If the rank's stream joined before the collective
  // ends, it would block messages that another rank may need before reaching this collective: a deadlock.
  if (!api_->is_captured(*call.gpu)) wait_until(&NcclApi::finished, describe(call), &call);
  api_->join(*call.gpu, end);
  return sent_directly(call, size(), rank());
}

std::function<void()> NcclTransport::start_native(const Call& call) {
  return [this, end = begin(call), gpu = call.gpu] { api_->join(*gpu, end); };
}

void NcclTransport::collective(const Call& call) {
  const bool even = call.count % size() == 0;
  switch (call.op) {
    case Op::all_reduce:
      return api_->all_reduce(call.in, call.out, call.count, call.dtype, call.reduction);
    case Op::reduce_scatter:
      return reduce_scatter(call, even);
    case Op::all_gather:
      return all_gather(call, even);
    case Op::broadcast:
      return api_->broadcast(call.in, call.out, call.count, call.dtype, call.root);
    case Op::reduce:
      return api_->reduce(call.in, call.out, call.count, call.dtype, call.reduction, call.root);
    default:
      return exchange(call);
  }
}

void NcclTransport::reduce_scatter(const Call& call, bool even) {
  if (even) return api_->reduce_scatter(call.in, call.out, call.count / size(), call.dtype, call.reduction);
  const int64_t element = element_size(call.dtype);
  api_->group_start();
  for (int r = 0; r < size(); ++r)
    if (const Range theirs = range(call, r); theirs.size() > 0)
      api_->reduce(call.in + theirs.begin * element, r == rank() ? call.out : nullptr, theirs.size(), call.dtype,
                   call.reduction, r);
  api_->group_end();
}

void NcclTransport::all_gather(const Call& call, bool even) {
  if (even) return api_->all_gather(call.in, call.out, call.count / size(), call.dtype);
  const int64_t element = element_size(call.dtype);
  api_->group_start();
  for (int r = 0; r < size(); ++r) {
    const Range theirs = range(call, r);
    if (theirs.size() == 0) continue;
    std::byte* const place = call.out + theirs.begin * element;
    api_->broadcast(r == rank() ? call.in : place, place, theirs.size(), call.dtype, r);
  }
  api_->group_end();
}

void NcclTransport::exchange(const Call& call) {
  const int64_t element = element_size(call.dtype);
  const Range mine = range(call, rank());
  const bool at_root = rank() == call.root;
  const auto send = [&](const std::byte* data, int64_t count, int to) {
    if (count > 0) api_->send(data, count, call.dtype, to);
  };
  const auto recv = [&](std::byte* data, int64_t count, int from) {
    if (count > 0) api_->recv(data, count, call.dtype, from);
  };
  api_->group_start();
  if (call.op == Op::gather) send(call.in, mine.size(), call.root);
  if (call.op == Op::scatter) recv(call.out, mine.size(), call.root);
  for (int r = 0; r < size(); ++r) {
    const Range theirs = range(call, r);
    if (call.op == Op::all_to_all) {
      const Range there = send_range(call, size(), r), back = recv_range(call, size(), r);
      send(call.in + there.begin * element, there.size(), r);
      recv(call.out + back.begin * element, back.size(), r);
    }
    if (call.op == Op::scatter && at_root) send(call.in + theirs.begin * element, theirs.size(), r);
    if (call.op == Op::gather && at_root) recv(call.out + theirs.begin * element, theirs.size(), r);
  }
  api_->group_end();
}

std::unique_ptr<Transport> NcclTransport::split(int color, int key) {
  return std::unique_ptr<Transport>(new NcclTransport(api_->another(), inner().split(color, key), timeout_s_, family_));
}

}  // namespace tessera
