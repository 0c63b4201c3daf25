// The commands with files of their own. Each returns the exit status; failures are thrown.
#pragma once
#include <string>
#include <variant>

#include "app/options.h"

namespace tessera {

int run_train(const TrainOptions& options);
int run_verify(const VerifyOptions& options);
int run_generate(const GenerateOptions& options);
int run_evaluate(const EvaluateOptions& options);
int run_plan(const PlanOptions& options);
int run_report(const ReportOptions& options);
int run_checkpoint(const CheckpointOptions& options);
int run_explore(const ExploreOptions& options);

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

}  // namespace tessera
