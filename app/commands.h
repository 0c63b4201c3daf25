// The commands. Each returns the exit status; failures are thrown.
#pragma once
#include "app/options.h"

namespace tessera {

int run_train(const TrainOptions& options);
int run_verify(const VerifyOptions& options);
int run_generate(const GenerateOptions& options);
int run_evaluate(const EvaluateOptions& options);
int run_data(const DatasetOptions& options);
int run_bench(const BenchOptions& options);
int run_plan(const PlanOptions& options);
int run_report(const ReportOptions& options);
int run_checkpoint(const CheckpointOptions& options);
int run_explore(const ExploreOptions& options);
int run_lab(const LabOptions& options);

// The whole program: parses, runs, and turns what is thrown into one line on standard error and the exit status.
int run_program(int argc, const char* const* argv);

}  // namespace tessera
