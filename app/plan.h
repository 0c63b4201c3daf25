// The parallel plan that the options mean: how ranks are started, and what each does of a step.
#pragma once
#include "app/axes.h"
#include "app/options.h"
#include "optim/optimizer.h"
#include "parallel/comm/launch.h"
#include "parallel/data_strategy.h"
#include "parallel/pipeline/schedule.h"

namespace tessera {

DType dtype_named(const std::string& name);  // "fp32", "bf16", "fp64"

// What ranks are, threads or processes under MPI: what --backend says, or what started this process.
Backend backend_of(const TrainOptions& options);
// Whether each rank has a GPU of its own and their arrays go over NCCL.
bool uses_nccl(const TrainOptions& options);
int64_t ranks_of(const TrainOptions& options);
// True of a plan that sums inside a product or a softmax, and so agrees with one rank to rounding, not to the bit; and
// of attention by cuDNN, which does not say that a row has the same bits in another batch.
bool splits_sums(const TrainOptions& options);
// Throws Error (usage) for a plan that cannot be, with the nearest values that can.
void check_plan(const TrainOptions& options);

// What the pipeline does, not yet lowered. Throws what make_schedule() throws.
Schedule schedule_of(const TrainOptions& options);
LaunchOptions launch_options(const TrainOptions& options);
DataOptions data_options(const TrainOptions& options);
// With --offload the state lies elsewhere (offload_arena()), in a place of its own for each call.
OptimizerOptions optimizer_options(const TrainOptions& options);
// For people: "2 thread ranks, ddp", "one rank".
std::string describe_plan(const TrainOptions& options);

}  // namespace tessera
