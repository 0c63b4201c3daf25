// Memory and communication volume of a rank: closed forms and a dry run (train/expected_bytes.h, train/memory.h) for
// Tessera's runs, the description (Software) for other frameworks.
#pragma once
#include <cstdint>
#include <optional>
#include <vector>

#include "planner/pipeline.h"
#include "planner/predict.h"
#include "train/config.h"

namespace tessera::planner {

// The equivalent job; nullopt unless the software is Tessera, supports the model, and has a dtype and optimizer with
// these bytes per parameter. Throws FieldError for sizes that Tessera rejects.
std::optional<TrainConfig> own_job(const Case& c);
Software own_software(DType dtype, DType grad_dtype, OptimizerKind optimizer = OptimizerKind::adamw);

// An even split; remainders go to the later stages.
std::vector<int64_t> layers_of_stages(const Case& c, int64_t stages);
// The FLOP-balanced split of a Tessera job, otherwise an even split.
std::vector<int64_t> layer_range(const Case& c, const std::optional<TrainConfig>& own);

// Parameters of a stage's rank before sharding over the data axis: layers (with local experts), embeddings and head.
struct StageParameters {
  double dense = 0, experts = 0;
  double all() const { return dense + experts; }
};
StageParameters stage_parameters(const Case& c, int64_t layers, bool first, bool last);

// Bytes saved by a layer for backward, per micro-batch. With unfused attention and dropout: Korthikanti et al. 2022,
// equations 1 to 6.
double saved_by_layer(const Case& c);
// Bytes saved by a layer between I and W of a split backward pass, after recomputation: inputs of matmuls and gradients
// of their outputs.
double saved_for_weight_pass(const Case& c);

// Memory per pipeline rank, from Software; `layers` per stage.
std::vector<MemoryParts> described_memory(const Case& c, const std::vector<int64_t>& layers,
                                          const PipelineTime& pipeline);
// Per pipeline rank, by a dry run: the peak over the ranks of its stages. nullopt if a rank exceeds a terabyte.
std::optional<std::vector<MemoryParts>> own_memory(const TrainConfig& job);

// Bytes sent per step by axis and operation, averaged over ranks.
Bytes described_bytes(const Case& c);
Bytes own_bytes(const TrainConfig& job);

}  // namespace tessera::planner
