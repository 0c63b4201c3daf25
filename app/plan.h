// The parallel plan that the options mean: how many ranks, how they are started, and what each does of a step.
#pragma once
#include "app/options.h"
#include "optim/optimizer.h"
#include "parallel/comm/launch.h"
#include "parallel/data_strategy.h"

namespace tessera {

DType dtype_named(const std::string& name);  // "fp32", "bf16", "fp64"

// What carries bytes: --backend, or MPI where its launcher started this process.
Backend backend_of(const TrainOptions& options);
// Data-parallel ranks: those of an MPI job, --ranks, --dp, or, when neither is given, two where the machine and the
// batch allow it.
int64_t ranks_of(const TrainOptions& options);
// Throws Error (usage) for a plan that cannot be, with the nearest values that can.
void check_plan(const TrainOptions& options);

LaunchOptions launch_options(const TrainOptions& options);
DataOptions data_options(const TrainOptions& options);
// With --offload the state lies in a file of its own for each call.
OptimizerOptions optimizer_options(const TrainOptions& options);
// For people: "2 thread ranks, ddp", "one rank".
std::string describe_plan(const TrainOptions& options);

}  // namespace tessera
