// The program as a function, for main() and tests.
#pragma once

namespace tessera {

// Prints errors on standard error and converts them to the exit status.
int run_program(int argc, const char* const* argv);

}  // namespace tessera
