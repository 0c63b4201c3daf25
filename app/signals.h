// SIGINT (Ctrl-C), SIGTERM and SIGHUP (treated as SIGTERM) end the program: temporary files are removed, child
// processes are killed, and the exit status is 130 or 143. During the steps of a run (GracefulStopScope), the first
// signal requests a stop after the current step, and the second ends the program immediately. SIGUSR1 requests a
// checkpoint; other commands ignore it. SIGBUS from a truncated mapped file ends the program with status 4.
#pragma once

namespace tessera {

// Records whether SIGHUP is ignored. Must run before libraries are initialized, because UCX (part of Open MPI 5)
// installs its debugger for SIGHUP.
void record_hangup_action();
// Ignores SIGPIPE and SIGXFSZ, so that a closed output or a file size limit becomes a write error. An ignored SIGHUP
// (nohup) stays ignored.
void watch_signals();
// The received signal: SIGINT, SIGTERM, or 0.
int interrupted();
// 128 + the signal number; SIGTERM's if another rank's process received the signal.
int status_of_interruption();
// Returns true to one calling thread per SIGUSR1.
bool take_save_request();

class GracefulStopScope {
 public:
  GracefulStopScope();
  ~GracefulStopScope();
  GracefulStopScope(const GracefulStopScope&) = delete;
  GracefulStopScope& operator=(const GracefulStopScope&) = delete;
};

}  // namespace tessera
