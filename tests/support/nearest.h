// bfloat16 by its definition, and how far numbers are from it.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>

namespace tessera::test {

// The place of the last bit of a bfloat16 near x.
inline double unit_bf16(double x) { return std::ldexp(1.0, std::max(x == 0 ? -126 : std::ilogb(x), -126) - 7); }

// The bfloat16 that is nearest to x, of two the even one.
inline double nearest_bf16(double x) {
  if (!std::isfinite(x)) return x;
  const double nearest = std::nearbyint(x / unit_bf16(x)) * unit_bf16(x);  // the rounding mode is to nearest even
  return std::abs(nearest) < std::ldexp(1.0, 128) ? nearest : std::copysign(INFINITY, x);
}

// Errors in units of the last place, counted away from zero. Of rounding to nearest their mean is 0, and of cutting low
// bits off -0.5.
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
  // The largest mean that may come by chance.
  double chance() const { return 4.5 * std::sqrt(squares_) / n(); }

 private:
  double n() const { return static_cast<double>(std::max<int64_t>(count_, 1)); }
  double sum_ = 0, squares_ = 0;
  int64_t count_ = 0;
};

}  // namespace tessera::test
