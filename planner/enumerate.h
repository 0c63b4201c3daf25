// Every layout that a model can have on some ranks, by the rules that a run is held to (check_layout of train/job.h).
//
//   Question q{.model = shape_of(*preset("llama2-7b")), .hardware = hardware_named("h100"), .ranks = 8, .batch = 256};
//   q.fixed.tp = 2;
//   for (const Layout& base : bases(q))                     // pp x dp x cp x tp, sp, micro-batches, recomputation
//     for (const Layout& layout : variants(q, base)) ...    // the same under each schedule and stage of ZeRO
#pragma once
#include <cstdint>
#include <optional>
#include <vector>

#include "planner/predict.h"

namespace tessera::planner {

// The choices that a user has made; the others are free.
struct Fixed {
  std::optional<int64_t> pp = {}, dp = {}, cp = {}, tp = {}, ep = {}, chunks = {}, microbatches = {};
  std::optional<bool> sp = {};
  std::optional<ZeroStage> zero = {};
  std::optional<ScheduleKind> schedule = {};
  std::optional<ContextMode> cp_mode = {};
  std::optional<Recompute> recompute = {};
};

struct Question {
  ModelShape model = {};
  Hardware hardware = {};
  Software software = {};
  int64_t ranks = 1, batch = 1;  // sequences of a step
  Fixed fixed = {};
  Plan rest = {};  // the fields that are not searched
};

Case case_of(const Question& question, const Layout& layout);

// With the schedule 1f1b and without ZeRO, where these are free. Throws FieldError where there is none, with the field
// that keeps it from being, or the nearest number of ranks that can be divided.
std::vector<Layout> bases(const Question& question);
std::vector<Layout> variants(const Question& question, const Layout& base);

}  // namespace tessera::planner
