// Reference bfloat16 rounding and its error.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>

namespace tessera::test {

// One unit in the last place of a bfloat16 near x.
inline double unit_bf16(double x) { return std::ldexp(1.0, std::max(x == 0 ? -126 : std::ilogb(x), -126) - 7); }

// The nearest bfloat16 to x, ties to even.
inline double nearest_bf16(double x) {
  if (!std::isfinite(x)) return x;
  const double nearest = std::nearbyint(x / unit_bf16(x)) * unit_bf16(x);  // in the default rounding mode, nearest even
  return std::abs(nearest) < std::ldexp(1.0, 128) ? nearest : std::copysign(INFINITY, x);
}

// Errors in units of the last place, positive away from zero. Their mean is 0 for rounding to nearest and -0.5 for
// truncation.
class RoundingError {
 public:
  void add(double found, double exact) {
    const double off = std::clamp((std::abs(found) - std::abs(exact)) / unit_bf16(exact), -2.0, 2.0);
    sum_ += off;
    squares_ += off * off;
    ++count_;
  }
  int64_t count() const { return count_; }
  double mean() const { return sum_ / n(); }
  // Maximum mean by chance.
  double chance() const { return 4.5 * std::sqrt(squares_) / n(); }

 private:
  double n() const { return static_cast<double>(std::max<int64_t>(count_, 1)); }
  double sum_ = 0, squares_ = 0;
  int64_t count_ = 0;
};

}  // namespace tessera::test
