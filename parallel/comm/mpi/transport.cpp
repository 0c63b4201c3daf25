// Messages, groups and failures over MPI.
#include "parallel/comm/mpi/transport.h"

#include <mpi.h>
#include <sched.h>

#include <algorithm>
#include <chrono>
#include <climits>
#include <cstring>
#include <thread>
#include <utility>
#include <vector>

#include "parallel/comm/algorithms.h"
#include "parallel/comm/flight.h"
#include "parallel/comm/sums.h"

namespace tessera {

namespace {

using Clock = std::chrono::steady_clock;
constexpr int kFirstTag = 16;  // below are the tags of our own algorithms, which count down from -1
constexpr int kSpins = 200;
constexpr auto kYielding = std::chrono::microseconds(500), kShortSleep = std::chrono::microseconds(20),
               kSoon = std::chrono::microseconds(20000), kLongSleep = std::chrono::microseconds(200);

// `bytes` as one element, since MPI-3 counts in int.
class Bytes {
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
  Bytes(const Bytes&) = delete;
  Bytes& operator=(const Bytes&) = delete;
  int count() const { return count_; }
  MPI_Datatype type() const { return type_; }

 private:
  int count_ = 1;
  MPI_Datatype type_ = MPI_BYTE;
};

std::string receiving(int64_t bytes) { return "recv of " + std::to_string(bytes) + " bytes"; }

}  // namespace

MpiTransport::MpiTransport(std::shared_ptr<MpiWorld> world, MpiGroup& group) : world_(std::move(world)), group_(group) {
  if (!group_.window) return;
  // A rank that waits in shared memory is not inside MPI, which sends large messages only while it is called.
  Patience patience = world_->patience();
  patience.meanwhile = [world = world_.get()] { return world->reap() > 0; };
  shared_.emplace(SharedGroup{.places = group_.places,
                              .world_ranks = group_.world_ranks,
                              .rank = group_.rank,
                              .patience = std::move(patience),
                              .peers = world_->peers(),
                              .give_up = [this] { fail(""); },
                              .failure = [this] { return failure(); },
                              .transport = this});
}

std::vector<CallLog*> MpiTransport::logs() {
  std::vector<CallLog*> logs;
  for (SharedPlace* place : group_.places) logs.push_back(&place->log);
  return logs;
}

void MpiTransport::fail(const std::string& cause) { world_->watch().fail(world_->rank(), cause, false); }

void MpiTransport::send(int to, int tag, const std::byte* data, int64_t bytes) {
  std::vector<std::byte> copy(data, data + bytes);
  const Bytes what(bytes);
  MPI_Request request = MPI_REQUEST_NULL;
  mpi_check(MPI_Isend(copy.data(), what.count(), what.type(), to, kFirstTag + tag, group_.comm, &request), "MPI_Isend");
  world_->keep(request, std::move(copy));
  world_->reap();
}

template <class Done>
void MpiTransport::patiently(int from, int64_t bytes, const Done& done) {
  const Patience& patience = world_->patience();
  const int spins = patience.crowded ? 1 : kSpins;
  for (int i = 0; i < spins; ++i)
    if (done()) return;
  const auto start = Clock::now();
  const std::chrono::duration<double> limit(patience.timeout_s);
  const auto seconds = [&] { return std::chrono::duration<double>(Clock::now() - start).count(); };
  PeerWait observer(*this, from, [bytes] { return std::pair(receiving(bytes), std::string()); });
  Reminder reminder;
  for (int i = 0; !done(); ++i) {
    const auto waited = Clock::now() - start;
    if (i % 16 == 0 && reminder.is_due(seconds())) observer.overdue(seconds(), reminder.again());
    if (i % 16 == 0) world_->reap();
    if (world_->watch().failed_rank() >= 0) throw PeerFailed(receiving(bytes) + ": " + failure());
    if (waited > limit)
      throw CommError(receiving(bytes) + ": rank " + std::to_string(world_rank(from)) + " sent nothing within " +
                      seconds_text(patience.timeout_s));
    if (waited < kYielding)
      sched_yield();
    else
      std::this_thread::sleep_for(waited < kSoon ? kShortSleep : kLongSleep);
  }
  observer.waited(seconds());
}

void MpiTransport::recv(int from, int tag, std::byte* data, int64_t bytes) {
  MPI_Message message = MPI_MESSAGE_NULL;
  MPI_Status status;
  patiently(from, bytes, [&] {
    int found = 0;
    mpi_check(MPI_Improbe(from, kFirstTag + tag, group_.comm, &found, &message, &status), "MPI_Improbe");
    return found != 0;
  });
  MPI_Count size = 0;
  MPI_Get_elements_x(&status, MPI_BYTE, &size);
  if (size != bytes)
    throw CommError(receiving(bytes) + ": rank " + std::to_string(world_rank(from)) + " sent " + std::to_string(size));
  const Bytes what(bytes);
  MPI_Request request = MPI_REQUEST_NULL;
  mpi_check(MPI_Imrecv(data, what.count(), what.type(), &message, &request), "MPI_Imrecv");
  patiently(from, bytes, [&] {
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
    throw Error("[comm] MPI's own collectives are for arrays in the host's memory, found " + describe(call) +
                "; expected the algorithm direct, ring, tree or root");
  if (shared_) shared_->meet_for(call);  // so that MPI is entered by all or by none, and for the same
  const MpiWatch::Blocking blocking(world_->watch(), axis_ + " axis, " + describe(call));
  mpi_collective(group_.comm, call);
  return sent_directly(call, size(), rank());
}

std::unique_ptr<Transport> MpiTransport::split(int color, int key) {
  std::vector<int64_t> colors(static_cast<size_t>(size()));
  int64_t mine = color;
  if (size() > 1)
    direct({.op = Op::all_gather,
            .dtype = DType::int64,
            .count = size(),
            .in = reinterpret_cast<const std::byte*>(&mine),
            .out = reinterpret_cast<std::byte*>(colors.data())});
  else
    colors[0] = mine;
  const auto first = std::ranges::find(colors, mine) - colors.begin();  // MPI's colors are not negative
  const MpiWatch::Blocking blocking(world_->watch(), axis_ + " axis, split");
  MPI_Comm comm = MPI_COMM_NULL;
  mpi_check(MPI_Comm_split(group_.comm, static_cast<int>(first), key, &comm), "MPI_Comm_split");
  return std::make_unique<MpiTransport>(world_, world_->add(comm));
}

// MPI's own collectives, in place where MPI can. Sums of bfloat16 are made in float32 and rounded at each addition, in
// the order that the library chooses.

namespace {

void add_bfloat16(void* in, void* inout, int* count, MPI_Datatype*) {
  reduce_into(DType::bfloat16, Reduction::sum, static_cast<std::byte*>(inout), static_cast<std::byte*>(in), *count);
}
void max_bfloat16(void* in, void* inout, int* count, MPI_Datatype*) {
  reduce_into(DType::bfloat16, Reduction::max, static_cast<std::byte*>(inout), static_cast<std::byte*>(in), *count);
}

class Operation {
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
  Operation(const Operation&) = delete;
  Operation& operator=(const Operation&) = delete;
  MPI_Op get() const { return op_; }

 private:
  MPI_Op own_ = MPI_OP_NULL, op_ = MPI_OP_NULL;
};

MPI_Datatype type_of(DType dtype) {
  switch (dtype) {
    case DType::float64:
      return MPI_DOUBLE;
    case DType::float32:
      return MPI_FLOAT;
    case DType::bfloat16:
      return MPI_UINT16_T;
    case DType::int32:
      return MPI_INT32_T;
    case DType::uint8:
      return MPI_UINT8_T;
    default:
      return MPI_INT64_T;
  }
}

struct Collective {
  MPI_Comm comm;
  const Call& call;
  int n = 1, rank = 0;
  int64_t element = size_of(call.dtype);
  MPI_Datatype type = type_of(call.dtype);
  int count = static_cast<int>(call.count);
  std::vector<int> counts, places;  // sizes and places of the pieces

  Collective(MPI_Comm c, const Call& what) : comm(c), call(what) {
    MPI_Comm_size(comm, &n);
    MPI_Comm_rank(comm, &rank);
    for (int r = 0; r < n; ++r) {
      const Range range = piece(call.count, n, r);
      counts.push_back(static_cast<int>(range.size()));
      places.push_back(static_cast<int>(range.begin));
    }
  }
  int64_t begin() const { return places[static_cast<size_t>(rank)] * element; }
  int own() const { return counts[static_cast<size_t>(rank)]; }

  void reduce_scatter() const {
    const Operation op(call);
    std::vector<std::byte> total(static_cast<size_t>(own() * element));  // `out` may lie inside `in`
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
    throw Error("[mpi] " + describe(call) + ": MPI's own collective takes at most " + std::to_string(INT_MAX) +
                " elements; use another algorithm");
  Collective(comm, call).run();
}

}  // namespace tessera
