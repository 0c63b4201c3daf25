// What each rank of a plan saves of a run's tensors, and nothing else: a checkpoint's parts.
#pragma once
#include <string>
#include <vector>

#include "nn/parameter.h"
#include "train/job.h"

namespace tessera {

// What one rank's file has of a tensor: `count` elements from the one at `begin` on, of what its layout keeps.
struct SavedPart {
  std::string name;  // of the tensor: "blocks.0.mlp.up.weight.m"
  Shape whole = {};
  ShardSpec shard = {};  // without the axis
  int64_t begin = 0, count = 0;
};
// What a run under this plan saves on each rank, and nothing else; one entry for each rank of the plan. `state`: of the
// optimizer, else of the parameters. From sizes alone, without memory. Throws FieldError for ps-async.
std::vector<std::vector<SavedPart>> parts_of_ranks(const Job& job, bool state);

}  // namespace tessera
