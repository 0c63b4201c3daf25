// The commands; each returns the exit status.
#pragma once
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "app/options.h"
#include "base/embedded_file.h"

namespace tessera {

int run(const TrainOptions& options);
int run(const VerifyOptions& options);
int run(const GenerateOptions& options);
int run(const EvaluateOptions& options);
int run(const PlanOptions& options);
int run(const ReportOptions& options);
int run(const CheckpointOptions& options);
int run(const ExploreOptions& options);

// Prints errors on standard error and converts them to the exit status.
int run_program(int argc, const char* const* argv);

// Text to print before exiting with status 0.
struct Print {
  std::string text;
};
using Command =
    std::variant<TrainOptions, VerifyOptions, GenerateOptions, EvaluateOptions, DatasetOptions, BenchOptions,
                 PlanOptions, ReportOptions, CheckpointOptions, ExploreOptions, LabOptions, Print>;

// Throws Error (usage) for unknown commands and options and for missing or invalid values; InputError for an unreadable
// --config.
Command parse_command_line(int argc, const char* const* argv);

// Footers embedded from app/help/.
namespace help {
const std::vector<EmbeddedFile>& help_files();
}  // namespace help

}  // namespace tessera
