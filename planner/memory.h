// Memory and communication volume of a rank. For Tessera's own runs they come from its closed forms and a dry run of
// the step (train/expected_bytes.h, train/memory.h), for other frameworks from their description (Software).
#pragma once
#include <optional>
#include <vector>

#include "planner/pipeline.h"
#include "planner/predict.h"
#include "train/config.h"

namespace tessera::planner {

// The job equivalent to the case; nullopt unless the software is Tessera, supports the model, and has a dtype and
// optimizer with these bytes per parameter. Throws FieldError for sizes that Tessera rejects.
std::optional<Job> own_job(const Case& c);
// The description of Tessera training in `dtype`.
Software own_software(DType dtype, DType grad_dtype, OptimizerKind optimizer = OptimizerKind::adamw);

// Layers of each stage: split evenly, remainders to the later stages.
std::vector<int64_t> layers_of_stages(const Case& c, int64_t stages);
// Layers of each stage; for a Tessera job the split of the run, balanced by FLOPs.
std::vector<int64_t> layer_range(const Case& c, const std::optional<Job>& own);

// Parameters of a rank of a stage before sharding over the data axis: layers (with local experts), embeddings and head.
struct StageParameters {
  double dense = 0, experts = 0;
  double all() const { return dense + experts; }
};
StageParameters stage_parameters(const Case& c, int64_t layers, bool first, bool last);

// Bytes that a layer saves for backward, per micro-batch. With unfused attention and dropout: Korthikanti et al. 2022,
// equations 1 to 6.
double saved_by_layer(const Case& c);
// Bytes that a layer saves between I and W of a split backward pass: inputs of matmuls and gradients of their outputs.
// Recomputation precedes I.
double saved_for_weight_pass(const Case& c);

// Memory of each pipeline rank by description; `layers` per stage.
std::vector<MemoryParts> described_memory(const Case& c, const std::vector<int64_t>& layers,
                                          const PipelineTime& pipeline);
// Memory of each pipeline rank by a dry run: the peak over the ranks of its stages. nullopt if a rank exceeds a
// terabyte.
std::optional<std::vector<MemoryParts>> own_memory(const Job& job);

// Bytes sent per step, averaged over ranks, by axis and operation.
Bytes described_bytes(const Case& c);
Bytes own_bytes(const Job& job);

}  // namespace tessera::planner
