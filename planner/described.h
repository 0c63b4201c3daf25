// Bytes that a rank holds and sends, from the description of a program.
#pragma once
#include <map>
#include <string>
#include <vector>

#include "planner/predict.h"

namespace tessera::planner {

// Layers of each stage of the schedule: as even as can be, the later stages more.
std::vector<int64_t> layers_of_stages(const Case& c, int64_t stages);

// Parameters that a rank of a stage has before the data axis shares them out: of layers (with experts: those here) and
// of what stands before and after them.
struct StageParameters {
  double dense = 0, experts = 0;
  double all() const { return dense + experts; }
};
StageParameters parameters_of(const Case& c, int64_t layers, bool first, bool last);

// Bytes that a layer keeps between forward and backward, of one micro-batch (Korthikanti et al. 2022, equations 1 to 6,
// where attention is unfused and there is dropout).
double kept_by_layer(const Case& c);

// Of each pipeline rank. `in_flight`: micro-batches times stages that each has at most.
std::vector<MemoryParts> described_memory(const Case& c, const std::vector<int>& in_flight);

using Bytes = std::map<std::string, std::map<std::string, double>>;
// Sent in a step by the mean rank, by axis and operation.
Bytes described_bytes(const Case& c);

}  // namespace tessera::planner
