// Communicators, windows, and the end of a job.
#include "parallel/comm/mpi_world.h"

#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <new>
#include <numeric>
#include <thread>
#include <utility>

#include "tensor/cpu/vectorize.h"

namespace tessera {
namespace {

constexpr int64_t kPage = 4096;
constexpr int kAlarmTag = 1;

// mpirun binds each of two ranks, or a single one, to one core: then the OpenMP threads and the background thread of a
// rank would share it. Where this rank could have more it takes them all; the system keeps it to what the job may use.
int unbind(int ranks_here) {
  cpu_set_t mine;
  CPU_ZERO(&mine);
  sched_getaffinity(0, sizeof(mine), &mine);
  const int cores = static_cast<int>(std::thread::hardware_concurrency());
  const auto online = static_cast<int>(sysconf(_SC_NPROCESSORS_ONLN));
  if (CPU_COUNT(&mine) > 1 && CPU_COUNT(&mine) * ranks_here >= online) return cores;
  cpu_set_t all;
  CPU_ZERO(&all);
  for (int i = 0; i < CPU_SETSIZE; ++i) CPU_SET(i, &all);
  if (sched_setaffinity(0, sizeof(all), &all) == 0 && sched_getaffinity(0, sizeof(all), &all) == 0)
    return CPU_COUNT(&all);
  return CPU_COUNT(&mine);
}

}  // namespace

MpiWorld::MpiWorld(double timeout_s, int threads_per_rank) {
  MPI_Comm_rank(MPI_COMM_WORLD, &rank_);
  MPI_Comm_size(MPI_COMM_WORLD, &size_);
  meet_host();
  meet_peers();
  const int cores = unbind(ranks_here_);
  threads_per_rank_ = threads_per_rank > 0             ? threads_per_rank
                      : std::getenv("OMP_NUM_THREADS") ? cpu::threads()
                                                       : std::max(1, cores / ranks_here_);
  patience_ = {.timeout_s = timeout_s, .crowded = ranks_here_ * threads_per_rank_ > cores, .poisoned = &board_->failed};
  watch_ = std::make_unique<MpiWatch>(MpiWatch::Options{
      .board = board_,
      .places = host_places_,
      .world_rank = rank_,
      .timeout_s = timeout_s,
      .several_hosts = several_hosts(),
      .listen = several_hosts() ? std::function<void()>([this] { listen_to_other_hosts(); }) : nullptr,
      .abort = [this](const std::string& line) { abort(line, static_cast<int>(Status::communication)); }});
  MPI_Comm world = MPI_COMM_NULL;
  mpi_check(MPI_Comm_dup(MPI_COMM_WORLD, &world), "MPI_Comm_dup");
  add(world);
}

void MpiWorld::meet_host() {
  mpi_check(MPI_Comm_dup(MPI_COMM_WORLD, &alarm_), "MPI_Comm_dup");
  MPI_Comm_set_errhandler(alarm_, MPI_ERRORS_RETURN);
  mpi_check(MPI_Comm_split_type(MPI_COMM_WORLD, MPI_COMM_TYPE_SHARED, 0, MPI_INFO_NULL, &host_), "MPI_Comm_split_type");
  MPI_Comm_rank(host_, &rank_here_);
  MPI_Comm_size(host_, &ranks_here_);
  std::string why;
  host_window_ = MpiWindow::make(host_, static_cast<int64_t>(kPage), why);
  static_assert(sizeof(HostPlace) <= kPage / 2 && sizeof(HostBoard) <= kPage / 2);
  HostPlace* const own = host_window_ ? new (host_window_->segment(rank_here_)) HostPlace : &own_place_;
  own->world_rank = rank_;
  own->process = getpid();
  if (!host_window_) {
    say_messages(why);
    board_ = &own_board_;
    host_places_ = {own};
    return;
  }
  board_ = reinterpret_cast<HostBoard*>(host_window_->segment(0) + kPage / 2);
  if (rank_here_ == 0) new (board_) HostBoard;
  mpi_check(MPI_Barrier(host_), "MPI_Barrier");
  for (int r = 0; r < ranks_here_; ++r) host_places_.push_back(reinterpret_cast<HostPlace*>(host_window_->segment(r)));
}

void MpiWorld::say_messages(const std::string& why) {
  if (!why.empty() && ranks_here_ > 1)
    std::fprintf(stderr, "tessera: [rank %d] %s; this host's ranks exchange messages, which is slower\n", rank_,
                 why.c_str());
}

// Whether ranks of this host can map each other's memory is tried once, on regions that hold their numbers: all of them
// can, or none does. Containers that share no process numbers cannot.
void MpiWorld::meet_peers() {
  if (ranks_here_ == 1 || !host_window_) return;
  std::string why;
  std::unique_ptr<Region> own;
  Reach mine{.in = rank_};
  try {
    own = shared_region();
    *reinterpret_cast<int*>(own->base()) = rank_;
    mine = {.process = getpid(), .file = own->file(), .size = own->capacity(), .in = rank_};
  } catch (const Error& e) {
    why = e.what();
  }
  std::vector<Reach> all(static_cast<size_t>(ranks_here_));
  mpi_check(MPI_Allgather(&mine, sizeof(Reach), MPI_BYTE, all.data(), sizeof(Reach), MPI_BYTE, host_), "MPI_Allgather");
  PeerMemory tried;
  try {
    for (const Reach& theirs : all)
      if (theirs.known() && *reinterpret_cast<const int*>(tried.base(theirs)) != theirs.in)
        why = "process " + std::to_string(theirs.process) + " is not the rank that says so";
  } catch (const CommError& e) {
    why = e.what();
  }
  int good = why.empty() ? 1 : 0;
  mpi_check(MPI_Allreduce(MPI_IN_PLACE, &good, 1, MPI_INT, MPI_MIN, host_), "MPI_Allreduce");
  if (good != 0)
    peers_ = std::make_unique<PeerMemory>();
  else if (!why.empty())
    std::fprintf(stderr, "tessera: [rank %d] %s; this host's ranks exchange arrays in pieces, which is slower\n", rank_,
                 why.c_str());
}

MpiGroup& MpiWorld::add(MPI_Comm comm) {
  auto group = std::make_unique<MpiGroup>();
  group->comm = comm;
  MPI_Comm_set_errhandler(comm, MPI_ERRORS_RETURN);
  int n = 0, near = 0;
  MPI_Comm_size(comm, &n);
  MPI_Comm_rank(comm, &group->rank);
  MPI_Group members = MPI_GROUP_NULL, world = MPI_GROUP_NULL;
  MPI_Comm_group(comm, &members);
  MPI_Comm_group(MPI_COMM_WORLD, &world);
  std::vector<int> own(static_cast<size_t>(n));
  std::iota(own.begin(), own.end(), 0);
  group->world_ranks.resize(own.size());
  MPI_Group_translate_ranks(members, n, own.data(), world, group->world_ranks.data());
  MPI_Group_free(&members);
  MPI_Group_free(&world);
  MPI_Comm host = MPI_COMM_NULL;
  mpi_check(MPI_Comm_split_type(comm, MPI_COMM_TYPE_SHARED, group->rank, MPI_INFO_NULL, &host), "MPI_Comm_split_type");
  MPI_Comm_size(host, &near);
  if (near == n && n > 1 && host_window_) {
    std::string why;
    group->window = MpiWindow::make(host, static_cast<int64_t>(sizeof(SharedPlace)), why);
    say_messages(why);
  }
  if (group->window) {
    new (group->window->segment(group->rank)) SharedPlace;
    mpi_check(MPI_Barrier(host), "MPI_Barrier");
    for (int r = 0; r < n; ++r) group->places.push_back(reinterpret_cast<SharedPlace*>(group->window->segment(r)));
  }
  MPI_Comm_free(&host);
  groups_.push_back(std::move(group));
  return *groups_.back();
}

void MpiWorld::keep(MPI_Request request, std::vector<std::byte> bytes) {
  const std::lock_guard lock(sending_);
  sent_.push_back({request, std::move(bytes)});
}

size_t MpiWorld::reap() {
  const std::lock_guard lock(sending_);
  std::erase_if(sent_, [](Sent& sent) {
    int done = 0;
    mpi_check(MPI_Test(&sent.request, &done, MPI_STATUS_IGNORE), "MPI_Test");
    return done != 0;
  });
  return sent_.size();
}

void MpiWorld::end() {
  for (HostPlace* place : host_places_)
    if (place->world_rank == rank_) place->ended = true;
  {
    const MpiWatch::Blocking blocking(*watch_, "the end of the program");
    for (;; std::this_thread::yield()) {
      reap();
      const std::lock_guard lock(sending_);
      if (sent_.empty()) break;
    }
    mpi_check(MPI_Barrier(alarm_), "MPI_Barrier");
  }
  watch_.reset();
  for (const auto& group : groups_) MPI_Comm_free(&group->comm);
  MPI_Comm_free(&host_);
  MPI_Comm_free(&alarm_);
}

void MpiWorld::abort(const std::string& line, int status) {
  if (printed_.exchange(true))  // another thread of this rank is at it
    std::this_thread::sleep_for(std::chrono::seconds(10));
  end_mpi_job(line, status, [&] {
    if (several_hosts()) tell_other_hosts(rank_, line);
  });
}

void MpiWorld::wait_for_the_end(const std::string& line) {
  std::this_thread::sleep_for(std::chrono::seconds(4));
  abort(line, static_cast<int>(Status::communication));
}

void MpiWorld::tell_other_hosts(int failed, const std::string& cause) {
  std::vector<bool> here(static_cast<size_t>(size_));
  for (const HostPlace* place : host_places_) here[static_cast<size_t>(place->world_rank.load())] = true;
  std::string text = std::to_string(failed) + " " + cause;
  for (int r = 0; r < size_; ++r) {
    MPI_Request request = MPI_REQUEST_NULL;
    if (!here[static_cast<size_t>(r)])
      MPI_Isend(text.data(), static_cast<int>(text.size()), MPI_CHAR, r, kAlarmTag, alarm_, &request);
  }
  for (int i = 0; i < 20; ++i) {  // time to leave
    int flag = 0;
    MPI_Iprobe(MPI_ANY_SOURCE, kAlarmTag, alarm_, &flag, MPI_STATUS_IGNORE);
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
}

void MpiWorld::listen_to_other_hosts() {
  int flag = 0;
  MPI_Status status;
  if (MPI_Iprobe(MPI_ANY_SOURCE, kAlarmTag, alarm_, &flag, &status) != MPI_SUCCESS || !flag) return;
  int size = 0;
  MPI_Get_count(&status, MPI_CHAR, &size);
  std::string text(static_cast<size_t>(size), ' ');
  if (MPI_Recv(text.data(), size, MPI_CHAR, status.MPI_SOURCE, kAlarmTag, alarm_, MPI_STATUS_IGNORE) != MPI_SUCCESS)
    return;
  const size_t space = text.find(' ');
  watch_->fail(std::stoi(text.substr(0, space)), text.substr(space + 1), false);
}

}  // namespace tessera
