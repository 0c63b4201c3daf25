// The command `data` and its help.
#pragma once
#include "app/options.h"
#include "tensor/findings.h"

namespace CLI {  // NOLINT(readability-identifier-naming): CLI11's
class App;
}

namespace tessera {

void add_data(CLI::App& app, DatasetOptions& options, Findings& wrong);

}  // namespace tessera
