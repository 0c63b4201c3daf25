// The command `report` and its help.
#pragma once
#include "app/options.h"
#include "tensor/findings.h"

namespace CLI {  // NOLINT(readability-identifier-naming): CLI11's
class App;
}

namespace tessera {

void add_report(CLI::App& app, ReportOptions& options, Findings& wrong);

}  // namespace tessera
