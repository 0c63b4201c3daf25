// MPI setup, memory shared by the ranks of a host, and launch.
#include "parallel/comm/mpi/world.h"

#include <fcntl.h>
#include <sched.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <filesystem>
#include <functional>
#include <memory>
#include <mutex>
#include <new>
#include <numeric>
#include <stop_token>
#include <string>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "base/write_file.h"
#include "parallel/comm/trace.h"
#include "tensor/cpu/vectorize.h"

namespace tessera {

namespace fs = std::filesystem;

constexpr const char* kMessages = "tessera-messages";

// A directory of this process for Open MPI's backing files of messages within a host. The process holds a file lock on
// it, which the system releases when the process ends for any reason, so an unlocked directory of this name is stale.
class MessageDirectory {
 public:
  explicit MessageDirectory(const fs::path& where);
  bool is_held() const { return held_; }
  const fs::path& path() const { return name_.path(); }
  static void remove_stale(const fs::path& where);

 private:
  TemporaryName name_;
  Descriptor lock_;
  bool held_ = false;
};

// Another rank may remove the directory before it is locked.
MessageDirectory::MessageDirectory(const fs::path& where)
    : name_(where / kMessages),
      lock_(::mkdir(path().c_str(), 0700) == 0 ? ::open(path().c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC) : -1) {
  std::error_code error;
  held_ = lock_.get() >= 0 && ::flock(lock_.get(), LOCK_EX | LOCK_NB) == 0 && fs::exists(path(), error);
}

void MessageDirectory::remove_stale(const fs::path& where) {
  std::error_code ignored;
  for (const fs::path& path : list_entries(where)) {
    if (!path.filename().string().starts_with(std::string(kMessages) + ".tmp-")) continue;
    const Descriptor directory(::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC));
    struct stat info {};
    if (directory.get() >= 0 && ::fstat(directory.get(), &info) == 0 && info.st_uid == ::geteuid() &&
        ::flock(directory.get(), LOCK_EX | LOCK_NB) == 0)
      fs::remove_all(path, ignored);
  }
}

namespace {

int64_t number_in(const char* variable) {
  const char* const text = std::getenv(variable);
  return text != nullptr ? std::atoll(text) : 0;
}

// Open MPI sends messages within a host through one file per rank in /dev/shm, whose memory is allocated on first
// touch: if none is left, the system kills the rank. So if /dev/shm lacks space for all files, they are created in the
// temporary directory. Returns null if Open MPI should choose the location.
std::unique_ptr<MessageDirectory> place_messages() {
  constexpr int64_t kFile = (int64_t{4} << 20) + 4096;
  const int64_t needed = number_in("OMPI_COMM_WORLD_LOCAL_SIZE") * kFile;
  std::error_code error;
  fs::path where = "/dev/shm";
  for (const fs::path& directory : {where, fs::temp_directory_path(error)}) MessageDirectory::remove_stale(directory);
  // The variable's names before version 5 and since.
  constexpr std::array names = {"OMPI_MCA_btl_vader_backing_directory", "OMPI_MCA_btl_sm_backing_directory"};
  for (const char* name : names)
    if (std::getenv(name) != nullptr) return nullptr;
  const fs::space_info memory = fs::space(where, error);
  const bool is_short = !error && static_cast<int64_t>(memory.available) < needed;
  if (is_short) where = temporary_directory();
  auto directory = std::make_unique<MessageDirectory>(where);
  if (!is_short && !directory->is_held()) return nullptr;
  for (const char* name : names) ::setenv(name, (directory->is_held() ? directory->path() : where).c_str(), 0);
  if (is_short && number_in("OMPI_COMM_WORLD_LOCAL_RANK") == 0)
    std::fprintf(stderr,
                 "tessera: /dev/shm has %lld bytes left, but Open MPI needs %lld for messages: using files in %s, "
                 "which may be slower; Docker's options shm-size and ipc provide more\n",
                 static_cast<long long>(memory.available), static_cast<long long>(needed),
                 one_line(where.string()).c_str());
  return directory;
}

// Ends the process with one line after the timeout: MPI calls that wait for all ranks have no timeout, and a stopped
// rank cannot report anything.
std::jthread start_alarm(double timeout_s, const char* what) {
  const auto watch = [=](const std::stop_token& over) {
    std::mutex mutex;
    std::unique_lock lock(mutex);
    std::condition_variable_any ended;
    for (AwakeTimer timer; timer.seconds() < timeout_s;)
      if (ended.wait_for(lock, over, std::chrono::milliseconds(100), [&] { return over.stop_requested(); })) return;
    std::fprintf(stderr,
                 "tessera: [rank %d] %s: the other ranks did not arrive within %s; one is stopped or has exited\n",
                 static_cast<int>(number_in("OMPI_COMM_WORLD_RANK")), what, seconds_text(timeout_s).c_str());
    std::fflush(nullptr);
    std::_Exit(static_cast<int>(Status::communication));
  };
  try {
    return std::jthread(watch);
  } catch (const std::system_error&) {
    return {};
  }
}

// Open MPI needs pipes, sockets and files; with too few descriptors it ends the process without reporting the cause.
void require_descriptors() {
  constexpr rlim_t kMinDescriptors = 64;
  rlimit limit{};
  if (::getrlimit(RLIMIT_NOFILE, &limit) != 0 || limit.rlim_cur >= kMinDescriptors) return;
  const rlim_t found = std::exchange(limit.rlim_cur, std::min(kMinDescriptors, limit.rlim_max));
  if (limit.rlim_cur < kMinDescriptors || ::setrlimit(RLIMIT_NOFILE, &limit) != 0)
    throw Error("[mpi] MPI requires at least " + std::to_string(kMinDescriptors) +
                " file descriptors, but `ulimit -n` is " + std::to_string(found));
}

// When one rank has exited, the launcher ends all ranks with SIGTERM. During MPI_Init only a signal handler can report
// this.
class TerminationDuringInit : NotCopied {
 public:
  TerminationDuringInit() {
    const std::string line =
        "tessera: [rank " + std::to_string(number_in("OMPI_COMM_WORLD_RANK")) +
        "] MPI_Init: the launcher is terminating the job (SIGTERM); a rank may have exited before all ranks started\n";
    length_ = line.copy(text_.data(), text_.size());
    struct sigaction action {};
    action.sa_handler = [](int number) {
      [[maybe_unused]] const ssize_t written = ::write(STDERR_FILENO, text_.data(), length_);
      ::sigaction(SIGTERM, &before_, nullptr);
      ::raise(number);
    };
    ::sigaction(SIGTERM, &action, &before_);
  }
  ~TerminationDuringInit() { ::sigaction(SIGTERM, &before_, nullptr); }

 private:
  static inline std::array<char, 200> text_{};
  static inline size_t length_ = 0;
  static inline struct sigaction before_ {};
};

}  // namespace

MpiSession::MpiSession(double timeout_s) : timeout_s_(timeout_s), exceptions_(std::uncaught_exceptions()) {
  int running = 0, provided = MPI_THREAD_SINGLE;
  MPI_Initialized(&running);
  if (running) {
    MPI_Query_thread(&provided);
  } else {
    require_descriptors();
    messages_ = place_messages();
    const TerminationDuringInit termination;
    const std::jthread alarm = start_alarm(timeout_s_, "MPI_Init");
    mpi_check(MPI_Init_thread(nullptr, nullptr, MPI_THREAD_MULTIPLE, &provided), "MPI_Init_thread");
    MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN);
    owner_ = true;
  }
  if (provided >= MPI_THREAD_MULTIPLE) return;
  throw Error("[mpi] this MPI library provides thread level " + std::to_string(provided) +
              "; expected MPI_THREAD_MULTIPLE for background communication");
}

MpiSession::~MpiSession() {
  if (!owner_ || std::uncaught_exceptions() > exceptions_) return;
  const std::jthread alarm = start_alarm(timeout_s_, "MPI_Finalize");
  MPI_Finalize();
}

// Prints "tessera: [rank r] line" and ends all ranks of the job.
[[noreturn]] static void end_mpi_job(
    const std::string& line, int status, const std::function<void()>& before_the_end = [] {}) {
  int rank = 0;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  const std::string text = "tessera: [rank " + std::to_string(rank) + "] " + one_line(line) + "\n";
  std::fputs(text.c_str(), stderr);
  std::fflush(nullptr);
  before_the_end();
  try {
    std::thread([status] {  // MPI_Abort may wait for a busy launcher
      std::this_thread::sleep_for(std::chrono::seconds(5));
      std::_Exit(status);
    })
        .detach();
    remove_temporaries();
    MPI_Abort(MPI_COMM_WORLD, status);
  } catch (const std::system_error&) {  // no thread available: the launcher ends the others after this exit
  }
  std::_Exit(status);
}

void mpi_check(int code, const char* call) {
  if (code == MPI_SUCCESS) return;
  std::array<char, MPI_MAX_ERROR_STRING> text{};
  int length = 0;
  MPI_Error_string(code, text.data(), &length);
  throw CommError(std::string(call) + ": " + std::string(text.data(), static_cast<size_t>(length)));
}

// The window is an anonymous file that ranks map through /proc (parallel/comm/shared_exchange.h).

namespace {

constexpr int64_t kPage = 4096;

// Includes the file's identity, because in another process namespace the same process id may refer to another process.
struct SharedFileRef {
  int64_t process = 0;
  int descriptor = -1;
  dev_t device = 0;
  ino_t inode = 0;
};

SharedFileRef make_file_ref(int descriptor) {
  struct stat info {};
  if (descriptor < 0 || ::fstat(descriptor, &info) != 0) return {};
  return {getpid(), descriptor, info.st_dev, info.st_ino};
}

}  // namespace

std::unique_ptr<MpiWindow> MpiWindow::make(MPI_Comm one_host, int64_t bytes_each, std::string& why) {
  int n = 0, rank = 0;
  MPI_Comm_size(one_host, &n);
  MPI_Comm_rank(one_host, &rank);
  std::unique_ptr<MpiWindow> window(new MpiWindow);
  window->each_ = (bytes_each + kPage - 1) / kPage * kPage;
  window->bytes_ = static_cast<size_t>(n * window->each_);
  int file = -1;
  SharedFileRef ref;
  if (rank == 0) {
    file = memfd_create("tessera", MFD_CLOEXEC);
    if (file >= 0 && ::ftruncate(file, n * window->each_) == 0) ref = make_file_ref(file);
  }
  const int cause = errno;
  mpi_check(MPI_Bcast(&ref, sizeof(SharedFileRef), MPI_BYTE, 0, one_host), "MPI_Bcast");
  errno = cause;
  if (rank != 0 && ref.descriptor >= 0) file = open_of_process(ref.process, ref.descriptor);
  const SharedFileRef found = make_file_ref(file);
  int good = 0;
  if (ref.descriptor < 0)
    why = rank == 0 ? std::string("cannot create shared memory: ") + std::strerror(errno) : "";
  else if (file < 0)
    why = "cannot map the memory of process " + std::to_string(ref.process) + ": " + std::strerror(errno);
  else if (found.device != ref.device || found.inode != ref.inode)
    why = "process " + std::to_string(ref.process) + " is not the expected rank";
  else if (const int failed = window->map(file, rank); failed != 0)
    why = "cannot allocate " + std::to_string(window->each_) + " bytes of shared memory: " + std::strerror(failed);
  else
    good = 1;
  mpi_check(MPI_Allreduce(MPI_IN_PLACE, &good, 1, MPI_INT, MPI_MIN, one_host), "MPI_Allreduce");
  if (file >= 0) ::close(file);
  return good != 0 ? std::move(window) : nullptr;
}

// Each rank allocates its own segment, so the memory is near that rank (NUMA).
int MpiWindow::map(int file, int rank) {
  if (const int cause = reserve_space(file, rank * each_, (rank + 1) * each_); cause != 0) return cause;
  void* const p = ::mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  if (p == MAP_FAILED) return errno;
  base_ = static_cast<std::byte*>(p);
  return 0;
}

MpiWindow::~MpiWindow() {
  if (base_) ::munmap(base_, bytes_);
}

namespace {

constexpr int kAlarmTag = 1;

// With one or two ranks, mpirun binds each to one core, which its OpenMP and background threads would share. So the
// rank uses all cores available to the job.
int unbind(int local_world_size) {
  cpu_set_t mine;
  CPU_ZERO(&mine);
  sched_getaffinity(0, sizeof(mine), &mine);
  const int cores = static_cast<int>(std::thread::hardware_concurrency());
  const auto online = static_cast<int>(sysconf(_SC_NPROCESSORS_ONLN));
  if (CPU_COUNT(&mine) > 1 && CPU_COUNT(&mine) * local_world_size >= online) return cores;
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
  connect_host();
  map_peers();
  const int cores = unbind(local_world_size_);
  threads_per_rank_ = threads_of_rank(threads_per_rank, cores, local_world_size_);
  wait_options_ = {.timeout_s = timeout_s,
                   .oversubscribed = local_world_size_ * threads_per_rank_ > cores,
                   .failed_rank = &failure_state().flag()};
  watch_ = std::make_unique<MpiWatch>(MpiWatch::Options{
      .places = host_places_,
      .world_rank = rank_,
      .timeout_s = timeout_s,
      .several_hosts = several_hosts(),
      .listen = several_hosts() ? std::function<void()>([this] { poll_other_hosts(); }) : nullptr,
      .abort = [this](const std::string& line) { abort(line, static_cast<int>(Status::communication)); }});
  MPI_Comm world = MPI_COMM_NULL;
  mpi_check(MPI_Comm_dup(MPI_COMM_WORLD, &world), "MPI_Comm_dup");
  add(world);
}

void MpiWorld::connect_host() {
  mpi_check(MPI_Comm_dup(MPI_COMM_WORLD, &alarm_), "MPI_Comm_dup");
  MPI_Comm_set_errhandler(alarm_, MPI_ERRORS_RETURN);
  mpi_check(MPI_Comm_split_type(MPI_COMM_WORLD, MPI_COMM_TYPE_SHARED, 0, MPI_INFO_NULL, &host_), "MPI_Comm_split_type");
  MPI_Comm_rank(host_, &local_rank_);
  MPI_Comm_size(host_, &local_world_size_);
  std::string why;
  host_window_ = MpiWindow::make(host_, static_cast<int64_t>(sizeof(HostPlace)), why);
  HostPlace* const own = host_window_ ? new (host_window_->segment(local_rank_)) HostPlace : &own_place_;
  own->world_rank = rank_;
  own->process = getpid();
  if (!host_window_) {
    report_messages(why);
    host_places_ = {own};
    return;
  }
  mpi_check(MPI_Barrier(host_), "MPI_Barrier");
  for (int r = 0; r < local_world_size_; ++r)
    host_places_.push_back(reinterpret_cast<HostPlace*>(host_window_->segment(r)));
}

void MpiWorld::report_messages(const std::string& why) {
  if (!why.empty() && local_world_size_ > 1)
    std::fprintf(stderr, "tessera: [rank %d] %s; ranks on this host exchange messages instead, which is slower\n",
                 rank_, why.c_str());
}

// In-place exchange requires that all ranks of this host can map each other's memory, tested on regions that store
// their rank's number. The test fails in containers with separate process namespaces.
void MpiWorld::map_peers() {
  if (local_world_size_ == 1 || !host_window_) return;
  std::string why;
  std::unique_ptr<Region> own;
  SharedArrayRef mine{.in = rank_};
  try {
    own = shared_region();
    *reinterpret_cast<int*>(own->base()) = rank_;
    mine = {.process = getpid(), .file = own->file(), .size = own->capacity(), .in = rank_};
  } catch (const Error& e) {
    why = e.what();
  }
  std::vector<SharedArrayRef> all(static_cast<size_t>(local_world_size_));
  mpi_check(MPI_Allgather(&mine, sizeof(SharedArrayRef), MPI_BYTE, all.data(), sizeof(SharedArrayRef), MPI_BYTE, host_),
            "MPI_Allgather");
  PeerMemory tried;
  try {
    for (const SharedArrayRef& theirs : all)
      if (theirs.known() && *reinterpret_cast<const int*>(tried.base(theirs)) != theirs.in)
        why = "process " + std::to_string(theirs.process) + " is not the expected rank";
  } catch (const CommError& e) {
    why = e.what();
  }
  int good = why.empty() ? 1 : 0;
  mpi_check(MPI_Allreduce(MPI_IN_PLACE, &good, 1, MPI_INT, MPI_MIN, host_), "MPI_Allreduce");
  if (good != 0)
    peers_ = std::make_unique<PeerMemory>();
  else
    report_messages(why);
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
    report_messages(why);
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

void MpiWorld::retain(MPI_Request request, std::vector<std::byte> bytes) {
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
  if (printed_.exchange(true)) std::this_thread::sleep_for(std::chrono::seconds(10));
  end_mpi_job(line, status, [&] {
    if (several_hosts()) notify_other_hosts(rank_, line);
  });
}

void MpiWorld::wait_for_abort(const std::string& line) {
  std::this_thread::sleep_for(std::chrono::seconds(4));
  abort(line, static_cast<int>(Status::communication));
}

void MpiWorld::notify_other_hosts(int failed, const std::string& cause) {
  std::vector<bool> here(static_cast<size_t>(size_));
  for (const HostPlace* place : host_places_) here[static_cast<size_t>(place->world_rank.load())] = true;
  std::string text = std::to_string(failed) + " " + cause;
  for (int r = 0; r < size_; ++r) {
    MPI_Request request = MPI_REQUEST_NULL;
    if (!here[static_cast<size_t>(r)])
      MPI_Isend(text.data(), static_cast<int>(text.size()), MPI_CHAR, r, kAlarmTag, alarm_, &request);
  }
  for (int i = 0; i < 20; ++i) {  // time for MPI to send
    int flag = 0;
    MPI_Iprobe(MPI_ANY_SOURCE, kAlarmTag, alarm_, &flag, MPI_STATUS_IGNORE);
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
}

void MpiWorld::poll_other_hosts() {
  int flag = 0;
  MPI_Status status;
  if (MPI_Iprobe(MPI_ANY_SOURCE, kAlarmTag, alarm_, &flag, &status) != MPI_SUCCESS || !flag) return;
  int size = 0;
  MPI_Get_count(&status, MPI_CHAR, &size);
  std::string text(static_cast<size_t>(size), ' ');
  if (MPI_Recv(text.data(), size, MPI_CHAR, status.MPI_SOURCE, kAlarmTag, alarm_, MPI_STATUS_IGNORE) != MPI_SUCCESS)
    return;
  const size_t space = text.find(' ');
  failure_state().fail(std::stoi(text.substr(0, space)), text.substr(space + 1));
}

namespace {

std::string shown(const LaunchOptions& o, const std::string& cause) { return o.shown ? o.shown(cause) : cause; }

// Only the first failed rank reports the cause.
[[noreturn]] void leave(MpiWorld& world, const std::string& cause, Status status) {
  if (!world.failure_state().fail(world.rank(), cause)) world.wait_for_abort(cause);
  world.abort(cause, static_cast<int>(status));
}

void run(const LaunchOptions& o, const std::function<void(Communicator&)>& body,
         const std::shared_ptr<MpiWorld>& world) {
  try {
    run_process(o, std::make_unique<MpiTransport>(world, world->all()), world->local_world_size(), body);
  } catch (const PeerFailed& e) {
    if (world->failure_state().is_silent()) world->abort(e.what(), static_cast<int>(e.status()));
    world->wait_for_abort(e.what());
  } catch (const Error& e) {
    leave(*world, shown(o, e.what()), e.status());
  }
}

// A rank that fails during setup ends the job, because the others wait for it inside MPI.
std::shared_ptr<MpiWorld> connect_ranks(const LaunchOptions& o) {
  const std::jthread alarm = start_alarm(o.timeout_s, "connecting the ranks");
  try {
    return std::make_shared<MpiWorld>(o.timeout_s, o.threads_per_rank);
  } catch (const Error& e) {
    end_mpi_job(shown(o, e.what()), static_cast<int>(e.status()));
  } catch (const std::exception& e) {
    end_mpi_job(failure_cause(e), static_cast<int>(Status::communication));
  }
}

}  // namespace

void launch_under_mpi(const LaunchOptions& o, const std::function<void(Communicator&)>& body) {
  const MpiSession session(o.timeout_s);
  const std::shared_ptr<MpiWorld> world = connect_ranks(o);
  const int threads_before = cpu::threads();
  if (o.ranks > 1 && o.ranks != world->size())
    leave(*world,
          shown(o, "`ranks`: expected the size of the MPI job, " + std::to_string(world->size()) + ", got " +
                       std::to_string(o.ranks)),
          Status::usage);
  cpu::set_threads(world->threads_per_rank());
  run(o, body, world);
  world->end();
  cpu::set_threads(threads_before);
}

}  // namespace tessera
