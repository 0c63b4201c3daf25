// The commands with files of their own. Each returns the exit status; failures are thrown.
#pragma once
#include "app/options.h"

namespace tessera {

int run(const TrainOptions& options);
int run(const VerifyOptions& options);
int run(const GenerateOptions& options);
int run(const EvaluateOptions& options);
int run(const PlanOptions& options);
int run(const ReportOptions& options);
int run(const CheckpointOptions& options);
int run(const ExploreOptions& options);

// The whole program: parses, runs, and turns what is thrown into one line on standard error and the exit status.
int run_program(int argc, const char* const* argv);

// From argv to what is to be done.

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

// Texts behind the options of commands, as the build found them in app/help/.
namespace help {
struct File {
  std::string_view name, text;
};
const std::vector<File>& help_files();
}  // namespace help

}  // namespace tessera
