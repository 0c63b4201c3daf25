// Signals that a program passes to its runs:
//
//   const SignalRequests signals;
//   ... launch(..., [&](Communicator& world) { Run run(...); run.train(); });
//   return signals.stop() ? signals.exit_status() : 0;
//
// SIGINT (Ctrl-C), SIGTERM and SIGHUP stop a run after the current step, or between two passes of a validation; it
// saves and can be resumed. A second signal has its original effect, by default the termination of the program. SIGUSR1
// requests a checkpoint after the step. It suffices that one process receives the signal: ranks agree on requests.
#pragma once

#include <array>
#include <atomic>
#include <csignal>

#include "base/error.h"

namespace tessera {

class SignalRequests : NotCopied {
 public:
  // Signals that are ignored (nohup) stay ignored. At most one object exists at a time.
  SignalRequests();
  // Restores the previous actions.
  ~SignalRequests();

  // The signal that requested a stop since the last object was constructed: SIGINT, SIGTERM (also for SIGHUP), or 0.
  static int stop() { return stop_; }
  // Returns true once per SIGUSR1, to whichever thread calls first.
  static bool take_save() { return save_.exchange(false); }
  // 128 + the signal number, or 128 + SIGTERM if only a process of another rank received a signal.
  static int exit_status() { return 128 + (stop_ != 0 ? stop_.load() : SIGTERM); }

 private:
  static void handle(int signal, siginfo_t* info, void*);
  static inline std::atomic<int> stop_{0};
  static inline std::atomic<bool> save_{false};
  static constexpr std::array<int, 4> kSignals = {SIGINT, SIGTERM, SIGHUP, SIGUSR1};
};

}  // namespace tessera
