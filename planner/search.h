// The best plans of a model on some ranks, and what does not fit.
//
//   Answer a = search({.model = shape_of(*preset("llama2-7b")), .hardware = hardware_named("h100"), .ranks = 8,
//                      .batch = 256});
//   a.best.front().layout;     // the fastest that fits
//
// Every layout has a bound of its time by closed forms (planner/estimate.h). They are looked at from the smallest bound
// on, until it exceeds the time of the plans that are kept; what cannot fit even under ZeRO-3 is not looked at further.
// The best by closed forms are then simulated.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "planner/enumerate.h"

namespace tessera::planner {

struct Candidate {
  Layout layout = {};
  Prediction prediction = {};
  bool described = true;  // its memory and bytes are by description, where a dry run would tell Tessera's
};

struct Answer {
  // That fit, fastest first: of each pp x dp x cp x tp and stage of ZeRO the best, then others of the best as far as
  // these are few.
  std::vector<Candidate> best = {};
  std::vector<Candidate> too_large = {};  // that bounds call fast and memory refuses, the nearest to fitting first
  int64_t feasible = 0, estimated = 0, simulated = 0;  // meshes with their micro-batches; closed forms; predictions
};

// Throws FieldError where no plan can be, whatever the memory.
Answer search(const Question& question, size_t top = 10);
// The same without leaving out any: for tests, and for few ranks.
Answer search_all(const Question& question, size_t top = 10);

}  // namespace tessera::planner
