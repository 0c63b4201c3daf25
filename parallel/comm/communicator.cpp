// Communicator: argument checks, counters and background calls.
#include "parallel/comm/communicator.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <numeric>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "base/error.h"
#include "parallel/comm/cuda/streams.h"
#include "parallel/comm/launch.h"
#include "parallel/comm/memory.h"
#include "parallel/comm/trace.h"
#include "tensor/random.h"

namespace tessera {

Communicator::Communicator(std::unique_ptr<Transport> transport, std::string axis, Algorithm algorithm)
    : transport_((require_object(transport.get(), "[communicator] transport"), std::move(transport))),
      axis_(std::move(axis)),
      algorithm_(algorithm),
      worker_(transport_->background()) {
  transport_->set_axis(axis_);
}

// If a background communication is still running, the stack is unwinding: the other ranks must not wait for this one.
Communicator::~Communicator() {
  if (in_background_ == 0) return;
  transport_->fail("");
  worker_->push([] {}).wait();
}

void Communicator::complain(const Call& call, const std::string& what) const {
  throw Error("[comm] " + axis_ + " axis, " + describe(call) + ": " + what);
}

namespace {

Arena* make_gpu_arena(const Tensor& t) { return t.device() == Device::cuda ? t.arena().get() : nullptr; }
const Region* arena_region(const Tensor& t) { return t.device() == Device::cpu ? &t.arena()->region() : nullptr; }

}  // namespace

Call Communicator::full_call(Op op, const Tensor& x) const {
  Call call{.op = op, .dtype = x.dtype(), .count = x.numel()};
  if (!x.defined()) complain(call, "the array is undefined");
  if (!x.is_contiguous()) complain(call, "the array is not contiguous");
  call.in = x.address();
  call.out = x.address();
  call.gpu = make_gpu_arena(x);
  call.region = arena_region(x);
  return call;
}

// One of `in` and `out` is the full array (undefined or meta if not needed), the other this rank's chunk.
Call Communicator::sharded_call(Op op, const Tensor& in, const Tensor& out, int64_t rows) const {
  const bool gathers = op == Op::all_gather || op == Op::gather;
  const Tensor &array = gathers ? out : in, &own = gathers ? in : out;
  Call call{
      .op = op, .dtype = own.dtype(), .count = array.defined() ? array.numel() : own.numel() * size(), .rows = rows};
  if (!own.defined()) complain(call, "the chunk of rank " + std::to_string(rank()) + " is undefined");
  if (!array.defined() && (op == Op::all_gather || op == Op::reduce_scatter))
    complain(call, "the full array is undefined");
  if (rows < 1) complain(call, std::to_string(rows) + " rows; expected at least 1");
  if (rows != 1 && (!supports_row_slices() || call.count % (rows * size()) != 0))
    complain(call, std::to_string(rows) +
                       " rows cannot be split evenly over the ranks, or this transport does not support row slices");
  const int64_t expected = chunk_range(call.count, size(), rank()).size();
  if (own.numel() != expected)
    complain(call, "the chunk of rank " + std::to_string(rank()) + " has " + std::to_string(own.numel()) +
                       " elements; expected " + std::to_string(expected));
  if (array.defined() && array.dtype() != own.dtype())
    complain(call, "the full array is " + array.describe() + " and the chunk " + own.describe());
  const auto memory = [&](const Tensor& t) -> std::byte* {
    if (!t.defined() || t.device() == Device::meta) return nullptr;
    if (!t.is_contiguous()) complain(call, "an array is not contiguous");
    if (make_gpu_arena(t) != make_gpu_arena(own))
      complain(call, "the full array and the chunk are on different devices");
    return t.address();
  };
  call.in = memory(in);
  call.out = memory(out);
  call.gpu = make_gpu_arena(own);
  const bool separate = call.in && call.out && arena_region(in) != arena_region(out);
  call.region = separate ? nullptr : arena_region(own);
  return call;
}

void Communicator::set_flight(std::shared_ptr<Flight> flight) {
  flight_axis_ = flight ? flight->axis(axis_) : 0;
  transport_->set_flight(flight);
  flight_ = std::move(flight);
}

double Communicator::now() const { return trace_ ? trace_->now() : 0; }

template <class F>
int64_t Communicator::named(const F& f) const {
  return named_in_errors([this] { return axis_ + " axis, "; }, f);
}

// f returns the bytes sent.
template <class F>
void Communicator::observed(const Call& call, double requested, const F& f) {
  const double begin = now();
  const uint64_t ticket = flight_ ? flight_->begin(flight_axis_, call.op, call.bytes()) : 0;
  const int64_t sent = named(f);
  if (flight_) flight_->end(ticket);
  OpCount& count = counts_[static_cast<size_t>(call.op)];
  ++count.calls;
  count.sent += sent;
  if (trace_) trace_->add({std::string(to_string(call.op)), axis_, call.bytes(), requested, begin, now(), sent});
}

void Communicator::perform(const Call& call, Algorithm algorithm, double requested) {
  observed(call, requested, [&] { return run_collective(*transport_, algorithm, call); });
}

void Communicator::run(const Call& call, Algorithm algorithm) {
  if (worker_ && !worker_->idle()) return start(call, {}, algorithm).wait();  // in order after background work
  const ScopedStall span(stall_timer_);
  const TraceSpan wait(trace_, kStall, TraceKind::wait);
  perform(call, algorithm, now());
}

Work Communicator::start(const Call& call, std::vector<Tensor> held, Algorithm algorithm,
                         std::shared_ptr<const UnevenSplits> splits) {
  if (transport_->only_queues(call)) return start_queued(call, std::move(held), algorithm);
  if (!worker_) worker_ = std::make_shared<CommWorker>();
  // Messages are sent immediately on this thread, so peers need not wait until the background thread is scheduled.
  const bool eager = splits && !transport_->only_native(call);
  int64_t sent = 0;
  if (eager) {
    const ScopedStall span(stall_timer_);
    const TraceSpan wait(trace_, kStall, TraceKind::wait);
    sent = named([&] { return send_chunks(*transport_, call); });
  }
  // Memory is released when the caller waits, not at completion, so that every step has the same peak and, on a GPU,
  // the same addresses (tensor/cuda/gpus.h).
  std::vector<Tensor> until_waited = held;
  ++in_background_;
  std::future<void> done = worker_->push(
      [this, call, algorithm, eager, sent, requested = now(), tensors = std::move(held), splits = std::move(splits)] {
        const auto less = [](std::atomic<int>* count) { --*count; };
        const std::unique_ptr<std::atomic<int>, decltype(less)> counted(&in_background_, less);
        try {
          if (eager)
            observed(call, requested, [&] { return receive_chunks(*transport_, call), sent; });
          else
            perform(call, algorithm, requested);
        } catch (const PeerFailed&) {
          throw;
        } catch (const std::exception& e) {
          transport_->fail(e.what());  // otherwise peers would match the next queued call with this one
          throw;
        }
      });
  return Work(trace_stall(std::move(done), trace_), std::move(until_waited), stall_timer_);
}

// Runs on this thread, because capture order is call order. Work::wait() joins the rank's stream with the collective.
Work Communicator::start_queued(const Call& call, std::vector<Tensor> held, Algorithm algorithm) {
  std::function<void()> join;
  observed(call, now(), [&] {
    uses_native(*transport_, algorithm, call);  // throws if native() is invalid
    join = transport_->start_native(call);
    return sent_directly(call, size(), rank());
  });
  return Work(std::async(std::launch::deferred, [join = std::move(join), tensors = std::move(held)] { join(); }));
}

namespace {

// NCCL, GPU kernels and the other algorithms have an order of their own.
void set_reduction(Call& call, Reduction reduction, Algorithm algorithm) {
  call.reduction = reduction;
  if (reduction == Reduction::pair_sum && (call.gpu || algorithm != Algorithm::direct))
    throw Error("[" + std::string(to_string(call.op)) + "] sums in pairs require the direct algorithm and CPU tensors");
}

}  // namespace

Reduction Communicator::ordered(Reduction reduction) const {
  return adds_in_pairs_ && reduction == Reduction::sum ? Reduction::pair_sum : reduction;
}

void Communicator::all_reduce(const Tensor& x, Reduction reduction) {
  if (size() == 1) return;
  Call call = full_call(Op::all_reduce, x);
  set_reduction(call, ordered(reduction), algorithm_);
  run(call);
}

Work Communicator::start_all_reduce(const Tensor& x, Reduction reduction) {
  if (size() == 1) return {};
  Call call = full_call(Op::all_reduce, x);
  set_reduction(call, ordered(reduction), algorithm_);
  return start(call, {x});
}

bool Communicator::copies_locally(const Call& call) const {
  if (size() > 1) return false;
  Memory(call).copy(call.out, call.in, call.bytes());
  return true;
}

void Communicator::reduce_scatter(const Tensor& in, const Tensor& out, Reduction reduction, int64_t rows) {
  Call call = sharded_call(Op::reduce_scatter, in, out, rows);
  set_reduction(call, ordered(reduction), algorithm_);
  if (!copies_locally(call)) run(call);
}

Work Communicator::start_reduce_scatter(const Tensor& in, const Tensor& out, int64_t rows) {
  Call call = sharded_call(Op::reduce_scatter, in, out, rows);
  set_reduction(call, ordered(call.reduction), algorithm_);
  return copies_locally(call) ? Work() : start(call, {in, out});
}

void Communicator::all_gather(const Tensor& in, const Tensor& out, int64_t rows) {
  const Call call = sharded_call(Op::all_gather, in, out, rows);
  if (!copies_locally(call)) run(call);
}

Work Communicator::start_all_gather(const Tensor& in, const Tensor& out, int64_t rows) {
  const Call call = sharded_call(Op::all_gather, in, out, rows);
  return copies_locally(call) ? Work() : start(call, {in, out});
}

void Communicator::broadcast(const Tensor& x, int root) {
  Call call = full_call(Op::broadcast, x);
  call.root = checked_rank(call, root);
  if (size() > 1) run(call);
}

void Communicator::reduce(const Tensor& x, int root) {
  Call call = full_call(Op::reduce, x);
  call.root = checked_rank(call, root);
  if (size() > 1) run(call);
}

void Communicator::gather(const Tensor& in, const Tensor& out, int root) {
  Call call = sharded_call(Op::gather, in, out);
  call.root = checked_rank(call, root);
  if (rank() == root && !call.out) complain(call, "the root has no memory for the full array");
  if (!copies_locally(call)) run(call);
}

void Communicator::scatter(const Tensor& in, const Tensor& out, int root) {
  Call call = sharded_call(Op::scatter, in, out);
  call.root = checked_rank(call, root);
  if (rank() == root && !call.in) complain(call, "the root has no array to scatter");
  if (!copies_locally(call)) run(call);
}

void Communicator::all_to_all(const Tensor& in, const Tensor& out) {
  Call call = full_call(Op::all_to_all, in);
  if (in.numel() % size() != 0)
    complain(call, std::to_string(in.numel()) + " elements are not divisible by " + std::to_string(size()) + " ranks");
  if (out.numel() != in.numel() || out.dtype() != in.dtype() || !out.is_contiguous() ||
      make_gpu_arena(out) != make_gpu_arena(in) || out.address() == in.address())
    complain(call,
             "out is " + out.describe() + "; expected separate contiguous memory of the same size, dtype and device");
  call.out = out.address();
  if (arena_region(out) != call.region) call.region = nullptr;
  if (!copies_locally(call)) run(call);
}

Call Communicator::uneven_call(const Tensor& in, const Tensor& out, const UnevenSplits& splits) const {
  Call call = full_call(Op::all_to_all, in);
  const auto fit = [&](const std::vector<int64_t>& sizes, const Tensor& array) {
    return std::ssize(sizes) == size() && std::accumulate(sizes.begin(), sizes.end(), int64_t{0}) == array.numel();
  };
  const auto own = static_cast<size_t>(rank());
  if (!fit(splits.sent, in) || !fit(splits.received, out) || splits.sent[own] != splits.received[own] ||
      out.dtype() != in.dtype() || !out.is_contiguous() || make_gpu_arena(out) != call.gpu)
    complain(call, in.describe() + " and " + out.describe() + " do not match the chunk sizes of " +
                       std::to_string(size()) + " ranks");
  call.out = out.address();
  call.splits = &splits;
  return call;
}

void Communicator::all_to_all(const Tensor& in, const Tensor& out, std::span<const int64_t> sent,
                              std::span<const int64_t> received) {
  const UnevenSplits splits{{sent.begin(), sent.end()}, {received.begin(), received.end()}};
  const Call call = uneven_call(in, out, splits);
  if (!copies_locally(call)) run(call);
}

Work Communicator::start_all_to_all(const Tensor& in, const Tensor& out, std::span<const int64_t> sent,
                                    std::span<const int64_t> received) {
  const auto splits = std::make_shared<const UnevenSplits>(
      UnevenSplits{{sent.begin(), sent.end()}, {received.begin(), received.end()}});
  const Call call = uneven_call(in, out, *splits);
  return copies_locally(call) ? Work() : start(call, {in, out}, algorithm_, splits);
}

// f(call) sends or receives, and returns the bytes sent.
template <class F>
void Communicator::pass_message(Op op, const Tensor& x, int peer, const char* direction, const F& f) {
  Call call = full_call(op, x);
  call.root = checked_rank(call, peer);
  if (peer == rank()) complain(call, std::string("a rank cannot ") + direction + " itself");
  const ScopedStall span(stall_timer_);
  const TraceSpan wait(trace_, kStall, TraceKind::wait);
  observed(call, now(), [&] { return f(call); });
}

void Communicator::send(const Tensor& x, int to, int tag) {
  pass_message(Op::send, x, to, "send to", [&](const Call& call) {
    Memory(call).send(*transport_, to, tag, call.in, call.bytes());
    return call.bytes();
  });
}

void Communicator::recv(const Tensor& x, int from, int tag) {
  pass_message(Op::recv, x, from, "receive from", [&](const Call& call) {
    Memory(call).recv(*transport_, from, tag, call.out, call.bytes());
    return 0;
  });
}

void Communicator::barrier() {
  if (size() > 1) run({.op = Op::barrier});
}

int Communicator::checked_rank(const Call& call, int rank) const {
  if (rank < 0 || rank >= size())
    complain(call, "expected a rank below the group size, got rank " + std::to_string(rank) + " of " +
                       std::to_string(size()));
  return rank;
}

void Communicator::reduce_values(std::span<double> x, Reduction reduction) {
  if (size() == 1) return;
  const auto memory = reinterpret_cast<std::byte*>(x.data());
  run({.op = Op::all_reduce,
       .dtype = DType::float64,
       .reduction = reduction,
       .count = std::ssize(x),
       .in = memory,
       .out = memory},
      Algorithm::direct);
}

double Communicator::sum(double x) {
  reduce_values(std::span(&x, 1), Reduction::sum);
  return x;
}
double Communicator::max(double x) {
  reduce_values(std::span(&x, 1), Reduction::max);
  return x;
}

std::unique_ptr<Communicator> Communicator::split(int color, int key, std::string axis) {
  auto made = std::make_unique<Communicator>(transport_->split(color, key), std::move(axis), algorithm_);
  made->set_trace(trace_);
  made->set_stall_timer(stall_timer_);
  if (flight_) made->set_flight(flight_);
  return made;
}

void Communicator::count_again(const OpCounts& more) {
  for (size_t op = 0; op < counts_.size(); ++op) {
    counts_[op].calls += more[op].calls;
    counts_[op].sent += more[op].sent;
  }
}

void Communicator::wait_for_gpu(Arena& gpu, const std::string& during) {
  constexpr int kYields = 1000;
  constexpr auto kNap = std::chrono::microseconds(20);
  AwakeTimer timer;
  ReportInterval reminder;
  const auto still_busy = [&] {
    if constexpr (kWithCuda)
      return !cuda::is_done(gpu);
    else
      return false;
  };
  try {
    for (int spins = 0; still_busy(); ++spins) {
      if (spins % 64 == 0) {
        const double waited = timer.seconds();
        transport_->check_progress(waited, during);
        if (flight_ && size() > 1 && reminder.is_due(waited))
          flight_->overdue(axis_, during, -1, "", waited, reminder.again());
      }
      spins < kYields ? std::this_thread::yield() : std::this_thread::sleep_for(kNap);
    }
  } catch (const CommError&) {
    while (still_busy()) std::this_thread::sleep_for(kNap);  // the remaining work ends after the aborted collectives
    throw;
  }
}

// Facts are compared by hash; the texts are exchanged only if hashes differ.

namespace {

constexpr size_t kMaxFacts = 3, kMaxCharacters = 80;  // limits of the error message

using Sorted = std::map<std::string, std::string>;

std::string to_string(const Sorted& facts) {
  std::string out;
  for (const auto& [name, value] : facts) out.append(name).append(1, '\0').append(value).append(1, '\0');
  return out;
}

Sorted parse_facts(const std::string& text) {
  Sorted out;
  for (size_t at = 0; at < text.size();) {
    const size_t middle = text.find('\0', at), end = text.find('\0', middle + 1);
    out[text.substr(at, middle - at)] = text.substr(middle + 1, end - middle - 1);
    at = end + 1;
  }
  return out;
}

std::string shown(const Sorted& facts, const std::string& name) {
  const auto found = facts.find(name);
  if (found == facts.end()) return "not set";
  return found->second.size() > kMaxCharacters ? found->second.substr(0, kMaxCharacters) + "..." : found->second;
}

}  // namespace

std::string ranks_text(const std::set<int>& ranks) {
  return fmt::format("rank{} {}", ranks.size() == 1 ? "" : "s", fmt::join(ranks, ", "));
}

std::string broadcast_text(Communicator& world, const std::string& text, int root) {
  const ArenaPtr arena = make_arena();
  const Tensor size = Tensor::of<int64_t>(std::vector{std::ssize(text)}, {1}, arena);
  world.broadcast(size, root);
  const Tensor characters = Tensor::zeros({size.item<int64_t>()}, DType::int32, arena);
  if (world.rank() == root) std::ranges::copy(text, characters.data<int32_t>());
  world.broadcast(characters, root);
  const std::vector<int32_t> all = characters.to_vector<int32_t>();
  return {all.begin(), all.end()};
}

void require_same(Communicator& world, const Facts& mine) {
  const OpCounts counted = world.counts();
  const Sorted own(mine.begin(), mine.end());
  const std::string text = to_string(own);
  const auto hash = static_cast<int64_t>(Philox::named(0, text).bits(0));  // any hash function works
  const std::vector<int64_t> all = all_gather_values<int64_t>(world, {hash});
  const auto other = std::ranges::find_if(all, [&](int64_t h) { return h != all[0]; });
  if (other == all.end()) return world.reset_counts(counted);
  const auto rank = static_cast<int>(other - all.begin());
  const Sorted first = parse_facts(broadcast_text(world, text, 0)),
               second = parse_facts(broadcast_text(world, text, rank));
  Sorted names = first;
  names.insert(second.begin(), second.end());
  std::string what;
  for (size_t found = 0; const auto& [name, value] : names) {
    const std::string here = shown(first, name), there = shown(second, name);
    if (here == there && first.contains(name) == second.contains(name)) continue;
    if (++found > kMaxFacts) {
      what += "; and more";
      break;
    }
    what += fmt::format("{}`{}` is {} on rank 0 and {} on rank {}", what.empty() ? "" : "; ", name, here, there, rank);
  }
  throw Error("ranks disagree: " + what + "; expected the same value on every rank");
}

}  // namespace tessera
