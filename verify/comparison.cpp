// Comparison of tensors: first bitwise, then by distance.
#include "verify/comparison.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "train/plan.h"
#include "verify/diagnosis/differences.h"

namespace tessera {
namespace {

struct Distance {
  double difference = 0, norm = 0;
  void add(const Tensor& a, const Tensor& b) {
    const std::vector<double> x = a.to(DType::float64).to_vector<double>(),
                              y = b.to(DType::float64).to_vector<double>();
    for (size_t i = 0; i < x.size(); ++i) {
      difference += (x[i] - y[i]) * (x[i] - y[i]);
      norm += y[i] * y[i];
    }
  }
  double relative() const { return difference == 0 ? 0 : std::sqrt(difference / norm); }
};

}  // namespace

double relative_distance(const Parameter& parameter, const Tensor& a, const Tensor& b) {
  Distance d;
  const auto [begin, end] = parameter.zero_grad_range;
  if (end == 0) {
    d.add(a, b);
    return d.relative();
  }
  d.add(a.narrow(0, 0, begin), b.narrow(0, 0, begin));
  d.add(a.narrow(0, end, a.numel() - end), b.narrow(0, end, b.numel() - end));
  return d.relative();
}

namespace {

constexpr int64_t kSteps = 20;  // failing steps with one line per tensor

Tensor assemble_full(const Slot& slot, const std::vector<Tensor>& units, size_t unit) {
  if (units.empty()) return {};
  return units[unit].narrow(0, slot.begin, slot.size).reshape(slot.parameter->stored()).contiguous();
}

bool bitwise_equal(const Tensor& a, const Tensor& b) {
  return a.nbytes() == b.nbytes() && std::memcmp(a.raw(), b.raw(), static_cast<size_t>(b.nbytes())) == 0;
}

const char* to_string(TensorDifference::Kind kind) {
  using Kind = TensorDifference::Kind;
  return kind == Kind::gradient ? "gradient" : kind == Kind::parameter ? "parameter" : "state";
}

}  // namespace

void Comparison::note(int64_t step) {
  if (result_.wrong_steps.empty() || result_.wrong_steps.back() != step) result_.wrong_steps.push_back(step);
}

void Comparison::number(int64_t step, const std::string& what, double found, double expected) {
  const double d = std::abs(found - expected) / std::abs(expected);
  if (what == "loss") {
    result_.losses.push_back(found);
    result_.loss_max_rel = std::max(result_.loss_max_rel, d);
  }
  if (found == expected) return;
  result_.bitwise = false;
  if (allowed(d)) return;
  note(step);
  if (std::ssize(result_.wrong_steps) <= kSteps) result_.seen.scalars.push_back({step, what, found, expected});
}

bool Comparison::tensors(const Tensors& all, double& worst_distance) {
  size_t at = 0;
  bool right = true;
  std::vector<Compared> pairs;
  for (size_t u = 0; u < all.units.size(); ++u)
    for (const Slot& slot : all.units[u].slots) {
      const NamedTensor& found = all.found.at(at);
      const Tensor owners = all.owners.empty() ? Tensor() : all.owners.at(at).tensor;
      ++at;
      const Pair pair{*slot.parameter, assemble_full(slot, all.full, u), assemble_full(slot, all.before, u), owners};
      right = one(all, found, pair, worst_distance) && right;
      if (all.kind == TensorDifference::Kind::parameter) pairs.push_back({found.tensor.contiguous(), pair.expected});
    }
  const bool first = result_.wrong_steps.size() == 1 && result_.wrong_steps[0] == all.step;
  if (!right && first && !pairs.empty()) result_.seen.permuted = are_permuted(pairs);
  return right;
}

bool Comparison::one(const Tensors& all, const NamedTensor& found, const Pair& pair, double& worst_distance) {
  const Tensor a = found.tensor.contiguous();
  if (bitwise_equal(a, pair.expected)) return true;
  const double d = relative_distance(pair.parameter, a, pair.expected);
  if (!(d <= worst_)) {
    worst_ = d;
    result_.worst = found.name;
  }
  worst_distance = std::max(worst_distance, d);
  result_.bitwise = false;
  if (allowed(d)) return true;
  note(all.step);
  if (std::ssize(result_.wrong_steps) > kSteps) return false;
  const double tolerance = result_.exact || bits_ ? 0 : result_.bound;
  TensorDifference wrong = compute_difference({a, pair.expected, pair.before, pair.owners, tolerance});
  wrong.step = all.step;
  wrong.kind = all.kind;
  wrong.name = found.name;
  wrong.distance = d;
  wrong.of_expert = pair.parameter.is_expert;
  wrong.rank += all.rank_of_copy;
  result_.seen.tensors.push_back(std::move(wrong));
  return false;
}

namespace {

std::string to_line(const TensorDifference& t, const VerifyResult& result) {
  const bool bits = result.exact || t.kind != TensorDifference::Kind::gradient;
  std::string line =
      fmt::format("step {}: {} '{}' differs by {:.3g} of its norm; expected {}", t.step, to_string(t.kind), t.name,
                  t.distance, bits ? "bitwise equality" : fmt::format("at most {:.3g}", result.bound));
  if (t.wrong == 0) return line;
  line += fmt::format("; {} of {} elements", t.wrong, t.elements);
  if (t.unchanged)
    line += ", unchanged by the step";
  else if (t.distance <= result.seen.rounding)
    line += ", within rounding error";
  else if (t.factor)
    line += fmt::format(", all {:.4g} times the expected value", *t.factor);
  return line + fmt::format(", first [{}] on rank {}: {:.6g} instead of {:.6g}", fmt::join(t.first, ", "), t.rank,
                            t.found, t.expected);
}

}  // namespace

std::vector<std::string> to_lines(const VerifyResult& result) {
  std::vector<std::string> out;
  const auto& steps = result.wrong_steps;
  if (steps.empty()) return out;
  const auto add_scalars = [&](int64_t step) {
    for (const ScalarDifference& n : result.seen.scalars)
      if (n.step == step)
        out.push_back(fmt::format("step {}: the {} is {}; expected {}", step, n.what, n.found, n.expected));
  };
  add_scalars(steps[0]);
  for (const TensorDifference& t : result.seen.tensors)
    if (t.step == steps[0]) out.push_back(to_line(t, result));
  for (size_t i = 1; i < std::min<size_t>(steps.size(), kSteps); ++i) {
    std::array<int64_t, 3> counts{};
    for (const TensorDifference& t : result.seen.tensors)
      if (t.step == steps[i]) ++counts[static_cast<size_t>(t.kind)];
    const auto scalars =
        std::ranges::count_if(result.seen.scalars, [&](const ScalarDifference& n) { return n.step == steps[i]; });
    out.push_back(fmt::format(
        "step {}: {} scalars (loss, gradient norm), {} gradients, {} parameters and {} state tensors also differ",
        steps[i], scalars, counts[0], counts[1], counts[2]));
  }
  if (std::ssize(steps) > kSteps) out.push_back(fmt::format("and {} more steps", std::ssize(steps) - kSteps));
  return out;
}
}  // namespace tessera
