// The command line as a value: the command and its options.
#pragma once
#include <string>
#include <variant>
#include <vector>

#include "app/options.h"
#include "base/embedded_file.h"

namespace tessera {

// Text to print before exiting with status 0.
struct Print {
  std::string text;
};
using Command =
    std::variant<TrainCommand, VerifyOptions, GenerateOptions, EvaluateOptions, DatasetOptions, BenchOptions,
                 PlanOptions, ReportOptions, CheckpointOptions, AuditOptions, ExploreOptions, LabOptions, Print>;

// Throws Error (usage) for unknown commands and options and for missing or invalid values; InputError for an unreadable
// --config. Messages name fields (with_options()).
Command parse_command_line(int argc, const char* const* argv);

// Footers embedded from app/help/.
namespace help {
const std::vector<EmbeddedFile>& help_files();
}  // namespace help

}  // namespace tessera
