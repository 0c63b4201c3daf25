// Two unknowns, of equations 1 = alpha / t + beta S / t.
#include "bench/fit.h"

#include <algorithm>
#include <cmath>
#include <set>

namespace tessera::bench {

std::optional<Fit> fit(const std::vector<Sample>& samples) {
  std::set<double> sizes;
  double xx = 0, xy = 0, yy = 0, x = 0, y = 0;  // sums over samples of 1 / t and S / t
  for (const auto& [bytes, seconds] : samples) {
    const double a = 1 / seconds, b = bytes / seconds;
    sizes.insert(bytes);
    xx += a * a;
    xy += a * b;
    yy += b * b;
    x += a;
    y += b;
  }
  if (sizes.size() < 3) return std::nullopt;
  const double determinant = xx * yy - xy * xy;
  double alpha = (x * yy - y * xy) / determinant, beta = (y * xx - x * xy) / determinant;
  if (!(alpha > 0)) {
    alpha = 0;
    beta = y / yy;
  }
  if (!(beta > 0)) return std::nullopt;
  Fit out{.latency = alpha, .bytes_per_s = 1 / beta};
  for (const auto& [bytes, seconds] : samples)
    out.worst = std::max(out.worst, std::abs((alpha + beta * bytes) / seconds - 1));
  return out;
}

}  // namespace tessera::bench
