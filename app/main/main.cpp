// The entry point: everything else is in app/, so that tests can link it.
#include "app/commands.h"

int main(int argc, char** argv) { return tessera::run_program(argc, argv); }
