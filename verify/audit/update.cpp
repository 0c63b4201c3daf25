// Norm, clipping and update, recomputed from the recorded gradients.
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/json.h"
#include "optim/grad_norm.h"
#include "optim/rules.h"
#include "verify/audit/compare.h"
#include "verify/audit/pairs.h"

namespace tessera::audit {

using Json = nlohmann::json;

namespace {

constexpr double kNormMargin = 1e-3, kNoUpdate = 0.5;

struct Group {
  OptimizerKind kind{};
  OptimizerOptions options;
  double lr = 0;
  int64_t steps = 0;  // before the update
};

double number(const Json& group, const char* key, double missing) {
  const Json& found = value_at(group, key);
  return found.is_number() ? found.get<double>() : missing;
}

// Settings of each parameter. Variants of the rules that change them are not recomputed.
std::map<std::string, Group> read_groups(const Recording& r, std::vector<std::string>* notes) {
  std::map<std::string, Group> out;
  for (const RankInfo& rank : r.ranks()) {
    const Json& optimizer = value_at(rank.info, "optimizer");
    const std::string name = optimizer.is_object() ? optimizer.value("class", "") : "";
    std::string last = name.substr(name.rfind('.') + 1);
    std::ranges::transform(last, last.begin(), [](char c) { return std::tolower(c); });
    const bool known = last == "sgd" || last == "adam" || last == "adamw";
    if (!known && !name.empty() && notes && notes->empty())
      notes->push_back(fmt::format("the update of {} is not recomputed; expected SGD, Adam or AdamW", name));
    for (const Json& group : value_at(optimizer, "groups")) {
      if (!known || !group.is_object()) continue;
      const bool variant = std::ranges::any_of(std::array{"nesterov", "amsgrad", "maximize"},
                                               [&](const char* key) { return value_at(group, key) == true; }) ||
                           number(group, "dampening", 0) != 0;
      if (variant) continue;
      Group g;
      g.kind = last == "sgd" ? OptimizerKind::sgd : last == "adam" ? OptimizerKind::adam : OptimizerKind::adamw;
      if (last == "adam" && value_at(group, "decoupled_weight_decay") == true) g.kind = OptimizerKind::adamw;
      g.lr = number(group, "lr", 0), g.steps = natural(value_at(optimizer, "step")).value_or(0);
      g.options.momentum = number(group, "momentum", 0), g.options.eps = number(group, "eps", 1e-8);
      g.options.weight_decay = number(group, "weight_decay", 0);
      if (const Json& betas = value_at(group, "betas"); betas.is_array() && betas.size() == 2)
        g.options.beta1 = betas[0].get<double>(), g.options.beta2 = betas[1].get<double>();
      for (const Json& parameter : value_at(group, "parameters"))
        if (parameter.is_string()) out[parameter.get<std::string>()] = g;
    }
  }
  return out;
}

// An update with constants that are computed once.
class Update {
 public:
  Update(const Group& g, bool decays) : kind_(g.kind), c_(g.options) {
    const double t = static_cast<double>(g.steps) + 1, wd = decays ? g.options.weight_decay : 0;
    const bool decoupled = find_row(g.kind).decay == Decay::decoupled;
    c_.lr = g.lr, c_.grad_scale = 1, c_.coupled = decoupled ? 0 : wd, c_.decay_factor = decoupled ? 1 - g.lr * wd : 1;
    c_.step_size = -g.lr / (1 - std::pow(g.options.beta1, t)),
    c_.root_scale = 1 / std::sqrt(1 - std::pow(g.options.beta2, t));
  }
  // The value after the update.
  double operator()(double p, double grad, double m, double v) const {
    if (kind_ == OptimizerKind::sgd)
      Sgd::update(c_, grad, p, m);
    else
      Adam::update(c_, grad, p, m, v);
    return p;
  }

 private:
  OptimizerKind kind_;
  UpdateConstants<double> c_;
};

const StoredTensor* tensor(const Recording& r, Kind kind, const std::string& name) {
  const auto* const all = r.find(kind, name);
  return all ? &all->begin()->second : nullptr;
}

// Distances of the recorded update from hypotheses, relative to the update.
struct Fit {
  Sums right, unclipped, without_decay, nothing;
  double size = 0, n = 0;          // squares of the values, before or after the update
  double outside = 0, inside = 0;  // elements that differ by more than rounding errors, or not
};

Fit fit_update(const Recording& r, const std::string& name, const Group& group, double clip, double eps) {
  Fit out;
  const StoredTensor *const p = tensor(r, Kind::parameter, name), *const after = tensor(r, Kind::updated, name),
                            *const grad = tensor(r, Kind::grad, name),
                            *const clipped = tensor(r, Kind::clipped_grad, name),
                            *const first = tensor(r, Kind::state, name + ".exp_avg"),
                            *const second = tensor(r, Kind::state, name + ".exp_avg_sq"),
                            *const momentum = tensor(r, Kind::state, name + ".momentum_buffer");
  if (!p || !after || !grad || p->shape != after->shape || p->shape != grad->shape) return out;
  const bool has_state = group.kind == OptimizerKind::sgd ? momentum || group.options.momentum == 0 : first && second;
  if (group.steps > 0 && !has_state) return out;
  for (const StoredTensor* const t : {clipped, first, second, momentum})
    if (t && t->shape != p->shape) return out;
  std::vector<double> values, found, g, used, m, v;
  const Update update(group, true), undecayed(group, false);
  const bool decays = group.options.weight_decay != 0;
  std::vector<double> delta, right, unclipped, without_decay;
  for_each_rows(p->rows(), p->width(), [&](Range rows) {
    r.read(*p, 0, rows, values);
    r.read(*after, 0, rows, found);
    r.read(*grad, 0, rows, g);
    r.read(clipped ? *clipped : *grad, 0, rows, used);
    m.assign(values.size(), 0), v = m;
    if (const StoredTensor* const moments = group.kind == OptimizerKind::sgd ? momentum : first)
      r.read(*moments, 0, rows, m);
    if (second) r.read(*second, 0, rows, v);
    for (std::vector<double>* to : {&delta, &right, &unclipped, &without_decay}) to->resize(values.size());
    for (size_t i = 0; i < values.size(); ++i) {
      const double x = values[i], step = used[i] * (clipped ? 1 : clip);
      const double expected = update(x, step, m[i], v[i]);
      delta[i] = found[i] - x, right[i] = expected - x;
      unclipped[i] = g[i] == step ? right[i] : update(x, g[i], m[i], v[i]) - x;
      without_decay[i] = decays ? undecayed(x, step, m[i], v[i]) - x : right[i];
      // Decay and update each round the value, and the update has the rounding errors of the moments and of the root.
      const double bound = eps * (std::max(std::abs(x), std::abs(found[i])) + 4 * std::abs(expected - x));
      (std::abs(found[i] - expected) > bound ? out.outside : out.inside) += 1;
      if (!std::isnan(delta[i]))
        out.nothing.dd += delta[i] * delta[i], out.size += std::max(x * x, found[i] * found[i]), out.n += 1;
    }
    out.right.add(delta, right, 1);
    out.unclipped.add(delta, unclipped, 1);
    out.without_decay.add(delta, without_decay, 1);
  });
  return out;
}

}  // namespace

void check_update(const Recording& found, const Recording& expected, AuditResult& result) {
  double squares = 0;
  for (const auto& [key, batches] : found.tensors()) {
    if (key.kind != Kind::grad) continue;
    std::vector<double> values;
    const StoredTensor& t = batches.begin()->second;
    const bool is_copy = key.name.starts_with("lm_head") && !expected.find(Kind::grad, key.name);
    for_each_rows(is_copy ? 0 : t.rows(), t.width(), [&](Range rows) {
      found.read(t, 0, rows, values);
      Sums sums;
      sums.add(values, values, 1);
      squares += sums.ff;
    });
  }
  const double own = std::sqrt(squares), eps = std::max(found.epsilon(), 1e-7);
  const Json& clip_info = found.info("clip");
  const double max_norm = number(clip_info, "max_norm", 0);
  std::optional<double> norm;  // of the rank with the largest deviation
  for (const RankInfo& rank : found.ranks())
    if (const Json& value = value_at(value_at(rank.info, "clip"), "norm"); value.is_number())
      if (const double x = value.get<double>(); !norm || std::abs(x - own) > std::abs(*norm - own)) norm = x;
  if (const StoredTensor* const stored = tensor(found, Kind::norm, "grad_norm"); stored && !norm) {
    std::vector<double> value;
    found.read(*stored, 0, {0, 1}, value);
    norm = value[0];
  }
  if (norm && own > 0) {
    TensorResult t{.key = {Kind::norm, "grad_norm"}};
    result.seen.norm_ratio = t.factor = *norm / own;
    t.distance = std::abs(t.factor - 1), t.tolerance = t.factor_tolerance = std::max(kNormMargin, eps), t.elements = 1;
    t.wrong = t.distance > t.tolerance;
    result.tensors.push_back(t);
  }
  const double factor = max_norm > 0 ? clipped(own, max_norm) : 1;
  for (const auto& [key, batches] : found.tensors()) {
    const StoredTensor* const grad = key.kind == Kind::clipped_grad ? tensor(found, Kind::grad, key.name) : nullptr;
    const StoredTensor& stored = batches.begin()->second;
    if (!grad || grad->shape != stored.shape) continue;
    Sums sums;
    std::vector<double> x, y;
    for_each_rows(grad->rows(), grad->width(), [&](Range rows) {
      found.read(stored, 0, rows, x);
      found.read(*grad, 0, rows, y);
      sums.add(x, y, factor);
    });
    // The norm and the products each have rounding errors.
    TensorResult t{
        .key = key, .distance = sums.distance(), .tolerance = std::max(kNormMargin, 2 * eps), .elements = sums.n};
    t.factor = sums.factor(), t.factor_tolerance = t.tolerance;
    t.wrong = max_norm > 0 && t.distance > t.tolerance;
    if (t.wrong) result.seen.clip_ratio = t.factor;
    result.tensors.push_back(t);
  }
  std::vector<std::string> notes;
  const std::map<std::string, Group> groups = read_groups(found, &notes), theirs = read_groups(expected, nullptr);
  result.notes.insert(result.notes.end(), notes.begin(), notes.end());
  const Json& step = value_at(found.info("optimizer"), "step");
  for (const auto& [name, group] : groups) {
    const auto other = theirs.find(name);
    TensorResult rate{.key = {Kind::lr, name}, .distance = 0, .tolerance = 1e-6};
    if (other != theirs.end() && other->second.lr != 0) {  // 0: Tessera's reference, which makes no update
      const Group& o = other->second;
      if (o.options.weight_decay != group.options.weight_decay) {
        result.seen.decay = fmt::format("weight_decay of {} is {} instead of {}", name, group.options.weight_decay,
                                        o.options.weight_decay);
        rate.wrong = true;
      }
      rate.factor = group.lr / o.lr;
      rate.distance = std::abs(rate.factor - 1);
      if (rate.distance > rate.tolerance) {
        rate.wrong = true;
        result.seen.order = fmt::format("the learning rate of {} is {} instead of {}", name, group.lr, o.lr);
      }
      if (rate.wrong) result.tensors.push_back(rate);
    }
    const StoredTensor* const values = tensor(found, Kind::parameter, name);
    if (!values) continue;
    const double eps_values = values->replicas[0][0].bytes->dtype == DType::bfloat16 ? 0x1p-7 : 0x1p-23;
    const Fit fit = fit_update(found, name, group, factor, eps_values);
    if (fit.n == 0) continue;
    TensorResult t{.key = {Kind::updated, name}, .distance = fit.right.distance(), .elements = fit.right.n};
    const double update = std::sqrt(fit.right.ee), rounding = eps_values * std::sqrt(fit.size);
    t.tolerance = t.factor_tolerance = std::max(kNormMargin, 4 * rounding / std::max(update, 1e-300));
    t.factor = fit.right.factor();
    // Updates below the precision of the values are compared by elements.
    t.undecided = t.tolerance > kNoUpdate && fit.outside == 0;
    t.wrong = t.tolerance > kNoUpdate ? fit.outside > 1 + 0.01 * fit.n : t.distance > t.tolerance;
    if (t.wrong) {
      const auto fits = [&](const Sums& s) { return s.n > 0 && s.distance() <= t.tolerance; };
      if (fit.nothing.dd == 0)
        result.seen.order = fmt::format("{} is unchanged by the step", name);
      else if (fits(fit.unclipped))
        result.seen.order = fmt::format("{} is updated with the gradients before clipping", name);
      else if (fits(fit.without_decay))
        result.seen.decay =
            fmt::format("{} is updated without its weight_decay of {}", name, group.options.weight_decay);
    }
    result.tensors.push_back(t);
  }
  if (!groups.empty() && step.is_null()) result.notes.emplace_back("the number of updates is not recorded; assuming 0");
  // Replicas of updated parameters.
  std::vector<double> a, b;
  for (const auto& [key, batches] : found.tensors()) {
    const StoredTensor& t = batches.begin()->second;
    if (key.kind != Kind::updated || t.replicas.size() < 2) continue;
    for (size_t r = 1; r < t.replicas.size(); ++r) {
      Sums sums;
      for_each_rows(t.rows(), t.width(), [&](Range rows) {
        found.read(t, 0, rows, a);
        found.read(t, r, rows, b);
        sums.add(b, a, 1);
      });
      if (sums.distance() <= 1e-6) continue;
      const auto axes = found.differing_axes(t, 0, r);
      TensorResult wrong{.key = key, .distance = sums.distance(), .tolerance = 1e-6, .elements = sums.n, .wrong = true};
      wrong.axis = axes.empty() ? "ranks" : axes[0], wrong.replica = r;
      result.tensors.push_back(wrong);
      break;
    }
  }
}

}  // namespace tessera::audit
