// A handler that only sets a flag.
#include "app/signals.h"

#include <csignal>

namespace tessera {
namespace {
volatile std::sig_atomic_t came = 0;  // written by the handler, which may reach nothing but a global
}

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
