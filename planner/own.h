// Tessera's own runs: nothing about them is described, its own closed forms and a dry run of the step say it.
#pragma once
#include <optional>
#include <vector>

#include "planner/described.h"
#include "train/job.h"

namespace tessera::planner {

// The job that the case is, when its software is Tessera and trains such a model, with bytes as one of its dtypes and
// optimizers have. Throws FieldError for sizes that Tessera refuses.
std::optional<Job> own_job(const Case& c);
// The description of Tessera training in that dtype.
Software own_software(DType dtype, DType grad_dtype, OptimizerKind optimizer = OptimizerKind::adamw);

std::vector<int64_t> own_layers(const Job& job);
// Of each pipeline rank, the fullest of its ranks. Nothing where one needs more than a terabyte.
std::optional<std::vector<MemoryParts>> own_memory(const Job& job);
Bytes own_bytes(const Job& job);

}  // namespace tessera::planner
