// What a plan will cost before anybody runs it: time, bytes and memory of a step.
//
//   Case c{.model = shape_of(*preset("llama3-8b")), .layout = {.plan = {.dp = 8, .zero = ZeroStage::three}},
//          .hardware = hardware_named("h100"), .software = software_named("fsdp")};
//   Prediction p = predict(c);     // p.step_s, p.parts.bubble, p.memory[p.fullest].peak(), ...
#pragma once
#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "parallel/pipeline/simulate.h"
#include "planner/hardware.h"
#include "planner/model_shape.h"
#include "planner/software.h"
#include "train/plan.h"

namespace tessera::planner {

struct Layout {
  Plan plan = {};
  int64_t ep = 1;         // ranks that share out experts, cut out of dp x cp
  int64_t sequences = 1;  // of a micro-batch, on one data rank
  int64_t batch() const { return plan.dp * plan.microbatches * sequences; }  // sequences of a step
  bool operator==(const Layout&) const = default;
};

struct Case {
  ModelShape model = {};
  Layout layout = {};
  Hardware hardware = {};
  Software software = {};
};

// Seconds of the slowest rank's step, which add up to step_s. Communication is what is exposed.
struct Parts {
  double compute = 0, recompute = 0, bubble = 0, tp = 0, cp = 0, ep = 0, dp = 0, optimizer = 0;
  double sum() const { return compute + recompute + bubble + tp + cp + ep + dp + optimizer; }
};

// Bytes of one rank at its peak.
struct MemoryParts {
  double parameters = 0, gradients = 0, optimizer = 0, activations = 0, communication = 0, workspace = 0;
  double peak() const { return parameters + gradients + optimizer + activations + communication + workspace; }
};

struct Prediction {
  double step_s = 0, fastest_s = 0, slowest_s = 0;
  double tokens_per_s = 0, mfu = 0, hfu = 0, tflops_per_rank = 0;
  Parts parts = {};
  double bubble = 0;                     // share of the step that the mean rank waits in the pipeline
  std::vector<StageTimes> stages = {};   // of the schedule: what simulate() draws
  double message_s = 0;                  // between stages, beside what their times have of it
  std::vector<MemoryParts> memory = {};  // of each pipeline rank
  size_t fullest = 0;                    // of them
  bool fits = true;
  double over_bytes = 0;     // of the fullest rank, over the memory that there is
  std::string largest = {};  // its largest category
  std::map<std::string, std::map<std::string, double>> bytes = {};  // axis, operation: sent per rank and step
};

// Throws FieldError for a case that cannot be: the field, what was expected and found.
Prediction predict(const Case& c);
// Of a checked case whose stages have so many layers: memory by description. Where not simulated, for a search among
// many, times are by closed forms and bytes are left out.
Prediction by_description(const Case& c, const std::vector<int64_t>& layers, bool simulated);

}  // namespace tessera::planner
