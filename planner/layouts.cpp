// Enumerates layouts: meshes by divisors of the number of ranks, then their variants.
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/error.h"
#include "planner/search.h"
#include "train/check.h"
#include "train/config.h"

namespace tessera::planner {
namespace {

constexpr std::array kRecomputes = {Recompute::none, Recompute::activation, Recompute::activation_norm,
                                    Recompute::attention, Recompute::block};
constexpr std::array kContextModes = {ContextMode::ring, ContextMode::ulysses};
constexpr std::array kZeroStages = {ZeroStage::none, ZeroStage::one, ZeroStage::two, ZeroStage::three};
constexpr std::array kSchedules = {ScheduleKind::one_f_one_b, ScheduleKind::gpipe,      ScheduleKind::zb_h1,
                                   ScheduleKind::zb_h2,       ScheduleKind::zb_v,       ScheduleKind::v_half,
                                   ScheduleKind::v_min,       ScheduleKind::interleaved};
constexpr int64_t kMaxStages = 512;  // unless the user fixes the stages
constexpr int64_t kNear = 64;        // search radius around the requested number of ranks

std::vector<int64_t> divisors(int64_t n) {
  std::vector<int64_t> low, high;
  for (int64_t d = 1; d * d <= n; ++d) {
    if (n % d != 0) continue;
    low.push_back(d);
    if (d * d < n) high.push_back(n / d);
  }
  low.insert(low.end(), high.rbegin(), high.rend());
  return low;
}

template <class T, class All>
std::vector<T> choices(const std::optional<T>& fixed, const All& all) {
  return fixed ? std::vector<T>{*fixed} : std::vector<T>(all.begin(), all.end());
}

bool fixes(const Fixed& f, const std::string& field) {
  return (field == "pp" && f.pp) || (field == "dp" && f.dp) || (field == "cp" && f.cp) || (field == "tp" && f.tp) ||
         (field == "sp" && f.sp) || (field == "batch" && (f.dp || f.microbatches));
}

class Bases {
 public:
  explicit Bases(const SearchRequest& q) : q_(q), sizes_(q.model.config()) {}

  std::vector<Layout> all(int64_t ranks) {
    const Fixed& f = q_.fixed;
    const std::vector<int64_t> rank_divisors = divisors(ranks);
    for (const int64_t pp : choices(f.pp, rank_divisors)) {
      if (ranks % pp != 0 || (!f.pp && pp > std::min(q_.model.layers, kMaxStages))) continue;
      for (const int64_t tp : choices(f.tp, rank_divisors)) {
        if (ranks / pp % tp != 0) continue;
        for (const int64_t cp : choices(f.cp, rank_divisors))
          if (const int64_t rest = ranks / pp / tp; rest % cp == 0 && (!f.dp || *f.dp == rest / cp))
            add_mesh(pp, rest / cp, cp, tp);
      }
    }
    return std::move(found_);
  }
  // The error of the first mesh that matches the user's choices.
  const std::optional<FieldError>& why_none() const { return why_none_; }

 private:
  void add_mesh(int64_t pp, int64_t dp, int64_t cp, int64_t tp) {
    const Fixed& f = q_.fixed;
    if (pp > q_.model.layers && !why_none_)
      why_none_.emplace("pp", fmt::format("{} ranks exceed the {} layers", pp, q_.model.layers));
    if (pp > q_.model.layers) return;
    Plan p = q_.rest;
    p.pp = pp, p.dp = dp, p.cp = cp, p.tp = tp;
    p.microbatches = f.microbatches.value_or(1);
    for (const bool sp : choices(f.sp, std::array{false, true})) {
      if (sp && tp == 1 && !f.sp) continue;
      p.sp = sp;
      for (const ContextMode mode : choices(f.cp_mode, kContextModes)) {
        if (cp == 1 && !f.cp_mode && mode != ContextMode::ring) continue;
        p.cp_mode = mode;
        if (can_be(p)) add_parts(p);
      }
    }
  }

  bool can_be(const Plan& p) {
    try {
      check_layout(p, sizes_, q_.batch);
      return true;
    } catch (const FieldError& e) {
      if (!why_none_ && fixes(q_.fixed, e.field())) why_none_.emplace(e);
      return false;
    }
  }

  void add_parts(Plan p) {
    const Fixed& f = q_.fixed;
    const int64_t here = q_.batch / p.dp;  // sequences per step and data rank
    for (const int64_t m : choices(f.microbatches, divisors(here))) {
      if (here % m != 0) continue;
      p.microbatches = m;
      p.schedule = f.schedule.value_or(ScheduleKind::one_f_one_b);
      p.zero = f.zero.value_or(ZeroStage::none);
      for (const Recompute recompute : choices(f.recompute, kRecomputes)) {
        p.recompute = recompute;
        for (const int64_t ep : experts(p)) found_.push_back({.plan = p, .ep = ep, .sequences = here / m});
      }
    }
  }

  std::vector<int64_t> experts(const Plan& p) const {
    if (q_.model.experts.count == 0) return {1};
    std::vector<int64_t> out;
    for (const int64_t ep : choices(q_.fixed.ep, divisors(q_.model.experts.count)))
      if (q_.model.experts.count % ep == 0 && p.dp * p.cp % ep == 0) out.push_back(ep);
    return out;
  }

  const SearchRequest& q_;
  ModelConfig sizes_;
  std::vector<Layout> found_ = {};
  std::optional<FieldError> why_none_ = {};
};

std::string fixed_mesh_text(const Fixed& f) {
  std::string out;
  for (const auto& [name, size] : {std::pair{"pp", f.pp}, {"dp", f.dp}, {"cp", f.cp}, {"tp", f.tp}})
    if (size) out += fmt::format("{}{} {}", out.empty() ? "" : " x ", name, *size);
  return out;
}

[[noreturn]] void refuse(const SearchRequest& q, const std::optional<FieldError>& why_none) {
  if (why_none) throw *why_none;
  const Fixed& f = q.fixed;
  const int64_t product = f.pp.value_or(1) * f.dp.value_or(1) * f.cp.value_or(1) * f.tp.value_or(1);
  const bool all_fixed = f.pp && f.dp && f.cp && f.tp;
  if (all_fixed && product != q.ranks)
    throw FieldError("ranks", fmt::format("{} is {} ranks; expected {}", fixed_mesh_text(f), product, q.ranks));
  if (q.ranks % product != 0)
    throw FieldError("ranks", fmt::format("{} does not divide the {} ranks", fixed_mesh_text(f), q.ranks));
  std::string nearest = "none";
  for (int64_t step = 1; step < kNear && nearest == "none"; ++step)
    for (const int64_t ranks : {q.ranks + step, q.ranks - step})
      if (ranks > 0 && nearest == "none" && !Bases(q).all(ranks).empty()) nearest = std::to_string(ranks);
  throw FieldError("ranks",
                   fmt::format("{} cannot be factored into axes that fit the layers, heads, tokens and a batch of "
                               "{}; nearest valid value: {}",
                               q.ranks, q.batch, nearest));
}

bool can_be(const SearchRequest& q, const Plan& p, int64_t chunks) {
  return p.pp * chunks <= q.model.layers && (p.schedule != ScheduleKind::interleaved || p.microbatches % p.pp == 0);
}

// Chunks per rank to try; 0: the schedule has no choice.
std::vector<int64_t> chunk_choices(const SearchRequest& q, const Plan& p) {
  if (p.schedule != ScheduleKind::interleaved) return {0};
  if (q.fixed.chunks) return {*q.fixed.chunks};
  std::vector<int64_t> out;
  for (int64_t v = 2; v * p.pp <= std::min(q.model.layers, kMaxStages); ++v)
    if (v == 2 || q.model.layers % (v * p.pp) == 0) out.push_back(v);
  return out;
}

}  // namespace

Case make_case(const SearchRequest& q, const Layout& layout) {
  return {.model = q.model, .layout = layout, .hardware = q.hardware, .software = q.software};
}

std::vector<Layout> bases(const SearchRequest& q) {
  Bases made(q);
  std::vector<Layout> out = made.all(q.ranks);
  if (out.empty()) refuse(q, made.why_none());
  return out;
}

std::vector<Layout> variants(const SearchRequest& q, const Layout& base) {
  std::vector<Layout> out;
  Layout layout = base;
  Plan& p = layout.plan;
  const bool pipeline = p.pp > 1, shared = p.dp * p.cp > 1;
  for (const ScheduleKind kind : choices(q.fixed.schedule, kSchedules)) {
    if (!pipeline && !q.fixed.schedule && kind != ScheduleKind::one_f_one_b) continue;
    if (q.fixed.chunks && *q.fixed.chunks > 0 && pipeline && !q.fixed.schedule && kind != ScheduleKind::interleaved)
      continue;
    p.schedule = kind;
    for (const int64_t chunks : chunk_choices(q, p)) {
      p.chunks = chunks;
      if (!can_be(q, p, chunks > 0 ? chunks : is_v(kind) ? 2 : 1)) continue;
      for (const ZeroStage zero : choices(q.fixed.zero, kZeroStages)) {
        if (!shared && !q.fixed.zero && zero != ZeroStage::none) continue;
        p.zero = zero;
        out.push_back(layout);
      }
    }
  }
  return out;
}

}  // namespace tessera::planner
