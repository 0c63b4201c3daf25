// Messages, collectives and failure detection with MPI.
#include <poll.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <climits>
#include <csignal>
#include <cstdint>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "parallel/comm/algorithms.h"
#include "parallel/comm/memory.h"
#include "parallel/comm/mpi/world.h"
#include "parallel/comm/trace.h"

namespace tessera {

namespace {

using Clock = std::chrono::steady_clock;
constexpr int kFirstTag = 16;  // internal tags count down from -1
constexpr int kSpins = 200;
constexpr double kYielding = 500e-6, kSoon = 20e-3;  // seconds since the wait began
constexpr auto kShortSleep = std::chrono::microseconds(20), kLongSleep = std::chrono::microseconds(200);

// `bytes` as one element, because MPI-3 counts are int.
class Bytes : NotCopied {
 public:
  explicit Bytes(int64_t bytes) {
    if (bytes <= INT_MAX) {
      count_ = static_cast<int>(bytes);
      return;
    }
    constexpr int64_t block = 1 << 30;
    MPI_Datatype large = MPI_DATATYPE_NULL;
    MPI_Type_contiguous(static_cast<int>(block), MPI_BYTE, &large);
    std::array<int, 2> lengths = {static_cast<int>(bytes / block), static_cast<int>(bytes % block)};
    std::array<MPI_Aint, 2> places = {0, bytes / block * block};
    std::array<MPI_Datatype, 2> types = {large, MPI_BYTE};
    MPI_Type_create_struct(2, lengths.data(), places.data(), types.data(), &type_);
    MPI_Type_free(&large);
    MPI_Type_commit(&type_);
    count_ = 1;
  }
  ~Bytes() {
    if (type_ != MPI_BYTE) MPI_Type_free(&type_);
  }
  int count() const { return count_; }
  MPI_Datatype type() const { return type_; }

 private:
  int count_ = 1;
  MPI_Datatype type_ = MPI_BYTE;
};

}  // namespace

MpiTransport::MpiTransport(std::shared_ptr<MpiWorld> world, MpiGroup& group) : world_(std::move(world)), group_(group) {
  if (!group_.window) return;
  // While a rank waits in shared memory, MPI makes no progress on large messages, so the wait polls them.
  WaitOptions wait_options = world_->wait_options();
  wait_options.progress = [world = world_.get()] { return world->reap() > 0; };
  shared_.emplace(*this, group_.places, std::move(wait_options), world_->peers());
}

std::vector<CallLog*> MpiTransport::logs() {
  std::vector<CallLog*> logs;
  for (SharedPlace* place : group_.places) logs.push_back(&place->log);
  return logs;
}

void MpiTransport::fail(const std::string& cause) { world_->failure_state().fail(world_->rank(), cause); }

void MpiTransport::send(int to, int tag, const std::byte* data, int64_t bytes) {
  std::vector<std::byte> copy(data, data + bytes);
  const Bytes what(bytes);
  MPI_Request request = MPI_REQUEST_NULL;
  mpi_check(MPI_Isend(copy.data(), what.count(), what.type(), to, kFirstTag + tag, group_.comm, &request), "MPI_Isend");
  world_->retain(request, std::move(copy));
  world_->reap();
}

template <class Done>
void MpiTransport::wait_until(int from, int64_t bytes, const Done& done) {
  const WaitOptions& wait_options = world_->wait_options();
  const int spins = wait_options.oversubscribed ? 1 : kSpins;
  for (int i = 0; i < spins; ++i)
    if (done()) return;
  await_message(from, bytes, wait_options.timeout_s, [&, polls = 0](double waited) mutable {
    if (polls > 0 && waited < kYielding)
      sched_yield();
    else if (polls > 0)
      std::this_thread::sleep_for(waited < kSoon ? kShortSleep : kLongSleep);
    if (polls++ % 16 == 1) world_->reap();
    return done();
  });
}

void MpiTransport::recv(int from, int tag, std::byte* data, int64_t bytes) {
  MPI_Message message = MPI_MESSAGE_NULL;
  MPI_Status status;
  wait_until(from, bytes, [&] {
    int found = 0;
    mpi_check(MPI_Improbe(from, kFirstTag + tag, group_.comm, &found, &message, &status), "MPI_Improbe");
    return found != 0;
  });
  MPI_Count size = 0;
  MPI_Get_elements_x(&status, MPI_BYTE, &size);
  check_size(from, bytes, size);
  const Bytes what(bytes);
  MPI_Request request = MPI_REQUEST_NULL;
  mpi_check(MPI_Imrecv(data, what.count(), what.type(), &message, &request), "MPI_Imrecv");
  wait_until(from, bytes, [&] {
    int done = 0;
    mpi_check(MPI_Test(&request, &done, MPI_STATUS_IGNORE), "MPI_Test");
    return done != 0;
  });
}

int64_t MpiTransport::direct(const Call& call) {
  return shared_ && !call.gpu ? shared_->run(call) : direct_by_messages(*this, call);
}

int64_t MpiTransport::native(const Call& call) {
  if (call.gpu)
    throw Error("[comm] MPI's native collectives support only arrays in host memory, got " + describe(call) +
                "; expected " + expected_algorithms());
  if (shared_) shared_->synchronize_for(call);  // all ranks enter the same MPI call, or none
  const MpiWatch::Blocking blocking(world_->watch(), axis_ + " axis, " + describe(call));
  mpi_collective(group_.comm, call);
  return sent_directly(call, size(), rank());
}

std::unique_ptr<Transport> MpiTransport::split(int color, int key) {
  const int first = std::ranges::min(group_members(color, key));  // MPI requires non-negative colors
  const MpiWatch::Blocking blocking(world_->watch(), axis_ + " axis, split");
  MPI_Comm comm = MPI_COMM_NULL;
  mpi_check(MPI_Comm_split(group_.comm, first, key, &comm), "MPI_Comm_split");
  return std::make_unique<MpiTransport>(world_, world_->add(comm));
}

// MPI's own collectives, in place if possible. bfloat16 is added in float32 and rounded at each addition, in the
// library's order.

namespace {

void add_bfloat16(void* in, void* inout, int* count, MPI_Datatype*) {
  reduce_into(DType::bfloat16, Reduction::sum, static_cast<std::byte*>(inout), static_cast<std::byte*>(in), *count);
}
void max_bfloat16(void* in, void* inout, int* count, MPI_Datatype*) {
  reduce_into(DType::bfloat16, Reduction::max, static_cast<std::byte*>(inout), static_cast<std::byte*>(in), *count);
}

class Operation : NotCopied {
 public:
  explicit Operation(const Call& call) {
    const bool sums = call.reduction == Reduction::sum;
    if (call.dtype == DType::bfloat16)
      mpi_check(MPI_Op_create(sums ? add_bfloat16 : max_bfloat16, 1, &own_), "MPI_Op_create");
    op_ = own_ != MPI_OP_NULL ? own_ : sums ? MPI_SUM : MPI_MAX;
  }
  ~Operation() {
    if (own_ != MPI_OP_NULL) MPI_Op_free(&own_);
  }
  MPI_Op get() const { return op_; }

 private:
  MPI_Op own_ = MPI_OP_NULL, op_ = MPI_OP_NULL;
};

MPI_Datatype to_mpi_type(DType dtype) {
  const std::pair<DType, MPI_Datatype> types[] = {{DType::float64, MPI_DOUBLE},    {DType::float32, MPI_FLOAT},
                                                  {DType::bfloat16, MPI_UINT16_T}, {DType::int32, MPI_INT32_T},
                                                  {DType::uint8, MPI_UINT8_T},     {DType::int64, MPI_INT64_T}};
  return std::ranges::find(types, dtype, &std::pair<DType, MPI_Datatype>::first)->second;
}

struct Collective {
  MPI_Comm comm;
  const Call& call;
  int n = 1, rank = 0;
  int64_t element = element_size(call.dtype);
  MPI_Datatype type = to_mpi_type(call.dtype);
  int count = static_cast<int>(call.count);
  std::vector<int> counts, places;

  Collective(MPI_Comm c, const Call& what) : comm(c), call(what) {
    MPI_Comm_size(comm, &n);
    MPI_Comm_rank(comm, &rank);
    for (int r = 0; r < n; ++r) {
      const Range range = chunk_range(call.count, n, r);
      counts.push_back(static_cast<int>(range.size()));
      places.push_back(static_cast<int>(range.begin));
    }
  }
  int64_t begin() const { return places[static_cast<size_t>(rank)] * element; }
  int own() const { return counts[static_cast<size_t>(rank)]; }

  void reduce_scatter() const {
    const Operation op(call);
    std::vector<std::byte> total(static_cast<size_t>(own() * element));  // `out` may be inside `in`
    mpi_check(MPI_Reduce_scatter(call.in, total.data(), counts.data(), type, op.get(), comm), "MPI_Reduce_scatter");
    if (!total.empty()) std::memcpy(call.out, total.data(), total.size());
  }
  void all_gather() const {
    const bool in_place = call.in == call.out + begin();
    mpi_check(MPI_Allgatherv(in_place ? MPI_IN_PLACE : call.in, own(), type, call.out, counts.data(), places.data(),
                             type, comm),
              "MPI_Allgatherv");
  }
  void reduce() const {
    const Operation op(call);
    const bool at_root = rank == call.root;
    mpi_check(MPI_Reduce(at_root ? MPI_IN_PLACE : call.in, at_root ? call.out : nullptr, count, type, op.get(),
                         call.root, comm),
              "MPI_Reduce");
  }
  void gather() const {
    const bool in_place = rank == call.root && call.in == call.out + begin();
    mpi_check(MPI_Gatherv(in_place ? MPI_IN_PLACE : call.in, own(), type, call.out, counts.data(), places.data(), type,
                          call.root, comm),
              "MPI_Gatherv");
  }
  void scatter() const {
    const bool in_place = rank == call.root && call.out == call.in + begin();
    mpi_check(MPI_Scatterv(call.in, counts.data(), places.data(), type,
                           in_place ? MPI_IN_PLACE : static_cast<void*>(call.out), own(), type, call.root, comm),
              "MPI_Scatterv");
  }
  void run() const;
};

void Collective::run() const {
  switch (call.op) {
    case Op::all_reduce: {
      const Operation op(call);
      return mpi_check(MPI_Allreduce(MPI_IN_PLACE, call.out, count, type, op.get(), comm), "MPI_Allreduce");
    }
    case Op::reduce_scatter:
      return reduce_scatter();
    case Op::all_gather:
      return all_gather();
    case Op::broadcast:
      return mpi_check(MPI_Bcast(call.out, count, type, call.root, comm), "MPI_Bcast");
    case Op::reduce:
      return reduce();
    case Op::gather:
      return gather();
    case Op::scatter:
      return scatter();
    case Op::all_to_all:
      return mpi_check(MPI_Alltoall(call.in, own(), type, call.out, own(), type, comm), "MPI_Alltoall");
    default:
      return mpi_check(MPI_Barrier(comm), "MPI_Barrier");
  }
}

}  // namespace

void mpi_collective(MPI_Comm comm, const Call& call) {
  if (call.count > INT_MAX)
    throw Error("[mpi] " + describe(call) + ": MPI's native collectives support at most " + std::to_string(INT_MAX) +
                " elements; use another algorithm");
  Collective(comm, call).run();
}

// Processes are watched through pidfds, which are immune to process id reuse.

namespace {

using Clock = std::chrono::steady_clock;
constexpr int kTick_ms = 100;
constexpr auto kReportDelay = std::chrono::milliseconds(400);  // for a waiting rank to observe and report a failure
constexpr auto kCauseDelay = std::chrono::milliseconds(300);   // from SIGTERM until its cause is known

std::atomic<int> terminated{0};
struct sigaction before;

void on_terminate(int) { terminated.store(1, std::memory_order_relaxed); }

// Handles SIGTERM as without a watcher.
void terminate_as_before() {
  if (before.sa_handler == SIG_IGN) return;
  if (before.sa_handler != SIG_DFL && !(before.sa_flags & SA_SIGINFO)) return before.sa_handler(SIGTERM);
  sigaction(SIGTERM, &before, nullptr);
  kill(getpid(), SIGTERM);
}

bool is_gone(int64_t process) { return kill(static_cast<pid_t>(process), 0) != 0 && errno == ESRCH; }

}  // namespace

MpiWatch::MpiWatch(Options options)
    : options_(std::move(options)),
      failure_state_(options_.places[0]->failure_state),
      descriptors_(options_.places.size(), -1) {
  for (size_t i = 0; i < descriptors_.size(); ++i) {
    const HostPlace& place = *options_.places[i];
    if (place.world_rank == options_.world_rank) continue;
    descriptors_[i] = static_cast<int>(syscall(SYS_pidfd_open, static_cast<pid_t>(place.process.load()), 0));
  }
  struct sigaction action {};
  action.sa_handler = on_terminate;
  action.sa_flags = SA_RESTART;
  terminated = 0;
  sigaction(SIGTERM, &action, &before);
  thread_ = std::thread([this] { loop(); });
}

MpiWatch::~MpiWatch() {
  closing_ = true;
  thread_.join();
  struct sigaction now {};
  sigaction(SIGTERM, nullptr, &now);
  if (now.sa_handler == on_terminate)
    sigaction(SIGTERM, &before, nullptr);  // unless the program has replaced the handler
  for (const int fd : descriptors_)
    if (fd >= 0) close(fd);
  if (terminated.exchange(0)) terminate_as_before();
}

MpiWatch::Blocking::Blocking(MpiWatch& watch, std::string what) : watch_(watch) {
  const std::lock_guard lock(watch.mutex_);
  id_ = watch.next_id_++;
  watch.entries_.push_back({id_, std::move(what), watch.timer_.seconds()});
}

MpiWatch::Blocking::~Blocking() {
  const std::lock_guard lock(watch_.mutex_);
  std::erase_if(watch_.entries_, [&](const Entry& e) { return e.id == id_; });
}

void MpiWatch::loop() {
  std::vector<pollfd> polled;
  while (!closing_) {
    polled.clear();
    for (const int fd : descriptors_)
      if (fd >= 0) polled.push_back({fd, POLLIN, 0});
    const int tick = failure_state_.failed_rank() >= 0 || terminated ? 5 : kTick_ms;
    poll(polled.data(), polled.size(), tick);  // returns early if a process exits, or on a signal
    check_processes();
    if (options_.listen) options_.listen();
    check_signal();
    check_calls();
    check_failure();
  }
}

void MpiWatch::check_processes() {
  for (size_t i = 0; i < descriptors_.size(); ++i) {
    const HostPlace& place = *options_.places[i];
    if (place.world_rank == options_.world_rank || place.process == 0) continue;
    pollfd one{descriptors_[i], POLLIN, 0};
    const bool gone = one.fd >= 0 ? poll(&one, 1, 0) > 0 : is_gone(place.process);
    if (!gone) continue;
    if (!place.ended)
      failure_state_.fail(place.world_rank, "its process " + std::to_string(place.process) + " is gone", true);
    if (one.fd >= 0) close(std::exchange(descriptors_[i], -1));
  }
}

// SIGTERM comes from the launcher after a rank has died, or from a user, so the previous handler is called only after
// the time in which a death would have been detected.
void MpiWatch::check_signal() {
  if (!terminated || failure_state_.failed_rank() >= 0) return;
  const auto now = Clock::now();
  if (signal_since_ == Clock::time_point{}) signal_since_ = now;
  if (now - signal_since_ < kCauseDelay) return;
  terminated = 0;
  signal_since_ = {};
  if (options_.several_hosts && before.sa_handler == SIG_DFL)
    failure_state_.fail(FailureState::kUnknown,
                        "the launcher is terminating the job (SIGTERM); a rank on another host may have died", true);
  else
    terminate_as_before();
}

void MpiWatch::check_calls() {
  std::string late;
  {
    const std::lock_guard lock(mutex_);
    const double now = timer_.seconds();
    for (const Entry& entry : entries_)
      if (late.empty() && now - entry.since > options_.timeout_s) late = entry.what;
  }
  if (late.empty() || !failure_state_.fail(options_.world_rank, late)) return;
  options_.abort(late + ": MPI did not complete it within " + seconds_text(options_.timeout_s) +
                 "; another rank is missing");
}

// A waiting rank reports the failure itself; otherwise the watcher does.
void MpiWatch::check_failure() {
  if (failure_state_.failed_rank() < 0 || failure_state_.failed_rank() == options_.world_rank) return;
  const auto now = Clock::now();
  if (failed_since_ == Clock::time_point{}) failed_since_ = now;
  if (now - failed_since_ < (failure_state_.is_silent() ? kReportDelay : 10 * kReportDelay)) return;
  std::string during = "while this rank computed";
  {
    const std::lock_guard lock(mutex_);
    if (!entries_.empty()) during = entries_.back().what;
  }
  options_.abort(during + ": " + failure_state_.describe());
}

}  // namespace tessera
