// Pairs of tensors, tolerances, and the first divergence.
#include "verify/audit/compare.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include "base/bad_input.h"
#include "base/json.h"
#include "verify/audit/facts.h"
#include "verify/audit/locate.h"
#include "verify/audit/pairs.h"
#include "verify/diagnosis/differences.h"

namespace tessera::audit {

namespace {

constexpr double kMargin = 4;        // of measured tolerances
constexpr double kUndecided = 0.3;   // larger tolerances cannot refute
constexpr double kOtherModel = 0.9;  // fraction of different parameters

bool is_vocabulary(std::string_view name) {
  return std::ranges::any_of(std::array{"embed", "wte", "lm_head", "tok", "head", "output"},
                             [&](const char* part) { return name.find(part) != name.npos; });
}

struct Accumulated {
  std::vector<Sums> replicas;                     // each, compared with the expected values
  std::vector<Sums> between;                      // each, compared with the first
  std::map<std::string, Sums> sums;               // of the replicas that differ on one axis, without differences
  std::map<std::pair<Batch, Batch>, Sums> pairs;  // of the first replica
};

// Statistics of `factor` times the found values, without differences.
Sums scaled(const Sums& s, double factor) { return {factor * factor * s.ff, factor * s.fe, s.ee, 0, s.n}; }

class Comparison : public Pairing {
 public:
  using Pairing::Pairing;

  Accumulated accumulate(const Key& key, const std::map<Batch, StoredTensor>& tensors,
                         const std::map<Batch, StoredTensor>& others) const {
    Accumulated out;
    std::vector<double> first, here, there;
    std::map<std::string, std::vector<double>> sums;
    const StoredTensor* described = nullptr;
    std::vector<std::string> axes;  // on which a replica differs from the first; empty: several
    for_each_block(
        match_, tensors, others, is_batched(key.kind),
        [&](const Block& b, const StoredTensor& t, const StoredTensor& e) {
          if (described != &t) {
            axes.assign(t.replicas.size(), "");
            for (size_t r = 1; r < t.replicas.size(); ++r)
              if (const auto all = found_.differing_axes(t, 0, r); all.size() == 1) axes[r] = all[0];
            described = &t;
          }
          const double scale = this->scale(key.kind, b);
          expected_.read(e, 0, b.other, there);
          const auto compared = [&](const std::vector<double>& values) {
            return compare_rows(values, there, t.width(), e.width(), scale);
          };
          if (t.replicas.size() > out.replicas.size()) {
            out.replicas.resize(t.replicas.size());
            out.between.resize(t.replicas.size());
          }
          found_.read(t, 0, b.rows, first);
          const Sums of_first = compared(first);
          out.replicas[0].add(of_first);
          out.pairs[{b.found_batch, b.expected_batch}].add(of_first);
          sums.clear();
          std::map<std::string, double> equal;  // replicas with the values of the first, by axis
          for (size_t r = 1; r < t.replicas.size(); ++r) {
            found_.read(t, r, b.rows, here);
            const bool same = std::memcmp(here.data(), first.data(), here.size() * sizeof(double)) == 0;
            out.replicas[r].add(same ? of_first : compared(here));
            Sums& between = out.between[r];
            same ? between.add({of_first.ff, of_first.ff, of_first.ff, 0, of_first.n}) : between.add(here, first, 1);
            if (axes[r].empty()) continue;
            if (same) {
              equal[axes[r]] += 1;
              continue;
            }
            std::vector<double>& sum = sums.try_emplace(axes[r], first).first->second;
            for (size_t i = 0; i < here.size(); ++i) sum[i] += here[i];
          }
          for (auto& [axis, sum] : sums) {
            const auto more = equal.find(axis);
            for (size_t i = 0; more != equal.end() && i < sum.size(); ++i) sum[i] += more->second * first[i];
            out.sums[axis].add(compared(sum));
          }
          for (const auto& [axis, count] : equal)
            if (!sums.contains(axis)) out.sums[axis].add(scaled(of_first, 1 + count));
        });
    return out;
  }

  // Sets the factors of output gradients from the last module of the forward pass.
  void find_factors() {
    const Key* last = nullptr;
    for (const auto& [key, batches] : found_.tensors())
      if (key.kind == Kind::output_grad && expected_.find(key.kind, key.name) &&
          (!last || order(key.name) > order(last->name)))
        last = &key;
    if (!last) return;
    for (const auto& [pair, sums] : accumulate(*last, found_.tensors().at(*last), *counterpart(*last)).pairs)
      factors_[pair] = sums.factor();
  }

  TensorResult compare(const Key& key) const {
    return result(key, accumulate(key, found_.tensors().at(key), *counterpart(key)));
  }

  TensorResult result(const Key& key, const Accumulated& all) const {
    const auto& tensors = found_.tensors().at(key);
    const auto& others = *counterpart(key);
    TensorResult out{.key = key};
    out.ndim = std::ssize(tensors.begin()->second.shape);
    const StoredTensor &a = tensors.begin()->second, &e = others.begin()->second;
    out.shape_differs = is_batched(key.kind) ? a.width() != e.width() : a.shape != e.shape;
    out.padded = out.shape_differs && is_vocabulary(key.name) && a.shape.size() == e.shape.size() &&
                 (is_batched(key.kind) || a.shape[0] > e.shape[0]);
    for (size_t r = 0; r < all.replicas.size(); ++r) {
      const Sums& s = all.replicas[r];
      const double distance = s.ee == 0 && s.dd > 0 ? std::numeric_limits<double>::infinity() : s.distance();
      if (r == 0 || distance > out.distance) {
        out.distance = distance, out.factor = s.factor(), out.replica = r, out.elements = s.n;
        out.size = s.n > 0 ? std::sqrt(s.ee / static_cast<double>(s.n)) : 0;
      }
    }
    return out;
  }
};

// Number of layers on the path to the tensor.
double depth(const Comparison& c, const Key& key, int64_t layers) {
  const int64_t layer = layer_index(key.name);
  const double forward = static_cast<double>(layer >= 0 ? layer + 1 : c.order(key.name) < 0 ? 1 : layers + 1);
  if (key.kind == Kind::parameter) return 1;
  return key.kind == Kind::output ? forward : 2.0 * static_cast<double>(layers + 1) - forward + 1;
}

void set_tolerances(const Comparison& c, const std::vector<Comparison>& repeats, std::vector<TensorResult>& all) {
  int64_t layers = 0;
  for (const TensorResult& t : all) layers = std::max(layers, layer_index(t.key.name) + 1);
  const double eps = std::max(c.found_.epsilon(), c.expected_.epsilon());
  const bool narrow = eps > 1e-4;
  double trained = 0;  // tokens; the rounding errors of a token's values are correlated
  for (const TokenRow& row : c.found_.rows())
    trained += static_cast<double>(std::ranges::count_if(row.targets, [](int64_t target) { return target >= 0; }));
  for (TensorResult& t : all) {
    Key key = t.key;  // in the reference, where a tied head is the table
    if (!c.expected_.tensors().contains(key))
      for (const auto& [other, tensors] : c.expected_.tensors())
        if (&tensors == c.counterpart(t.key)) key = other;
    const double steps = eps * std::sqrt(depth(c, key, layers));
    t.tolerance = t.key.kind == Kind::parameter ? 4 * eps : (narrow ? 4 : 64) * steps;
    double factor = 0;
    if (!repeats.empty() && t.key.kind != Kind::parameter) {
      t.tolerance = (narrow ? 1 : 8) * steps;
      for (const Comparison& repeat : repeats)
        if (repeat.found_.tensors().contains(key) && repeat.counterpart(key)) {
          const TensorResult measured = repeat.compare(key);
          t.tolerance = std::max(t.tolerance, kMargin * measured.distance);
          factor = std::max(factor, kMargin * std::abs(measured.factor - 1));
        }
    }
    const double noise = kMargin / std::sqrt(static_cast<double>(std::max<int64_t>(1, t.elements)));
    const double of_tokens = t.key.kind != Kind::parameter && trained > 0 ? 1 / std::sqrt(trained) : 0;
    t.factor_tolerance = std::max(factor, t.tolerance * std::max(noise, of_tokens)) + eps * (narrow ? 1.0 / 64 : 8);
  }
}

// Decides what is wrong, and compares replicas.
void judge(const Comparison& c, const std::map<Key, Accumulated>& sums, std::vector<TensorResult>& all) {
  std::map<Kind, double> sizes;
  for (const TensorResult& t : all) sizes[t.key.kind] = std::max(sizes[t.key.kind], t.size);
  const double eps = std::max(c.found_.epsilon(), c.expected_.epsilon());
  for (TensorResult& t : all) {
    const Accumulated& parts = sums.at(t.key);
    for (size_t r = 1; r < parts.between.size(); ++r) {
      if (parts.between[r].distance() <= t.tolerance) continue;
      const StoredTensor& stored = c.found_.tensors().at(t.key).begin()->second;
      const auto axes = r < stored.replicas.size() ? c.found_.differing_axes(stored, 0, r) : std::vector<std::string>();
      if (!axes.empty() && (t.axis.empty() || axes.size() == 1)) t.axis = fmt::format("{}", fmt::join(axes, "+"));
      if (axes.empty() && t.axis.empty()) t.axis = "ranks";
    }
    if (const auto sum = parts.sums.find(t.axis); sum != parts.sums.end())
      if (sum->second.residual() <= std::max(2 * t.tolerance, 1e-6)) t.sum_factor = sum->second.factor();
    t.wrong =
        !t.axis.empty() || t.shape_differs || t.distance > t.tolerance || std::abs(t.factor - 1) > t.factor_tolerance;
    // Rounding errors of sums whose exact value is near zero, such as gradients of the bias of keys.
    const bool noise = t.key.kind != Kind::parameter && t.size < 16 * eps * sizes[t.key.kind];
    t.undecided = t.tolerance > kUndecided || (noise && t.distance > t.tolerance);
    if (t.undecided && (noise || t.distance <= t.tolerance)) t.wrong = false;
  }
}

// Parameters that have a gradient only in the reference.
void add_missing(const Comparison& c, std::vector<TensorResult>& all) {
  for (const auto& [key, batches] : c.expected_.tensors())
    if (key.kind == Kind::grad && !c.found_.find(key.kind, key.name) && c.found_.find(Kind::parameter, key.name))
      all.push_back(
          {.key = key, .distance = 1, .factor = 0, .ndim = std::ssize(batches.begin()->second.shape), .wrong = true});
}

// Fits the gradient of the last norm to those of its micro-batches, computed from its outputs and their gradients.
void find_weights(const Comparison& c, RecordedStep& seen) {
  std::string last;
  for (const auto& [key, batches] : c.found_.tensors())
    if (key.kind == Kind::output_grad && (last.empty() || c.order(key.name) > c.order(last)) &&
        (c.found_.find(Kind::grad, key.name + ".bias") || c.found_.find(Kind::grad, key.name + ".weight")) &&
        !norm_gradients(c.found_, key.name, batches.begin()->first, 1).empty())
      last = key.name;
  if (last.empty()) return;
  const auto* gradient = c.found_.find(Kind::grad, last + ".bias");
  if (!gradient) gradient = c.found_.find(Kind::grad, last + ".weight");
  std::vector<std::vector<double>> columns;
  std::vector<double> found, factors;
  c.found_.read(gradient->begin()->second, 0, {0, 1}, found);
  for (const auto& [batch, tensor] : *c.found_.find(Kind::output_grad, last)) {
    columns.push_back(norm_gradients(c.found_, last, batch, seen.loss_scale));
    double factor = 1;
    for (const auto& [pair, of_pair] : c.factors())
      if (pair.first == batch) factor = of_pair / seen.loss_scale;
    factors.push_back(factor);
    int64_t targets = 0;
    for (const TokenRow& row : c.found_.rows())
      if (row.batch == batch) targets += std::ranges::count_if(row.targets, [](int64_t t) { return t >= 0; });
    seen.targets.push_back(targets);
  }
  if (columns.size() > found.size() || columns.size() > 64 ||
      std::ranges::any_of(columns, [&](const auto& column) { return column.size() != found.size(); }) ||
      std::ranges::any_of(found, [](double x) { return std::isnan(x); }))
    return;
  const Mixture fit = fit_mixture(columns, found);
  if (fit.residual > 0.05) return;
  for (size_t i = 0; i < factors.size(); ++i) seen.weights.push_back(fit.weights[i] * factors[i]);
}

// The loss of the step under the convention that is nearest to the expected value.
std::optional<TensorResult> compare_losses(const Recording& found, const Recording& expected, double tolerance,
                                           RecordedStep& seen) {
  const auto parts = [](const Recording& r) {
    std::vector<std::tuple<double, double, bool>> out;  // value, tokens, sum
    for (const RankInfo& rank : r.ranks()) {
      if (const auto tp = rank.axes.find("tp"); tp != rank.axes.end() && tp->second.first > 0) continue;
      for (const nlohmann::json& loss : value_at(rank.info, "losses"))
        if (value_at(loss, "value").is_number())
          out.emplace_back(loss["value"].get<double>(), loss.value("tokens", 1.0),
                           loss.value("reduction", "") == "sum");
    }
    const auto* const stored = out.empty() ? r.find(Kind::loss, "loss") : nullptr;
    std::vector<double> value;
    for (const auto& [batch, t] : stored ? *stored : std::map<Batch, StoredTensor>()) {
      r.read(t, 0, {0, 1}, value);
      double tokens = 0;
      for (const TokenRow& row : r.rows())
        if (row.batch == batch || stored->size() == 1)
          tokens += static_cast<double>(std::ranges::count_if(row.targets, [](int64_t x) { return x >= 0; }));
      out.emplace_back(value[0], std::max(1.0, tokens), false);
    }
    return out;
  };
  const auto ours = parts(found), theirs = parts(expected);
  if (ours.empty() || theirs.empty()) return {};
  // Under each convention: means or sums over tokens or micro-batches, of all data ranks or averaged over them.
  const auto values = [](const auto& all, double dp, double m) {
    double mean = 0, sum = 0, tokens = 0;
    for (const auto& [value, count, is_sum] : all) mean += value * count, sum += value, tokens += count;
    mean /= tokens;
    return std::array{mean, m * mean, dp * mean, m * dp * mean, m / dp * mean, sum, sum / dp, sum / tokens};
  };
  const auto their_m = static_cast<double>(natural(expected.info("microbatches")).value_or(1));
  TensorResult out{.key = {Kind::loss, "loss"}};
  out.distance = std::numeric_limits<double>::infinity();
  for (const double x : values(ours, static_cast<double>(seen.dp), static_cast<double>(seen.microbatches)))
    for (const double y : values(theirs, static_cast<double>(expected.axis_size("dp")), their_m))
      if (const double d = std::abs(x - y) / std::abs(y); d < out.distance) {
        out.distance = d, out.factor = x / y;
        seen.loss_difference = x - y;
      }
  out.tolerance = out.factor_tolerance = tolerance;
  out.wrong = out.distance > tolerance;
  out.elements = 1;
  return out;
}

// Tokens of the first contiguous chunk of a context rank.
int64_t context_chunk(const Recording& r) {
  const auto* const ids = r.find(Kind::input_ids, "input_ids");
  if (!ids || r.rows().empty()) return 0;
  const Slice& first = ids->begin()->second.replicas[0][0];
  return first.index.size() == 2 && !first.index[1].empty() ? first.index[1][0].size() : std::ssize(r.rows()[0].ids);
}

// The factor that all output gradients have in common; 0 if there is none.
double common_factor(const Pairing::Factors& factors, double loss_scale) {
  if (factors.empty()) return 0;
  const double first = factors.begin()->second / loss_scale;
  const bool same = std::ranges::all_of(
      factors, [&](const auto& f) { return std::abs(f.second / loss_scale - first) <= 0.01 * std::abs(first); });
  return same ? first : 0;
}

RecordedStep describe(const Comparison& c) {
  const Recording& found = c.found_;
  RecordedStep out{.dp = found.axis_size("dp"),
                   .tp = found.axis_size("tp"),
                   .cp = found.axis_size("cp"),
                   .pp = found.axis_size("pp"),
                   .ep = found.axis_size("ep")};
  out.microbatches = natural(found.info("microbatches")).value_or(1);
  for (const TokenRow& row : found.rows())
    out.tokens += std::ranges::count_if(row.targets, [](int64_t t) { return t >= 0; });
  for (const nlohmann::json& loss : found.info("losses"))
    if (value_at(loss, "scale").is_number()) out.loss_scale = loss["scale"].get<double>();
  out.output_factor = common_factor(c.factors(), out.loss_scale);
  out.dropout = found.info("dropout") == true;
  for (const RankInfo& rank : found.ranks())
    for (const nlohmann::json& module : value_at(rank.info, "recomputed")) out.recomputed.push_back(module.dump());
  out.dropped = c.match().dropped, out.repeated = c.match().repeated, out.foreign = c.match().foreign;
  out.logits_sum = sum_logits(found);
  if (!found.rows().empty()) out.sequence = std::ssize(found.rows()[0].ids);
  out.chunk = context_chunk(found);
  out.same_masks = equal_masks(found);
  out.gaps = found.findings();
  return out;
}

// Elements that are wrong relative to the recorded input are not located.
Divergence locate_local(const Recording& found, const TensorResult& t) {
  Divergence out{.tensor = t, .layer = layer_index(t.key.name)};
  const auto* const stored = found.find(t.key.kind, t.key.name);
  if (!stored || !stored->contains(t.local->batch)) return out;
  out.rank = std::max(0, found.owner(stored->at(t.local->batch), t.local->replica, 0, 0));
  if (is_batched(t.key.kind)) out.microbatch = t.local->batch.second;
  return out;
}

}  // namespace

AuditResult compare(const Recording& found, const Recording& expected, const Repeats& repeats,
                    const LocalErrors& local) {
  Comparison c(found, expected);
  if (!found.rows().empty() && !expected.rows().empty() && c.match().matched == 0)
    bad_input("{}: expected the tokens of {}, got others", found.what(), expected.what());
  AuditResult out;
  out.measured = !repeats.empty();
  c.find_factors();
  out.seen = describe(c);
  std::vector<Comparison> measures;
  for (const auto& repeat : repeats) {
    measures.emplace_back(*repeat, expected).find_factors();
    if (!repeat->rows().empty() && measures.back().match().matched == 0)
      bad_input("{}: expected the tokens of {}, got others", repeat->what(), expected.what());
  }
  int64_t others = 0, parameters = 0;
  std::set<std::string> missing;
  std::map<Key, Accumulated> sums;
  for (const auto& [key, batches] : found.tensors()) {
    if (!is_compared(key.kind)) continue;
    if (const auto* const there = c.counterpart(key)) {
      const Accumulated& all = sums[key] = c.accumulate(key, batches, *there);
      out.tensors.push_back(c.result(key, all));
      if (out.tensors.back().elements > 0) continue;
      out.tensors.pop_back();  // rows that are not those of the batch, such as an expert's
    }
    missing.insert(key.name);
  }
  if (out.tensors.empty())
    bad_input("{}: expected tensors of {}, got none of the same name", found.what(), expected.what());
  if (!missing.empty())
    out.notes.push_back(
        fmt::format("{} names are not compared: not in the reference, or not with the rows of the batch, such as {}",
                    missing.size(), *missing.begin()));
  set_tolerances(c, measures, out.tensors);
  judge(c, sums, out.tensors);
  for (TensorResult& t : out.tensors) add_local_error(local, 0, t);
  for (const TensorResult& t : out.tensors)
    if (t.key.kind == Kind::parameter) ++parameters, others += t.wrong && t.axis.empty() ? 1 : 0;
  if (parameters > 2 && static_cast<double>(others) > kOtherModel * static_cast<double>(parameters))
    bad_input("{}: expected the parameters of {}, got other values of {} of {}", found.what(), expected.what(), others,
              parameters);
  for (const auto& [kind, count] :
       {std::pair{Kind::input_ids, c.match().dropped + c.match().repeated + c.match().foreign},
        {Kind::targets, c.match().other_targets}})
    if (count > 0)
      out.tensors.push_back({.key = {kind, std::string(to_string(kind))},
                             .distance = static_cast<double>(count) / static_cast<double>(found.rows().size()),
                             .elements = std::ssize(found.rows()),
                             .wrong = true});
  double loss_tolerance = 1e-6;
  for (const TensorResult& t : out.tensors)
    if (t.key.kind == Kind::output) loss_tolerance = std::max(loss_tolerance, std::min(t.tolerance, 0.02));
  if (auto loss = compare_losses(found, expected, loss_tolerance, out.seen)) {
    std::vector<double> value{0};
    if (const auto* const stored = expected.find(Kind::loss, "loss"))
      expected.read(stored->begin()->second, 0, {0, 1}, value);
    add_local_error(local, value[0], *loss);
    const bool others_right = std::ranges::none_of(out.tensors, &TensorResult::wrong);
    if (loss->wrong && others_right)
      out.notes.push_back(fmt::format(
          "the recorded loss is {:.6g} times that of the reference; everything else is equal", loss->factor));
    loss->wrong = loss->wrong && !others_right;
    out.tensors.push_back(*loss);
  }
  add_missing(c, out.tensors);
  find_weights(c, out.seen);
  check_update(found, expected, out);
  const auto place = [&](const TensorResult& t) {
    const double order = c.order(t.key.name);
    const bool reversed = t.key.kind == Kind::output_grad || t.key.kind == Kind::grad;
    return std::tuple(t.key.kind, reversed ? -order : order, t.key.name);
  };
  std::ranges::stable_sort(out.tensors, {}, place);
  std::optional<double> backward;  // order of the first module with a wrong output gradient
  for (const TensorResult& t : out.tensors) {
    if (t.key.kind == Kind::grad) ++out.seen.gradients;
    if (t.padded) out.seen.padded_vocabulary = true;
    if (!t.wrong) continue;
    RecordedTensor& wrong =
        out.seen.wrong.emplace_back(RecordedTensor{.kind = std::string(to_string(t.key.kind)), .name = t.key.name});
    wrong.local = t.local && t.local->wrong;
    const LocalError e =
        wrong.local ? *t.local : LocalError{t.distance, t.tolerance, t.factor, t.factor_tolerance, true, false, {}, 0};
    wrong.distance = e.distance, wrong.tolerance = e.tolerance, wrong.axis = t.axis, wrong.ndim = t.ndim;
    const double residual = std::abs(e.distance * e.distance - (e.factor - 1) * (e.factor - 1));
    if (std::abs(e.factor - 1) > e.factor_tolerance &&
        std::sqrt(residual) <= std::max(e.tolerance * std::abs(e.factor), 1e-4 * std::abs(e.factor - 1)))
      wrong.factor = e.factor;
    if (t.sum_factor != 0) wrong.sum_factor = t.sum_factor;
    if (t.key.kind == Kind::output_grad && !backward) backward = c.order(t.key.name);
    wrong.downstream = t.key.kind == Kind::grad && backward && c.enclosing_order(t.key.name) > *backward;
    if (!out.first) out.first = t.only_local ? locate_local(found, t) : locate(c, t, wrong, out.seen);
  }
  out.causes = diagnose(out.seen);
  const bool convention = !out.causes.empty() && out.causes[0].cause == "sum-instead-of-mean" && out.causes.size() == 1;
  // Replicas that disagree are wrong whatever the reference's masks are.
  const bool masked = out.seen.dropout && out.first && out.first->tensor.key.kind == Kind::output &&
                      !out.seen.same_masks && out.first->tensor.axis.empty();
  if (masked) out.notes.push_back(fmt::format("dropout: the comparison ends at {}", out.first->tensor.key.name));
  out.verdict = convention           ? Verdict::correct
                : masked             ? Verdict::undecided
                : out.causes.empty() ? Verdict::correct
                                     : Verdict::diverges;
  return out;
}

}  // namespace tessera::audit
