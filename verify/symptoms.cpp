// What the first step that is wrong looks like.
#include "verify/symptoms.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cctype>
#include <cmath>
#include <set>

namespace tessera {
namespace {

constexpr double kSameFactor = 1e-2;
constexpr size_t kNamed = 3;  // tensors that a text names

bool is_data(const std::string& axis) { return axis.starts_with("dp") || axis == "edp"; }

double relative(const NumberDifference& n) { return std::abs(n.found - n.expected) / std::abs(n.expected); }

}  // namespace

bool is_sum(const SentDifference& s) {
  return s.operation == "all_reduce" || s.operation == "reduce_scatter" || s.operation == "reduce";
}

bool is_gather(const SentDifference& s) {
  return s.operation == "all_gather" || s.operation == "broadcast" || s.operation == "gather";
}

Symptoms::Symptoms(const Observations& seen) : seen_(seen) {
  const auto note = [&](int64_t step) { step_ = step_ == 0 ? step : std::min(step_, step); };
  for (const NumberDifference& n : seen.numbers) note(n.step);
  for (const TensorDifference& t : seen.tensors) note(t.step);
  for (const TensorDifference& t : seen.tensors) {
    if (t.step != step_) continue;
    using Kind = TensorDifference::Kind;
    (t.kind == Kind::gradient ? gradients_ : t.kind == Kind::parameter ? parameters_ : state_).push_back(&t);
  }
}

bool Symptoms::wrong(const std::string& what) const {
  return std::ranges::any_of(seen_.numbers,
                             [&](const NumberDifference& n) { return n.step == step_ && n.what == what; });
}

bool Symptoms::only_rounding() const {
  for (const TensorDifference* g : gradients_)
    if (!(g->distance < seen_.rounding)) return false;
  return std::ranges::all_of(
      seen_.numbers, [&](const NumberDifference& n) { return n.step != step_ || relative(n) < seen_.rounding; });
}

double Symptoms::common_factor() const {
  if (gradients_.empty() || std::ssize(gradients_) < seen_.trained) return 0;
  const double first = gradients_[0]->factor.value_or(0);
  for (const TensorDifference* g : gradients_)
    if (!g->factor || std::abs(*g->factor - first) > kSameFactor * std::abs(first)) return 0;
  return first;
}

double Symptoms::moment_factor() const {
  std::vector<double> factors;
  size_t moments = 0;
  for (const TensorDifference* s : state_) {
    const bool is_moment = s->name.ends_with(".m") || s->name.ends_with(".momentum");
    moments += is_moment ? 1 : 0;
    if (is_moment && s->factor) factors.push_back(*s->factor);
  }
  if (factors.empty() || 3 * factors.size() < moments) return 0;
  std::ranges::sort(factors);
  const double middle = factors[factors.size() / 2];
  const auto alike =
      std::ranges::count_if(factors, [&](double f) { return std::abs(f - middle) < kSameFactor * std::abs(middle); });
  return 2 * static_cast<size_t>(alike) > factors.size() && std::abs(middle - 1) > kSameFactor ? middle : 0;
}

const SentDifference* Symptoms::sent(const std::string& axis, const Which& is, bool fewer) const {
  for (const SentDifference& s : seen_.sent) {
    if (axis == "data" ? !is_data(s.axis) : !axis.empty() && s.axis != axis) continue;
    if (is && !is(s)) continue;
    if (fewer ? s.bytes < s.expected_bytes : s.bytes > s.expected_bytes) return &s;
  }
  return nullptr;
}
const SentDifference* Symptoms::fewer(const std::string& axis, const Which& is) const { return sent(axis, is, true); }
const SentDifference* Symptoms::more(const std::string& axis, const Which& is) const { return sent(axis, is, false); }

const Probe* Symptoms::passing() const {
  const auto found = std::ranges::find_if(seen_.probes, [](const Probe& p) { return p.passes; });
  return found == seen_.probes.end() ? nullptr : &*found;
}

std::string Symptoms::bytes_text(const SentDifference& s) const {
  const int64_t by = std::abs(s.bytes - s.expected_bytes);
  return fmt::format("{} bytes {} than the formula in {} on the {} axis ({} instead of {})", by,
                     s.bytes < s.expected_bytes ? "fewer" : "more", s.operation, s.axis, s.bytes, s.expected_bytes);
}

std::string Symptoms::gradients_text() const {
  if (gradients_.empty()) return "all gradients are right";
  std::vector<std::string> names;
  for (size_t i = 0; i < std::min(kNamed, gradients_.size()); ++i) names.push_back(gradients_[i]->name);
  return fmt::format("{} of {} gradients are wrong ({}{})", gradients_.size(), seen_.trained, fmt::join(names, ", "),
                     gradients_.size() > kNamed ? ", ..." : "");
}

std::string Symptoms::blocks_text() const {
  std::set<int64_t> blocks;
  for (const TensorDifference* g : gradients_)
    if (const size_t dot = g->name.find('.'); dot != std::string::npos && std::isdigit(g->name[dot + 1]) != 0)
      blocks.insert(std::strtoll(g->name.c_str() + dot + 1, nullptr, 10));
  if (blocks.empty()) return "";
  if (blocks.size() == 1) return fmt::format(" of block {}", *blocks.begin());
  return fmt::format(" of blocks {} to {}", *blocks.begin(), *blocks.rbegin());
}

std::string Symptoms::numbers_text() const {
  std::vector<std::string> out;
  for (const NumberDifference& n : seen_.numbers)
    if (n.step == step_) out.push_back(fmt::format("the {} is {:.6g} instead of {:.6g}", n.what, n.found, n.expected));
  return out.empty() ? "loss and gradient norm are right" : fmt::format("{}", fmt::join(out, ", "));
}

std::string Symptoms::ranks_text() const {
  std::set<int> ranks;
  for (const auto* all : {&parameters_, &state_})
    for (const TensorDifference* t : *all) ranks.insert(t->rank);
  return fmt::format("rank{} {}", ranks.size() == 1 ? "" : "s", fmt::join(ranks, ", "));
}

}  // namespace tessera
