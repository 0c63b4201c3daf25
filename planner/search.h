// The best plans of a model on some ranks, and what does not fit: every layout that a model can have there, by the
// rules that a run is held to (check_layout of train/job.h), and the search among them.
//
//   Question q{.model = to_model_shape(*preset("llama2-7b")), .hardware = hardware_named("h100"), .ranks = 8, .batch =
//   256}; q.fixed.tp = 2; Answer a = search(q); a.best.front().layout;     // the fastest that fits
//
// Every layout has a bound of its time by closed forms. They are looked at from the smallest bound on, until it exceeds
// the time of the plans that are kept; what cannot fit even under ZeRO-3 is not looked at further. The best by closed
// forms are then simulated.
#pragma once
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
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

struct SearchRequest {
  ModelShape model = {};
  Hardware hardware = {};
  Software software = {};
  int64_t ranks = 1, batch = 1;  // sequences of a step
  Fixed fixed = {};
  Plan rest = {};  // the fields that are not searched
};

Case make_case(const SearchRequest& question, const Layout& layout);

// With the schedule 1f1b and without ZeRO, where these are free. Throws FieldError where there is none, with the field
// that keeps it from being, or the nearest number of ranks that can be divided.
std::vector<Layout> bases(const SearchRequest& question);
std::vector<Layout> variants(const SearchRequest& question, const Layout& base);

// Predictions of many layouts of one model on one machine, by closed forms alone: for a search among them.
//
//   Estimator estimate(question);
//   estimate(layout).step_s;    // within a few percent of predict()'s
class Estimator {
 public:
  // Throws FieldError for sizes and rates that cannot be.
  explicit Estimator(const SearchRequest& question);
  // Predicts layouts as bases() and variants() make them; without bytes, and with memory by description.
  Prediction operator()(const Layout& layout) { return of(layout, false); }
  // Predicts a layout with the pipeline simulated, and with bytes by description.
  Prediction simulated(const Layout& layout) { return of(layout, true); }
  // What predict() says of a layout, from what simulated() has said of it.
  Prediction as_run(const Layout& layout, Prediction simulated);
  // Whether predict() finds other memory, by dry runs of Tessera's own step.
  bool is_of_tessera() const { return own_; }
  // An estimator of this model on another machine.
  Estimator on(const Hardware& hardware) const;

 private:
  Prediction of(const Layout& layout, bool simulated);
  const std::vector<int64_t>& layer_range(int64_t stages);
  Case case_;
  bool own_ = false;  // Tessera's runs, which cut the layers by their FLOPs
  struct Known;       // layers of stages, and a schedule's order
  std::shared_ptr<Known> known_;
};

struct Candidate {
  Layout layout = {};
  Prediction prediction = {};
  bool described = true;  // its memory and bytes are by description, where a dry run would tell Tessera's
};

struct SearchResult {
  // That fit, fastest first: of each pp x dp x cp x tp and stage of ZeRO the best, then others of the best as far as
  // these are few.
  std::vector<Candidate> best = {};
  std::vector<Candidate> too_large = {};  // that bounds call fast and memory refuses, the nearest to fitting first
  int64_t feasible = 0, estimated = 0, simulated = 0;  // meshes with their micro-batches; closed forms; predictions
};

// Called again and again while a search goes on, which may be minutes; what it throws ends the search.
using ProgressCallback = std::function<void()>;
// Throws FieldError where no plan can be, whatever the memory.
SearchResult search(
    const SearchRequest& question, size_t top = 10, const ProgressCallback& meanwhile = [] {});
// The same without leaving out any: for tests, and for few ranks.
SearchResult search_all(const SearchRequest& question, size_t top = 10);

}  // namespace tessera::planner
