// Messages, groups and failures over MPI.
#include "parallel/comm/mpi_transport.h"

#include <sched.h>

#include <algorithm>
#include <chrono>
#include <climits>
#include <thread>
#include <utility>

#include "parallel/comm/algorithms.h"
#include "parallel/comm/flight.h"

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
  // What waits in shared memory is not inside MPI, which sends large messages only while it is called.
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

}  // namespace tessera
