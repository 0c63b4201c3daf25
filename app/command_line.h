// From argv to what is to be done.
#pragma once
#include <string>
#include <variant>

#include "app/options.h"

namespace tessera {

// Text to print and leave with status 0 (--help, --version).
struct Print {
  std::string text;
};
using Command =
    std::variant<TrainOptions, VerifyOptions, GenerateOptions, EvaluateOptions, DatasetOptions, BenchOptions,
                 PlanOptions, ReportOptions, CheckpointOptions, ExploreOptions, LabOptions, Print>;

// Throws Error (usage) for an unknown command or option, a missing or wrong value; InputError for an unreadable
// --config.
Command parse_command_line(int argc, const char* const* argv);

}  // namespace tessera
