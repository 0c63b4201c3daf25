// The effects of signals.
//
// SIGINT (Ctrl-C), SIGTERM and SIGHUP, which counts as SIGTERM, end the program at once: what it was writing is
// removed, what it has started is killed, and the status is 130 or 143. While a run makes its steps (GracefulStopScope)
// the first only asks for an end, which the run comes to after the step in hand; the second ends it. SIGUSR1 asks a run
// to save, and is nothing to others. SIGBUS, of a file that was cut short while it is mapped, ends the program with
// status 4.
#pragma once

namespace tessera {

// Notes whether SIGHUP is ignored, for watch_signals(). To be called before the libraries are initialised: UCX, which
// Open MPI 5 brings, takes SIGHUP for its debugger.
void look_at_hangup();
// Installs the handlers, and ignores SIGPIPE and SIGXFSZ, so that a closed output or a file size limit is an error of
// the write and not a silent end. A SIGHUP that was ignored (nohup) still is.
void watch_signals();
// SIGINT or SIGTERM when one has come, else 0.
int interrupted();
// 128 + the signal, SIGTERM where another rank's process got it.
int status_of_interruption();
// True once for each time that SIGUSR1 came, on one of the threads that ask.
bool take_save_request();

class GracefulStopScope {
 public:
  GracefulStopScope();
  ~GracefulStopScope();
  GracefulStopScope(const GracefulStopScope&) = delete;
  GracefulStopScope& operator=(const GracefulStopScope&) = delete;
};

}  // namespace tessera
