// The command line as a value: the command and its options.
#pragma once
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "app/options.h"

namespace tessera {

// Text to print before exiting with status 0.
struct Print {
  std::string text;
};
using Command =
    std::variant<TrainCommand, VerifyOptions, GenerateOptions, EvaluateOptions, DatasetOptions, BenchOptions,
                 PlanOptions, ReportOptions, CheckpointOptions, ExploreOptions, LabOptions, Print>;

// Throws Error (usage) for unknown commands and options and for missing or invalid values; InputError for an unreadable
// --config.
Command parse_command_line(int argc, const char* const* argv);

// Footers embedded from app/help/.
namespace help {
struct File {
  std::string_view name, text;
};
const std::vector<File>& help_files();
}  // namespace help

}  // namespace tessera
