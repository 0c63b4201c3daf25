// The signal handler sets flags and wakes a thread that ends the program.
#include "app/signals.h"

#include <semaphore.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <csignal>
#include <string>
#include <thread>

#include "base/error.h"
#include "base/files.h"
#include "base/process.h"

namespace tessera {
namespace {

std::atomic<int> received{0};
static_assert(std::atomic<int>::is_always_lock_free);
std::atomic<const char*> cut_file{nullptr};
sem_t ending;

bool hangup_is_ignored = false;  // at program start, as set by nohup

void handle(int signal) {
  if (signal == SIGUSR1) return;
  received = signal == SIGHUP ? SIGTERM : signal;
  const int error = errno;
  sem_post(&ending);
  errno = error;
}

// A mapped file was truncated during a read, so the reading thread cannot continue.
void handle_bus_error(int, siginfo_t* info, void*) {
  const char* const file = mapped_file_at(info->si_addr);
  if (file == nullptr) {
    std::signal(SIGBUS, SIG_DFL);  // the faulting instruction is retried and ends the process
    return;
  }
  cut_file = file;
  sem_post(&ending);
  for (;;) pause();
}

// Runs outside of the handlers, because the interrupted thread may hold locks that this function needs.
void end_program() {
  while (sem_wait(&ending) != 0) {
  }
  for (const int signal : {SIGINT, SIGTERM, SIGHUP}) std::signal(signal, SIG_DFL);  // in case cleanup hangs
  kill_running_programs();
  remove_temporaries();
  const char* const file = cut_file;
  const std::string cause = file != nullptr      ? std::string(file) + " was truncated while it was being read"
                            : received == SIGINT ? "interrupted (SIGINT)"
                                                 : "terminated (SIGTERM)";
  const std::string line = "tessera: " + one_line(cause) + "\n";
  [[maybe_unused]] const ssize_t written = ::write(STDERR_FILENO, line.data(), line.size());
  _exit(file != nullptr ? static_cast<int>(Status::input) : 128 + received);
}

void on(int signal) {
  struct sigaction action {};
  action.sa_handler = handle;
  action.sa_flags = SA_RESTART;
  sigaction(signal, &action, nullptr);
}

}  // namespace

void record_hangup_action() {
  struct sigaction hangup {};
  sigaction(SIGHUP, nullptr, &hangup);
  hangup_is_ignored = hangup.sa_handler == SIG_IGN;
}

void watch_signals() {
  sem_init(&ending, 0, 0);
  // Other threads receive all signals, so that this one is never interrupted.
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

}  // namespace tessera
