// Search for the fastest plans that fit, over all layouts that a run accepts (check_layout() of train/config.h).
//
//   SearchRequest q{.model = to_model_shape(*preset("llama2-7b")), .hardware = hardware_named("h100"), .ranks = 8,
//                   .batch = 256};
//   q.fixed.tp = 2;
//   search(q).best.front().layout;     // the fastest that fits
//
// Branch and bound: layouts are visited in the order of a closed-form lower bound of the step time, until the bound
// exceeds the time of the candidates found. Layouts that do not fit even with ZeRO-3 are skipped. The best candidates
// by closed forms are then simulated.
#pragma once
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <vector>

#include "planner/predict.h"

namespace tessera::planner {

// Choices fixed by the user; empty ones are searched.
struct Fixed {
  std::optional<int64_t> pp = {}, dp = {}, cp = {}, tp = {}, ep = {}, chunks = {}, microbatches = {};
  std::optional<bool> sp = {};
  std::optional<ZeroStage> zero = {};
  std::optional<ScheduleKind> schedule = {};
  std::optional<ContextMode> cp_mode = {};
  std::optional<Recompute> recompute = {};
};

struct SearchRequest {
  ModelShape model = {};
  Hardware hardware = {};
  Software software = {};
  int64_t ranks = 1, batch = 1;  // batch: sequences per step
  Fixed fixed = {};
  Plan rest = {};  // fields that are not searched
};

Case make_case(const SearchRequest& question, const Layout& layout);

// All meshes with their micro-batches; free schedules are 1f1b and free ZeRO stages 0. Throws FieldError if there is
// none, with the conflicting field or the nearest valid number of ranks.
std::vector<Layout> bases(const SearchRequest& question);
// The schedules and ZeRO stages of a base.
std::vector<Layout> variants(const SearchRequest& question, const Layout& base);

// Fast predictions of many layouts of one model on one machine.
//
//   Estimator estimate(question);
//   estimate(layout).step_s;    // within a few percent of predict()
class Estimator {
 public:
  // Throws FieldError for invalid sizes and rates.
  explicit Estimator(const SearchRequest& question);
  // Closed forms, for layouts of bases() and variants(); memory by description, `bytes` empty.
  Prediction operator()(const Layout& layout) { return of(layout, false); }
  // Simulates the pipeline; memory and bytes by description.
  Prediction simulated(const Layout& layout) { return of(layout, true); }
  // Completes the result of simulated() to that of predict().
  Prediction as_run(const Layout& layout, Prediction simulated);
  // Whether predict() replaces the described memory by a dry run of Tessera's step.
  bool uses_dry_run() const { return own_; }
  // An estimator of this model on another machine.
  Estimator on(const Hardware& hardware) const;

 private:
  Prediction of(const Layout& layout, bool simulated);
  const std::vector<int64_t>& layer_range(int64_t stages);
  Case case_;
  bool own_ = false;  // Tessera's runs, which split layers by FLOPs
  struct Known;       // cached layers per stage and schedules
  std::shared_ptr<Known> known_;
};

struct Candidate {
  Layout layout = {};
  Prediction prediction = {};
  bool described = true;  // memory and bytes are by description, not by a dry run
};

struct SearchResult {
  // Plans that fit, fastest first: the best of each mesh and ZeRO stage, filled up with further plans.
  std::vector<Candidate> best = {};
  std::vector<Candidate> too_large = {};  // fast by their bound but too large, the closest to fitting first
  int64_t feasible = 0, estimated = 0, simulated = 0;  // bases, closed forms, simulations
};

// Called periodically during a search, which may take minutes; an exception aborts the search.
using ProgressCallback = std::function<void()>;
// Throws FieldError if no layout is valid, regardless of memory.
SearchResult search(
    const SearchRequest& question, size_t top = 10, const ProgressCallback& progress = [] {});
// Exhaustive search, for tests and few ranks.
SearchResult search_all(const SearchRequest& question, size_t top = 10);

}  // namespace tessera::planner
