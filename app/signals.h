// SIGINT (Ctrl-C), SIGTERM and SIGHUP (treated as SIGTERM) end the program: temporary files are removed, child
// processes are killed, and the exit status is 130 or 143. During the steps of a run the first signal requests a stop
// instead (train/run/signals.h). SIGUSR1 is ignored outside a run. SIGBUS from a truncated mapped file ends the program
// with status 4.
#pragma once

namespace tessera {

// Records whether SIGHUP is ignored. Must run before libraries are initialized, because UCX (part of Open MPI 5)
// installs its debugger for SIGHUP.
void record_hangup_action();
// Ignores SIGPIPE and SIGXFSZ, so that a closed output or a file size limit becomes a write error. An ignored SIGHUP
// (nohup) stays ignored.
void watch_signals();

}  // namespace tessera
