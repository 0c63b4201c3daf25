// A handler that sets flags, and a thread that it wakes to end the program.
#include "app/signals.h"

#include <semaphore.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <csignal>
#include <thread>

#include "data/files.h"
#include "data/process.h"
#include "tensor/error.h"

namespace tessera {
namespace {

// Written by the handler on whichever thread it runs.
std::atomic<int> came{0};
std::atomic<bool> steps_in_hand{false}, save_requested{false};
static_assert(std::atomic<int>::is_always_lock_free && std::atomic<bool>::is_always_lock_free);
std::atomic<const char*> cut_file{nullptr};
sem_t ending;
pid_t parent = 0;  // the parent process when the program started

bool hangup_is_ignored = false;  // when the program was started, as nohup asks

void handle(int signal, siginfo_t* info, void*) {
  if (signal == SIGUSR1) {
    save_requested = true;
    return;
  }
  // A launcher's death is said once for each of its threads that the run is handed on to.
  if (came != 0 && info->si_code == SI_USER && info->si_pid == parent && getppid() != parent) return;
  const bool first = came.exchange(signal == SIGHUP ? SIGTERM : signal) == 0;
  const int error = errno;
  if (!first || !steps_in_hand) sem_post(&ending);
  errno = error;
}

// A file was cut short while a thread reads it where it is mapped: that thread can do nothing more.
void handle_bus_error(int, siginfo_t* info, void*) {
  const char* const file = mapped_file_at(info->si_addr);
  if (file == nullptr) {
    std::signal(SIGBUS, SIG_DFL);  // the reading is tried again, and ends the process
    return;
  }
  cut_file = file;
  sem_post(&ending);
  for (;;) pause();
}

// Not from the handlers: what it would wait for may be held by the thread that it interrupted.
void end_program() {
  while (sem_wait(&ending) != 0) {
  }
  for (const int signal : {SIGINT, SIGTERM, SIGHUP}) std::signal(signal, SIG_DFL);  // should this last too long
  kill_running_programs();
  remove_temporaries();
  const char* const file = cut_file;
  const std::string cause = file != nullptr  ? std::string(file) + " was cut short while it was read"
                            : came == SIGINT ? "interrupted (SIGINT)"
                                             : "terminated (SIGTERM)";
  const std::string line = "tessera: " + one_line(cause) + "\n";
  [[maybe_unused]] const ssize_t written = ::write(STDERR_FILENO, line.data(), line.size());
  _exit(file != nullptr ? static_cast<int>(Status::input) : status_of_interruption());
}

void on(int signal) {
  struct sigaction action {};
  action.sa_sigaction = handle;
  action.sa_flags = static_cast<int>(SA_RESTART | SA_SIGINFO);
  sigaction(signal, &action, nullptr);
}

}  // namespace

void look_at_hangup() {
  struct sigaction hangup {};
  sigaction(SIGHUP, nullptr, &hangup);
  hangup_is_ignored = hangup.sa_handler == SIG_IGN;
}

void watch_signals() {
  sem_init(&ending, 0, 0);
  parent = getppid();
  // Signals are for the other threads: this one must come to its end.
  sigset_t all, before;
  sigfillset(&all);
  sigdelset(&all, SIGBUS);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  std::thread(end_program).detach();
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  for (const int signal : {SIGINT, SIGTERM, SIGUSR1, SIGHUP}) on(signal);
  struct sigaction bus {};
  bus.sa_sigaction = handle_bus_error;
  bus.sa_flags = static_cast<int>(SA_SIGINFO);
  sigaction(SIGBUS, &bus, nullptr);
  if (hangup_is_ignored) std::signal(SIGHUP, SIG_IGN);
  std::signal(SIGPIPE, SIG_IGN);
  std::signal(SIGXFSZ, SIG_IGN);
}

int interrupted() { return came; }
int status_of_interruption() { return 128 + (came != 0 ? came.load() : SIGTERM); }
bool take_save_request() { return save_requested.exchange(false); }

GracefulStopScope::GracefulStopScope() { steps_in_hand = true; }
GracefulStopScope::~GracefulStopScope() { steps_in_hand = false; }

}  // namespace tessera
