// The entry point: everything else is in app/, so that tests can link it.
#include <sys/auxv.h>
#include <unistd.h>

#include "app/commands.h"
#include "app/signals.h"

namespace {

// GNU's OpenMP lets a thread that waits for its team spin for some 10 ms before it sleeps. Beside other programs it
// then keeps the core from those that it waits for, and all is ten times slower. How long is read from the environment
// when the library is loaded: a program that was not told begins once more and says it. Where it cannot, all goes on as
// it was.
void begin_with_short_waits(int, char** words, char** environment) {
  const auto says = [](const std::string_view line) {
    return line.starts_with("GOMP_SPINCOUNT=") || line.starts_with("OMP_WAIT_POLICY=");
  };
  static std::array<char*, 4096> more;
  static char spins[] = "GOMP_SPINCOUNT=1000";  // some 30 us, in which most teams meet
  size_t n = 0;
  for (; environment[n] != nullptr; ++n)
    if (n + 2 >= more.size() || says(environment[n])) return;
  *std::copy_n(environment, n, more.begin()) = spins;
  const auto program = getauxval(AT_EXECFN);
  if (program != 0) execve(reinterpret_cast<const char*>(program), words, more.data());
}

// Before the libraries are initialised. Here, since a shared library (bench/pack.sh) may not have such a section.
[[gnu::section(".preinit_array"), gnu::used]] void (*const begin)(int, char**, char**) = begin_with_short_waits;
[[gnu::section(".preinit_array"), gnu::used]] void (*const before_libraries)() = tessera::look_at_hangup;

}  // namespace

int main(int argc, char** argv) { return tessera::run_program(argc, argv); }
