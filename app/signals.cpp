// A handler that only sets a flag.
#include "app/signals.h"

#include <atomic>
#include <csignal>

namespace tessera {
namespace {
std::atomic<int> came{0};  // written by the handler on whichever thread it runs, read by every rank
static_assert(std::atomic<int>::is_always_lock_free);
}  // namespace

void watch_signals() {
  struct sigaction on {};
  on.sa_handler = [](int signal) { came = signal; };
  on.sa_flags = static_cast<int>(SA_RESETHAND) | SA_RESTART;
  sigaction(SIGINT, &on, nullptr);
  sigaction(SIGTERM, &on, nullptr);
  std::signal(SIGPIPE, SIG_IGN);
  std::signal(SIGXFSZ, SIG_IGN);
}

int interrupted() { return came; }

}  // namespace tessera
