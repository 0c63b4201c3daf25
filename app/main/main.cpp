// The entry point; everything else is in app/, which tests can link.
#include <sys/auxv.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <string_view>

#include "app/program.h"
#include "app/signals.h"

namespace {

// By default, a waiting GNU OpenMP thread spins for about 10 ms before it sleeps. On shared cores the program becomes
// ten times slower, because the spinning thread occupies the core of the thread it waits for. The library reads the
// spin count from the environment when it is loaded, so the program sets it and executes itself again. If exec fails,
// the program continues unchanged.
void limit_openmp_spinning(int, char** args, char** environment) {
  const auto sets_waiting = [](const std::string_view line) {
    return line.starts_with("GOMP_SPINCOUNT=") || line.starts_with("OMP_WAIT_POLICY=");
  };
  static std::array<char*, 4096> more;
  static char spins[] = "GOMP_SPINCOUNT=1000";  // about 30 us, enough for most barriers
  size_t n = 0;
  for (; environment[n] != nullptr; ++n)
    if (n + 2 >= more.size() || sets_waiting(environment[n])) return;
  *std::copy_n(environment, n, more.begin()) = spins;
  const auto program = getauxval(AT_EXECFN);
  if (program != 0) execve(reinterpret_cast<const char*>(program), args, more.data());
}

// Runs before libraries are initialized. Defined here because a shared library (bench/pack.sh) cannot contain
// .preinit_array.
[[gnu::section(".preinit_array"), gnu::used]] void (*const begin)(int, char**, char**) = limit_openmp_spinning;
[[gnu::section(".preinit_array"), gnu::used]] void (*const before_libraries)() = tessera::record_hangup_action;

}  // namespace

int main(int argc, char** argv) { return tessera::run_program(argc, argv); }
