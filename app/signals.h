// Ctrl-C and SIGTERM: the first asks the program to stop after the step in hand, a second ends it at once.
#pragma once

namespace tessera {

// Installs the handlers, and ignores SIGPIPE and SIGXFSZ, so that a closed output or a file size limit is an error of
// the write and not a silent end.
void watch_signals();
// SIGINT or SIGTERM when one has come, else 0.
int interrupted();

}  // namespace tessera
