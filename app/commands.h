// The commands; each returns the exit status.
#pragma once

#include "app/options.h"

namespace tessera {

int run(const TrainCommand& command);
int run(const VerifyOptions& options);
int run(const GenerateOptions& options);
int run(const EvaluateOptions& options);
int run(const DatasetOptions& options);
int run(const BenchOptions& options);
int run(const PlanOptions& options);
int run(const ReportOptions& options);
int run(const CheckpointOptions& options);
int run(const AuditOptions& options);
int run(const ExploreOptions& options);
int run(const LabOptions& options);

}  // namespace tessera
