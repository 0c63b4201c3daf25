// Branch and bound by closed forms, then simulation and dry runs of the best candidates.
#include "planner/search.h"

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <optional>
#include <tuple>
#include <utility>

#include "base/error.h"
#include "planner/memory.h"
#include "planner/pipeline.h"
#include "train/config.h"

namespace tessera::planner {
namespace {

constexpr size_t kSimulated = 200;  // plans to simulate, ordered by closed-form time
// Only plans in the result get a dry run (Tessera only). kRoughly: relative error of memory without a dry run. kExtra:
// number of additional candidates near the capacity, and also of candidates with a headroom above kRoomy.
constexpr double kRoughly = 0.1, kRoomy = 0.15;
constexpr size_t kExtra = 100;
constexpr double kSlack = 0.98;  // lower bound of simulated over closed-form time

using Kind = std::tuple<int64_t, int64_t, int64_t, int64_t, ZeroStage>;  // pp, dp, cp, tp, ZeRO

Kind make_kind(const Layout& l) { return {l.plan.pp, l.plan.dp, l.plan.cp, l.plan.tp, l.plan.zero}; }

// Ties in time are ordered by simplicity.
auto sort_key(const Candidate& c) {
  const Plan& p = c.layout.plan;
  return std::tuple(c.prediction.step_s, p.zero, p.sp, p.recompute, p.schedule, p.chunks, p.cp_mode, p.pp, p.tp);
}
bool is_before(const Candidate& a, const Candidate& b) { return sort_key(a) < sort_key(b); }

bool is_nearer(const Candidate& a, const Candidate& b) { return a.prediction.over_bytes < b.prediction.over_bytes; }

// The bound on the time of all variants assumes no bubble and a sharded update.
struct Node {
  Layout base;
  double bound = 0;
};

bool zero_is_open(const SearchRequest& q, const Plan& p) { return !q.fixed.zero && p.dp * p.cp > 1; }
bool schedule_is_open(const SearchRequest& q, const Plan& p) { return !q.fixed.schedule && p.pp > 1; }

Node make_node(Estimator& estimate, const SearchRequest& q, Layout base) {
  Layout quick = base;
  if (schedule_is_open(q, base.plan)) quick.plan.schedule = ScheduleKind::zb_h2;
  if (zero_is_open(q, base.plan)) quick.plan.zero = ZeroStage::one;
  return {std::move(base), estimate(quick).step_s};
}

// The variant with the smallest memory by closed forms (the best ZeRO stage depends on what a pipeline leaves
// unsharded). Returns early if a variant exceeds the capacity by at most `allowed` bytes.
Candidate smallest_candidate(Estimator& estimate, const SearchRequest& q, Layout layout, double allowed) {
  const bool open = zero_is_open(q, layout.plan);
  const bool folded = schedule_is_open(q, layout.plan) && 2 * layout.plan.pp <= q.model.layers;
  std::optional<Candidate> smallest;
  for (const ScheduleKind schedule : {layout.plan.schedule, ScheduleKind::v_min})
    for (const ZeroStage zero : {ZeroStage::three, ZeroStage::one, ZeroStage::two}) {
      if (schedule == ScheduleKind::v_min && !folded) continue;
      layout.plan.schedule = schedule;
      if (open) layout.plan.zero = zero;
      Candidate c{layout, estimate(layout)};
      if (!smallest || is_nearer(c, *smallest)) smallest = std::move(c);
      if (smallest->prediction.over_bytes <= allowed) return *smallest;
      if (!open) break;
    }
  return *smallest;
}

class FirstOfKinds {
 public:
  explicit FirstOfKinds(bool (*is_first)(const Candidate&, const Candidate&)) : is_first_(is_first) {}

  void add(const Candidate& c) {
    const auto [found, is_new] = kinds_.try_emplace(make_kind(c.layout), c);
    if (!is_new && is_first_(c, found->second)) found->second = c;
  }
  std::vector<Candidate> first(size_t max_count) const {
    std::vector<Candidate> out;
    for (const auto& [kind, c] : kinds_) out.push_back(c);
    std::ranges::sort(out, is_first_);
    out.resize(std::min(out.size(), max_count));
    return out;
  }
  size_t faster_than(double seconds) const {
    const auto is_faster = [&](const auto& kind) { return kind.second.prediction.step_s <= seconds; };
    return static_cast<size_t>(std::ranges::count_if(kinds_, is_faster));
  }

 private:
  bool (*is_first_)(const Candidate&, const Candidate&);
  std::map<Kind, Candidate> kinds_ = {};
};

class CandidatePool {
 public:
  CandidatePool(size_t size, size_t kinds) : size_(size), kinds_(kinds) {}

  void add(Candidate c) {
    best_of_kinds_.add(c);
    if (best_.size() == size_ && !is_before(c, best_.back())) return;
    best_.insert(std::ranges::upper_bound(best_, c, is_before), std::move(c));
    if (best_.size() > size_) best_.pop_back();
  }
  bool may_accept(double seconds) const {
    return best_.size() < size_ || seconds < best_.back().prediction.step_s ||
           best_of_kinds_.faster_than(seconds) < kinds_;
  }
  void append_to(std::vector<Candidate>& to) const {
    std::vector<Candidate> all = best_, others = best_of_kinds_.first(8 * kinds_);
    all.insert(all.end(), others.begin(), others.end());
    for (Candidate& c : all)
      if (std::ranges::none_of(to, [&](const Candidate& t) { return t.layout == c.layout; }))
        to.push_back(std::move(c));
  }

 private:
  size_t size_, kinds_;
  std::vector<Candidate> best_ = {};
  FirstOfKinds best_of_kinds_{is_before};
};

// Ranks candidates by time: the fastest of each kind that fits, then the next fastest.
class Ranking {
 public:
  Ranking(const SearchRequest& q, Estimator& estimate, FirstOfKinds& too_large, const ProgressCallback& progress)
      : q_(q), estimate_(estimate), too_large_(too_large), progress_(progress) {}

  std::vector<Candidate> of(std::vector<Candidate> all, size_t top) {
    std::ranges::sort(all, is_before);
    std::vector<const Candidate*> rest;
    std::map<Kind, bool> seen;
    for (const Candidate& c : all) {
      if (out_.size() == top) break;
      const Kind kind = make_kind(c.layout);
      if (seen[kind])
        rest.push_back(&c);
      else
        seen[kind] = take(c);
    }
    for (const Candidate* c : rest)
      if (out_.size() < top) take(*c);
    std::ranges::sort(out_, is_before);
    return std::move(out_);
  }

 private:
  // Settings that determine the ratio of dry-run to described memory.
  using Memory = std::tuple<Recompute, ScheduleKind, bool, bool>;

  bool take(Candidate c) {
    progress_();
    const Plan& p = c.layout.plan;
    const Memory memory{p.recompute, p.schedule, p.tp > 1, p.zero == ZeroStage::three};
    const bool own = estimate_.uses_dry_run();
    Prediction simulated = c.prediction;
    if (own) correct(c.prediction, ratios_.contains(memory) ? ratios_[memory] : 1);
    const bool hopeless = c.prediction.over_bytes > kRoughly / 2 * q_.hardware.memory_bytes;
    if (!own || !hopeless) {
      const double described = peak(c.prediction);
      c.prediction = estimate_.as_run(c.layout, std::move(simulated));
      c.described = false;
      ratios_[memory] = peak(c.prediction) / described * (ratios_.contains(memory) ? ratios_[memory] : 1);
    }
    const bool fits = c.prediction.fits;
    fits ? out_.push_back(std::move(c)) : too_large_.add(c);
    return fits;
  }
  static double peak(const Prediction& p) { return p.memory[p.peak_rank].peak(); }
  void correct(Prediction& p, double ratio) const {
    const double over = ratio * peak(p) - q_.hardware.usable_bytes();
    for (MemoryParts& m : p.memory) m.activations += (ratio - 1) * m.peak();
    p.over_bytes = std::max(0.0, over);
    p.fits = over <= 0;
  }

  const SearchRequest& q_;
  Estimator& estimate_;
  FirstOfKinds& too_large_;
  const ProgressCallback& progress_;
  std::map<Memory, double> ratios_ = {};
  std::vector<Candidate> out_ = {};
};

}  // namespace

// Visits nodes only while they can be among the best.
SearchResult search(const SearchRequest& q, size_t top, const ProgressCallback& progress) {
  SearchResult answer;
  Estimator estimate(q);
  const bool own = estimate.uses_dry_run();
  const double allowed = kRoughly * q.hardware.memory_bytes;
  const auto is_roomy = [&](const Candidate& c) {
    return c.prediction.memory[c.prediction.peak_rank].peak() < (1 - kRoomy) * q.hardware.memory_bytes;
  };
  const bool always = !q.fixed.schedule && !q.fixed.chunks;  // 1f1b has no constraints
  std::vector<Node> nodes;
  for (Layout& base : bases(q)) {
    progress();
    if (!always && variants(q, base).empty()) continue;
    nodes.push_back(make_node(estimate, q, std::move(base)));
  }
  if (nodes.empty())
    throw FieldError("schedule",
                     fmt::format("{} has more stages than the model's {} layers, or requires `microbatches` to be a "
                                 "multiple of `pp`",
                                 value_name(q.fixed.schedule.value_or(ScheduleKind::interleaved)), q.model.layers));
  answer.feasible = std::ssize(nodes);
  std::ranges::stable_sort(nodes, {}, &Node::bound);
  CandidatePool fitting(kSimulated, top), tight(kExtra, top), roomy(kExtra, top);
  FirstOfKinds too_large(is_nearer);  // of each kind, the closest to fitting
  for (const Node& node : nodes) {
    if (!fitting.may_accept(kSlack * node.bound) && !(own && roomy.may_accept(kSlack * node.bound))) break;
    const Candidate smallest = smallest_candidate(estimate, q, node.base, allowed);
    if (smallest.prediction.over_bytes > allowed) {
      too_large.add(smallest);
      continue;
    }
    for (const Layout& layout : variants(q, node.base)) {
      progress();
      ++answer.estimated;
      Candidate c{layout, estimate(layout)};
      if (c.prediction.over_bytes > allowed)
        too_large.add(c);
      else
        (!c.prediction.fits ? tight : own && is_roomy(c) ? roomy : fitting).add(std::move(c));
    }
  }
  std::vector<Candidate> simulated;
  for (const CandidatePool* some : {&fitting, &tight, &roomy}) some->append_to(simulated);
  std::vector<Candidate*> ordered;  // sorted, so that PipelineClock caches schedules
  for (Candidate& c : simulated) ordered.push_back(&c);
  std::ranges::stable_sort(ordered, {}, [](const Candidate* c) {
    const Plan& p = c->layout.plan;
    return std::tuple(p.pp, p.schedule, p.chunks, p.microbatches);
  });
  for (Candidate* c : ordered) {
    progress();
    c->prediction = estimate.simulated(c->layout);
    if (!own && !c->prediction.fits) too_large.add(*c);
  }
  answer.simulated = std::ssize(simulated);
  answer.best = Ranking(q, estimate, too_large, progress).of(std::move(simulated), top);
  answer.too_large = too_large.first(top);
  return answer;
}

struct Estimator::Known {
  std::map<int64_t, std::vector<int64_t>> layers = {};
  PipelineClock clock = {};
};

Estimator::Estimator(const SearchRequest& q)
    : case_(checked_case(make_case(q, {}))), own_(own_job(case_).has_value()), known_(std::make_shared<Known>()) {}

Estimator Estimator::on(const Hardware& hardware) const {
  Estimator other = *this;
  other.case_.hardware = hardware;
  return other;
}

const std::vector<int64_t>& Estimator::layer_range(int64_t stages) {
  const auto [found, is_new] = known_->layers.try_emplace(stages);
  if (!is_new) return found->second;
  Case c = case_;
  c.layout = {.plan = {.pp = stages}};
  return found->second = planner::layer_range(c, own_ ? own_job(c) : std::nullopt);
}

Prediction Estimator::of(const Layout& layout, bool simulated) {
  case_.layout = layout;
  return by_description(case_, layer_range(std::ssize(rank_of_stages(layout.plan))),
                        simulated ? &known_->clock : nullptr);
}

Prediction Estimator::as_run(const Layout& layout, Prediction simulated) {
  case_.layout = layout;
  return planner::as_run(checked_case(case_), std::move(simulated));
}

}  // namespace tessera::planner
