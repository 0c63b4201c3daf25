// Watching processes through pidfds, which cannot mistake a new process for an old one.
#include "parallel/comm/mpi/watch.h"

#include <poll.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstring>
#include <utility>

#include "parallel/comm/call.h"

namespace tessera {

namespace {

using Clock = std::chrono::steady_clock;
constexpr int kTick_ms = 100;
constexpr auto kToSpeak = std::chrono::milliseconds(400);  // for a rank that waits to see the failure and report it
constexpr auto kToLearn = std::chrono::milliseconds(300);  // from SIGTERM to knowing why it came

std::atomic<int> terminated{0};
struct sigaction before;

void on_terminate(int) { terminated.store(1, std::memory_order_relaxed); }

// Handles SIGTERM as the process would without this watch.
void terminate_as_before() {
  if (before.sa_handler == SIG_IGN) return;
  if (before.sa_handler != SIG_DFL && !(before.sa_flags & SA_SIGINFO)) return before.sa_handler(SIGTERM);
  sigaction(SIGTERM, &before, nullptr);
  kill(getpid(), SIGTERM);
}

bool is_gone(int64_t process) { return kill(static_cast<pid_t>(process), 0) != 0 && errno == ESRCH; }

}  // namespace

MpiWatch::MpiWatch(Options options) : options_(std::move(options)), descriptors_(options_.places.size(), -1) {
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
  if (now.sa_handler == on_terminate) sigaction(SIGTERM, &before, nullptr);  // unless the program has put its own there
  for (const int fd : descriptors_)
    if (fd >= 0) close(fd);
  if (terminated.exchange(0)) terminate_as_before();
}

bool MpiWatch::fail(int world_rank, const std::string& cause, bool silent) {
  HostBoard& board = *options_.board;
  int none = -1;
  if (!board.failed.compare_exchange_strong(none, world_rank)) return none == world_rank;
  board.silent = silent;
  std::strncpy(board.cause.data(), cause.c_str(), board.cause.size() - 1);
  board.written.store(true, std::memory_order_release);
  return true;
}

std::string MpiWatch::failure() const {
  const HostBoard& board = *options_.board;
  for (int i = 0; i < 100 && !board.written.load(std::memory_order_acquire); ++i)
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  if (failed_rank() == kUnknown) return board.cause.data();
  std::string text = "rank " + std::to_string(failed_rank()) + " has failed";
  if (board.written.load(std::memory_order_acquire) && board.cause[0] != 0)
    text += ": " + std::string(board.cause.data());
  return text;
}

MpiWatch::Blocking::Blocking(MpiWatch& watch, std::string what) : watch_(watch) {
  const std::lock_guard lock(watch.mutex_);
  id_ = watch.next_id_++;
  watch.entries_.push_back({id_, std::move(what), Clock::now()});
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
    const int tick = failed_rank() >= 0 || terminated ? 5 : kTick_ms;
    poll(polled.data(), polled.size(), tick);  // ends early when a process does, or on a signal
    look_at_processes();
    if (options_.listen) options_.listen();
    look_at_signal();
    look_at_calls();
    look_at_failure();
  }
}

void MpiWatch::look_at_processes() {
  for (size_t i = 0; i < descriptors_.size(); ++i) {
    const HostPlace& place = *options_.places[i];
    if (place.world_rank == options_.world_rank || place.process == 0) continue;
    pollfd one{descriptors_[i], POLLIN, 0};
    const bool gone = one.fd >= 0 ? poll(&one, 1, 0) > 0 : is_gone(place.process);
    if (!gone) continue;
    if (!place.ended) fail(place.world_rank, "its process " + std::to_string(place.process) + " is gone", true);
    if (one.fd >= 0) close(std::exchange(descriptors_[i], -1));
  }
}

// The launcher ends a job when a rank has died, and a user ends it in the same way. What the program would have done
// comes after a moment in which a death would be seen.
void MpiWatch::look_at_signal() {
  if (!terminated || failed_rank() >= 0) return;
  const auto now = Clock::now();
  if (signal_since_ == Clock::time_point{}) signal_since_ = now;
  if (now - signal_since_ < kToLearn) return;
  terminated = 0;
  signal_since_ = {};
  if (options_.several_hosts && before.sa_handler == SIG_DFL)
    fail(kUnknown, "the launcher ends the job (SIGTERM); a rank of another host may have died", true);
  else
    terminate_as_before();
}

void MpiWatch::look_at_calls() {
  const auto limit = std::chrono::duration<double>(options_.timeout_s);
  std::string late;
  {
    const std::lock_guard lock(mutex_);
    for (const Entry& entry : entries_)
      if (late.empty() && Clock::now() - entry.since > limit) late = entry.what;
  }
  if (late.empty() || !fail(options_.world_rank, late, false)) return;
  options_.abort(late + ": MPI did not end it within " + seconds_text(options_.timeout_s) +
                 "; another rank does not come");
}

// A rank that waits sees the failure itself and reports it, with what it waited for. Another is spoken for here.
void MpiWatch::look_at_failure() {
  if (failed_rank() < 0 || failed_rank() == options_.world_rank) return;
  const auto now = Clock::now();
  if (failed_since_ == Clock::time_point{}) failed_since_ = now;
  if (now - failed_since_ < (culprit_is_silent() ? kToSpeak : 10 * kToSpeak)) return;
  std::string during = "while this rank computed";
  {
    const std::lock_guard lock(mutex_);
    if (!entries_.empty()) during = entries_.back().what;
  }
  options_.abort(during + ": " + failure());
}

}  // namespace tessera
