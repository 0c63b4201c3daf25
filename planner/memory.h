// Bytes that a rank holds and sends. Nothing about Tessera's own runs is described: its closed forms and a dry run of
// the step say it (train/expected_bytes.h, train/memory.h). Other programs are described.
#pragma once
#include <optional>
#include <vector>

#include "planner/pipeline.h"
#include "planner/predict.h"
#include "train/job.h"

namespace tessera::planner {

// The job that the case is, when its software is Tessera and trains such a model, with bytes as one of its dtypes and
// optimizers have. Throws FieldError for sizes that Tessera refuses.
std::optional<Job> own_job(const Case& c);
// The description of Tessera training in that dtype.
Software own_software(DType dtype, DType grad_dtype, OptimizerKind optimizer = OptimizerKind::adamw);

// Layers of each stage of the schedule: as even as can be, the later stages more.
std::vector<int64_t> layers_of_stages(const Case& c, int64_t stages);
// Layers of each stage; a job of our own is cut as Tessera cuts it, by FLOPs.
std::vector<int64_t> layer_range(const Case& c, const std::optional<Job>& own);

// Parameters that a rank of a stage has before the data axis shares them out: those of layers (with experts: those
// here), and those before and after the layers.
struct StageParameters {
  double dense = 0, experts = 0;
  double all() const { return dense + experts; }
};
StageParameters stage_parameters(const Case& c, int64_t layers, bool first, bool last);

// Bytes that a layer keeps between forward and backward, of one micro-batch (Korthikanti et al. 2022, equations 1 to 6,
// where attention is unfused and there is dropout).
double kept_by_layer(const Case& c);
// Bytes that wait between I and W, where backward passes are split: what products have read, and the gradients of what
// they gave. Recomputation comes before I.
double kept_for_weights(const Case& c);

// The memory of each pipeline rank; `layers` of each stage.
std::vector<MemoryParts> described_memory(const Case& c, const std::vector<int64_t>& layers,
                                          const PipelineTime& pipeline);
// The memory of each pipeline rank by a dry run, of the peak rank of its ranks. Nothing where one needs more than a
// terabyte.
std::optional<std::vector<MemoryParts>> own_memory(const Job& job);

// Sent in a step by the mean rank, by axis and operation.
Bytes described_bytes(const Case& c);
Bytes own_bytes(const Job& job);

}  // namespace tessera::planner
