// The entry point: everything else is in app/, so that tests can link it.
#include "app/commands.h"
#include "app/signals.h"

// Before the libraries are initialised. Here, since a shared library (bench/pack.sh) may not have such a section.
[[gnu::section(".preinit_array"), gnu::used]] static void (*const before_libraries)() = tessera::look_at_hangup;

int main(int argc, char** argv) { return tessera::run_program(argc, argv); }
