// Searches all layouts that a run accepts (check_layout() of train/check.h) for the fastest plans that fit.
//
//   SearchRequest q{.model = ModelShape(*preset("llama2-7b")), .hardware = hardware_named("h100"), .ranks = 8,
//                   .batch = 256};
//   q.fixed.tp = 2;
//   search(q).best.front().layout;     // the fastest that fits
//
// Branch and bound: visits layouts in the order of a closed-form lower bound of the step time, until the bound exceeds
// the time of the candidates found. Skips layouts that do not fit even with ZeRO-3. Then simulates the best candidates.
#pragma once
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <vector>

#include "planner/predict.h"

namespace tessera::planner {

// Fixed by the user; empty choices are searched.
struct Fixed {
  std::optional<int64_t> pp = {}, dp = {}, cp = {}, tp = {}, ep = {}, chunks = {}, microbatches = {};
  std::optional<bool> sp = {};
  std::optional<ZeroStage> zero = {};
  std::optional<ScheduleKind> schedule = {};
  std::optional<ContextMode> cp_mode = {};
  std::optional<Recompute> recompute = {};
};
// Calls visit(field, choice, value in the layout) for each.
void each_choice(auto& f, auto& l, const auto& visit) {
  visit("pp", f.pp, l.plan.pp), visit("dp", f.dp, l.plan.dp), visit("cp", f.cp, l.plan.cp);
  visit("tp", f.tp, l.plan.tp), visit("ep", f.ep, l.ep), visit("chunks", f.chunks, l.plan.chunks);
  visit("microbatches", f.microbatches, l.plan.microbatches), visit("sp", f.sp, l.plan.sp);
  visit("zero", f.zero, l.plan.zero), visit("schedule", f.schedule, l.plan.schedule);
  visit("cp_mode", f.cp_mode, l.plan.cp_mode), visit("recompute", f.recompute, l.plan.recompute);
}

struct SearchRequest {
  ModelShape model = {};
  Hardware hardware = {};
  Software software = {};
  int64_t ranks = 1, batch = 1;  // batch: sequences per step
  Fixed fixed = {};
  Plan rest = {};  // not searched
};

Case make_case(const SearchRequest& question, const Layout& layout);

// All meshes with their micro-batches; the schedule is 1f1b and the ZeRO stage 0 unless fixed. If there are none,
// throws FieldError with the conflicting field or the nearest valid number of ranks.
std::vector<Layout> bases(const SearchRequest& question);
std::vector<Layout> variants(const SearchRequest& question, const Layout& base);

// Fast predictions of many layouts of one model on one machine, within a few percent of predict().
class Estimator {
 public:
  // Throws FieldError for invalid sizes and rates.
  explicit Estimator(const SearchRequest& question);
  // Closed forms, for layouts of bases() and variants(); memory from Software, `bytes` empty.
  Prediction operator()(const Layout& layout) { return of(layout, false); }
  // Simulates the pipeline; memory and bytes from Software.
  Prediction simulated(const Layout& layout) { return of(layout, true); }
  // Extends simulated() to the result of predict().
  Prediction as_run(const Layout& layout, Prediction simulated);
  // Whether predict() uses a dry run instead of described memory.
  bool uses_dry_run() const { return own_; }
  Estimator on(const Hardware& hardware) const;

 private:
  Prediction of(const Layout& layout, bool simulated);
  const std::vector<int64_t>& layer_range(int64_t stages);
  Case case_;
  bool own_ = false;  // splits layers by FLOPs, as Tessera's runs do
  struct Known;       // cached layers per stage and schedules
  std::shared_ptr<Known> known_;
};

struct Candidate {
  Layout layout = {};
  Prediction prediction = {};
  bool described = true;  // no dry run
};

struct SearchResult {
  // Fastest first: the best of each mesh and ZeRO stage, then further plans that fit.
  std::vector<Candidate> best = {};
  std::vector<Candidate> too_large = {};               // plans that are fast but do not fit, smallest excess first
  int64_t feasible = 0, estimated = 0, simulated = 0;  // bases, closed forms, simulations
};

// Called periodically, because a search may take minutes; an exception aborts the search.
using ProgressCallback = std::function<void()>;
// Throws FieldError if no layout is valid, regardless of memory.
SearchResult search(
    const SearchRequest& question, size_t top = 10, const ProgressCallback& progress = [] {});

}  // namespace tessera::planner
