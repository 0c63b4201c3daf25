// Bits first; a distance where they differ.
#include "verify/comparison.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstring>

namespace tessera {
namespace {

// Adds up |a - b|^2 and |b|^2.
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
  const auto [begin, end] = parameter.vanishes;
  if (end == 0) {
    d.add(a, b);
    return d.relative();
  }
  d.add(a.narrow(0, 0, begin), b.narrow(0, 0, begin));
  d.add(a.narrow(0, end, a.numel() - end), b.narrow(0, end, b.numel() - end));
  return d.relative();
}

void Comparison::number(int64_t step, const std::string& what, double found, double expected) {
  const double d = std::abs(found - expected) / std::abs(expected);
  if (what == "loss") {
    result_.losses.push_back(found);
    result_.loss_max_rel = std::max(result_.loss_max_rel, d);
  }
  if (found != expected) differs(d, fmt::format("step {}: the {} is {}; expected {}", step, what, found, expected));
}

void Comparison::tensors(int64_t step, const char* what, const std::vector<NamedTensor>& found,
                         const std::vector<FlatUnit>& units, const std::vector<Tensor>& whole, double& worst_distance) {
  size_t at = 0;
  for (size_t u = 0; u < units.size(); ++u)
    for (const Slot& slot : units[u].slots) {
      const Tensor expected = whole[u].narrow(0, slot.begin, slot.size).reshape(slot.parameter->stored());
      one({step, what, *slot.parameter}, found.at(at++), expected, worst_distance);
    }
}

void Comparison::one(const About& about, const NamedTensor& found, const Tensor& expected, double& worst_distance) {
  const Tensor a = found.tensor.contiguous(), b = expected.contiguous();
  if (a.nbytes() == b.nbytes() && std::memcmp(a.raw(), b.raw(), static_cast<size_t>(b.nbytes())) == 0) return;
  const double d = relative_distance(about.parameter, a, b);
  if (!(d <= worst_)) {
    worst_ = d;
    result_.worst = found.name;
  }
  worst_distance = std::max(worst_distance, d);
  differs(d,
          fmt::format("step {}: {} '{}' differs by {:.3g} of its norm; expected {}", about.step, about.what, found.name,
                      d, result_.exact || bits_ ? "the same bits" : fmt::format("at most {:.3g}", result_.bound)));
}

// The first difference says most.
void Comparison::differs(double distance, const std::string& line) {
  result_.bitwise = false;
  if (!result_.exact && !bits_ && distance <= result_.bound) return;
  if (!reported_) result_.failures.push_back(line);
  reported_ = true;
}

}  // namespace tessera
