// Signal handler: only sets flags, which Run polls.
#include "train/run/signals.h"

#include <unistd.h>

#include <cstddef>

namespace tessera {
namespace {

static_assert(std::atomic<int>::is_always_lock_free && std::atomic<bool>::is_always_lock_free);
pid_t parent = 0;  // parent process when the object was constructed
std::array<struct sigaction, 4> previous{};

}  // namespace

void SignalRequests::handle(int signal, siginfo_t* info, void*) {
  if (signal == SIGUSR1) {
    save_ = true;
    return;
  }
  // When a launcher dies, the kernel may send the parent-death signal once per launcher thread; only the first counts.
  if (stop_ != 0 && info->si_code == SI_USER && info->si_pid == parent && getppid() != parent) return;
  if (stop_.exchange(signal == SIGHUP ? SIGTERM : signal) == 0) return;
  for (size_t i = 0; i < kSignals.size(); ++i)
    if (kSignals[i] == signal) sigaction(signal, &previous[i], nullptr);
  ::raise(signal);  // delivered when this handler returns
}

SignalRequests::SignalRequests() {
  stop_ = 0;
  save_ = false;
  parent = getppid();
  struct sigaction action {};
  action.sa_sigaction = handle;
  action.sa_flags = static_cast<int>(SA_RESTART | SA_SIGINFO);
  for (size_t i = 0; i < kSignals.size(); ++i) {
    sigaction(kSignals[i], nullptr, &previous[i]);
    if (previous[i].sa_handler != SIG_IGN) sigaction(kSignals[i], &action, nullptr);
  }
}

SignalRequests::~SignalRequests() {
  for (size_t i = 0; i < kSignals.size(); ++i) sigaction(kSignals[i], &previous[i], nullptr);
}

}  // namespace tessera
