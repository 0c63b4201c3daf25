// Predicts time, communication volume and memory of a training step:
//
//   Case c{.model = ModelShape(*preset("llama3-8b")), .layout = {.plan = {.dp = 8, .zero = ZeroStage::three}},
//          .hardware = hardware_named("h100"), .software = software_named("fsdp")};
//   Prediction p = predict(c);     // p.step_s, p.parts.bubble, p.memory[p.peak_rank].peak(), ...
#pragma once
#include <array>
#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "parallel/pipeline/simulate.h"
#include "planner/case.h"

namespace tessera::planner {

// `names`: (name, member pointer).
double sum_fields(const auto& all, const auto& names) {
  double sum = 0;
  for (const auto& [name, part] : names) sum += all.*part;
  return sum;
}

// Seconds of the slowest rank's step, which add up to step_s. tp, cp, ep and dp are exposed communication.
struct Parts {
  double compute = 0, recompute = 0, bubble = 0, tp = 0, cp = 0, ep = 0, dp = 0, optimizer = 0;
  double sum() const;
};
inline constexpr std::array kParts = {std::pair{"compute", &Parts::compute}, std::pair{"recompute", &Parts::recompute},
                                      std::pair{"bubble", &Parts::bubble},   std::pair{"tp", &Parts::tp},
                                      std::pair{"cp", &Parts::cp},           std::pair{"ep", &Parts::ep},
                                      std::pair{"dp", &Parts::dp},           std::pair{"optimizer", &Parts::optimizer}};
inline double Parts::sum() const { return sum_fields(*this, kParts); }

// Bytes of a rank at its memory peak.
struct MemoryParts {
  double parameters = 0, gradients = 0, optimizer = 0, activations = 0, communication = 0, workspace = 0;
  double peak() const;
};
inline constexpr std::array kMemoryParts = {
    std::pair{"parameters", &MemoryParts::parameters},       std::pair{"gradients", &MemoryParts::gradients},
    std::pair{"optimizer", &MemoryParts::optimizer},         std::pair{"activations", &MemoryParts::activations},
    std::pair{"communication", &MemoryParts::communication}, std::pair{"workspace", &MemoryParts::workspace}};
inline double MemoryParts::peak() const { return sum_fields(*this, kMemoryParts); }

using Bytes = std::map<std::string, std::map<std::string, double>>;  // [axis][operation]

struct Prediction {
  double step_s = 0, fastest_s = 0, slowest_s = 0;
  double tokens_per_s = 0, mfu = 0, hfu = 0, tflops_per_rank = 0;
  Parts parts = {};
  double bubble = 0;                     // idle fraction, mean over pipeline ranks
  std::vector<StageTimes> stages = {};   // input of simulate()
  double message_s = 0;                  // between stages, beyond the part included in `stages`
  std::vector<MemoryParts> memory = {};  // per pipeline rank
  size_t peak_rank = 0;                  // index of `memory`
  bool fits = true;
  double over_bytes = 0;     // excess of the peak rank over available memory
  std::string largest = {};  // the peak rank's largest category
  Bytes bytes = {};          // sent per rank and step
};

// Throws FieldError for an invalid case.
Prediction predict(const Case& c);
// Expects a checked case and layers per stage; memory follows from Software. Without a clock (in a search), times are
// closed-form and `bytes` is empty.
class PipelineClock;
Prediction by_description(const Case& c, const std::vector<int64_t>& layers, PipelineClock* clock);
// If the case is a Tessera run, a dry run provides memory and bytes.
Prediction as_run(const Case& c, Prediction by_description);

}  // namespace tessera::planner
