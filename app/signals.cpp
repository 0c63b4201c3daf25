// A handler that sets flags, and a thread that it wakes to end the program.
#include "app/signals.h"

#include <semaphore.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <csignal>
#include <string>
#include <thread>

#include "data/process.h"
#include "tensor/temporary.h"

namespace tessera {
namespace {

// Written by the handler on whichever thread it runs.
std::atomic<int> came{0};
std::atomic<bool> steps_in_hand{false}, save_requested{false};
static_assert(std::atomic<int>::is_always_lock_free && std::atomic<bool>::is_always_lock_free);
sem_t ending;

void handle(int signal) {
  if (signal == SIGUSR1) {
    save_requested = true;
    return;
  }
  const bool first = came.exchange(signal == SIGHUP ? SIGTERM : signal) == 0;
  const int error = errno;
  if (!first || !steps_in_hand) sem_post(&ending);
  errno = error;
}

// Not from the handler: what it would wait for may be held by the thread that it interrupted.
void end_program() {
  while (sem_wait(&ending) != 0) {
  }
  for (const int signal : {SIGINT, SIGTERM, SIGHUP}) std::signal(signal, SIG_DFL);  // should this last too long
  kill_running_programs();
  remove_temporaries();
  const std::string line = came == SIGINT ? "tessera: interrupted (SIGINT)\n" : "tessera: terminated (SIGTERM)\n";
  [[maybe_unused]] const ssize_t written = ::write(STDERR_FILENO, line.data(), line.size());
  _exit(status_of_interruption());
}

void on(int signal) {
  struct sigaction action {};
  action.sa_handler = handle;
  action.sa_flags = SA_RESTART;
  sigaction(signal, &action, nullptr);
}

}  // namespace

void watch_signals() {
  sem_init(&ending, 0, 0);
  // Signals are for the other threads: this one must come to its end.
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  std::thread(end_program).detach();
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  for (const int signal : {SIGINT, SIGTERM, SIGUSR1}) on(signal);
  struct sigaction hangup {};
  sigaction(SIGHUP, nullptr, &hangup);
  if (hangup.sa_handler != SIG_IGN) on(SIGHUP);
  std::signal(SIGPIPE, SIG_IGN);
  std::signal(SIGXFSZ, SIG_IGN);
}

int interrupted() { return came; }
int status_of_interruption() { return 128 + (came != 0 ? came.load() : SIGTERM); }
bool take_save_request() { return save_requested.exchange(false); }

StepsInHand::StepsInHand() { steps_in_hand = true; }
StepsInHand::~StepsInHand() { steps_in_hand = false; }

}  // namespace tessera
