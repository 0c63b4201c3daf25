// Attention and its gradients in float64, query by query, and operands with extreme scores.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

#include "tensor/random.h"
#include "tests/support/nearest.h"

namespace tessera::test {

struct AttentionShape {
  int64_t b = 1, tq = 1, tk = 1, h = 1, k = 1, d = 4;  // h query heads on k key/value heads
  bool causal = true;                                  // query i attends to keys up to tk - tq + i
  int64_t queries() const { return b * tq * h * d; }
  int64_t keys() const { return b * tk * k * d; }
  size_t query(int64_t n, int64_t t, int64_t head) const { return static_cast<size_t>(((n * tq + t) * h + head) * d); }
  size_t key(int64_t n, int64_t t, int64_t head) const {
    return static_cast<size_t>(((n * tk + t) * k + head * k / h) * d);
  }
};

// Each array has the shape (B, T, H, D).
struct AttentionValues {
  std::vector<double> q, k, v, dout;
};

// Distribution of scores.
enum class Extreme : uint8_t { apart, rising, falling, alternating, equal, zero };
inline constexpr Extreme kExtremes[] = {Extreme::apart,       Extreme::rising, Extreme::falling,
                                        Extreme::alternating, Extreme::equal,  Extreme::zero};

// Each key's scores are near its level, which varies between blocks of keys or between keys.
inline double level(Extreme extreme, int64_t j, int64_t tokens, const Philox& random) {
  constexpr int64_t kBlock = 16;  // smaller than a kernel's blocks, so that each of those contains several levels
  const double rising = 240.0 * static_cast<double>(j) / static_cast<double>(tokens) - 120;
  if (extreme == Extreme::apart)
    return 60.0 * static_cast<double>(random.below(5, static_cast<uint64_t>(j / kBlock), 1)) - 120;
  if (extreme == Extreme::rising) return rising;
  if (extreme == Extreme::falling) return -rising;
  return extreme != Extreme::alternating ? 0 : j % 2 == 0 ? 100 : -100;
}

// Random values that bfloat16 represents exactly.
inline AttentionValues sample_extreme(const AttentionShape& s, Extreme extreme, uint64_t seed) {
  const Philox random = Philox::named(seed, "extremes");
  uint64_t at = 0;
  const auto normal = [&] { return nearest_bf16(extreme == Extreme::equal ? 0.75 : random.normal(at++)); };
  AttentionValues x;
  for (int64_t i = 0; i < s.queries(); ++i) x.q.push_back(extreme == Extreme::zero ? 0 : normal());
  for (int64_t i = 0; i < s.keys(); ++i) x.k.push_back(normal());
  for (int64_t i = 0; i < s.keys(); ++i) x.v.push_back(normal());
  for (int64_t i = 0; i < s.queries(); ++i) x.dout.push_back(normal());
  if (extreme == Extreme::equal || extreme == Extreme::zero) return x;
  // The first element of a query is sqrt(D), that of a key its level.
  for (size_t i = 0; i < x.q.size(); i += static_cast<size_t>(s.d))
    x.q[i] = nearest_bf16(std::sqrt(static_cast<double>(s.d)));
  for (int64_t n = 0; n < s.b; ++n)
    for (int64_t j = 0; j < s.tk; ++j)
      for (int64_t head = 0; head < s.k; ++head)
        x.k[static_cast<size_t>(((n * s.tk + j) * s.k + head) * s.d)] = nearest_bf16(level(extreme, j, s.tk, random));
  return x;
}

struct PlainAttention {
  std::vector<double> out, lse, dq, dk, dv;  // lse (B, H, Tq)
  std::vector<double> dq_terms, dk_terms;    // dq and dk without cancellation
};

inline PlainAttention reference_attention(const AttentionShape& s, const AttentionValues& x) {
  PlainAttention y;
  for (std::vector<double>* of : {&y.out, &y.dq, &y.dq_terms}) of->resize(x.q.size());
  for (std::vector<double>* of : {&y.dk, &y.dv, &y.dk_terms}) of->resize(x.k.size());
  y.lse.resize(static_cast<size_t>(s.b * s.h * s.tq));
  const double scale = 1 / std::sqrt(static_cast<double>(s.d));
  const auto dot = [&](const std::vector<double>& a, size_t i, const std::vector<double>& b, size_t j) {
    double sum = 0;
    for (size_t c = 0; c < static_cast<size_t>(s.d); ++c) sum += a[i + c] * b[j + c];
    return sum;
  };
  const auto add = [&](std::vector<double>& to, size_t i, double by, const std::vector<double>& from, size_t j) {
    for (size_t c = 0; c < static_cast<size_t>(s.d); ++c) to[i + c] += by * from[j + c];
  };
  for (int64_t n = 0; n < s.b; ++n)
    for (int64_t head = 0; head < s.h; ++head)
      for (int64_t t = 0; t < s.tq; ++t) {
        const size_t q = s.query(n, t, head);
        const int64_t seen = s.causal ? s.tk - s.tq + t + 1 : s.tk;
        std::vector<double> p;
        double largest = -INFINITY, sum = 0;
        for (int64_t j = 0; j < seen; ++j) {
          p.push_back(scale * dot(x.q, q, x.k, s.key(n, j, head)));
          largest = std::max(largest, p.back());
        }
        for (double& one : p) sum += one = std::exp(one - largest);
        y.lse[static_cast<size_t>((n * s.h + head) * s.tq + t)] = largest + std::log(sum);
        double delta = 0, terms = 0;  // sum p dp
        for (int64_t j = 0; j < seen; ++j) {
          double& one = p[static_cast<size_t>(j)];
          one /= sum;
          add(y.out, q, one, x.v, s.key(n, j, head));
          const double dp = dot(x.dout, q, x.v, s.key(n, j, head));
          delta += one * dp;
          terms += one * std::abs(dp);
        }
        for (int64_t j = 0; j < seen; ++j) {
          const size_t k = s.key(n, j, head);
          const double one = p[static_cast<size_t>(j)], dp = dot(x.dout, q, x.v, k);
          add(y.dq, q, scale * one * (dp - delta), x.k, k);
          add(y.dk, k, scale * one * (dp - delta), x.q, q);
          for (size_t c = 0; c < static_cast<size_t>(s.d); ++c) {
            y.dq_terms[q + c] += scale * one * (std::abs(dp) + terms) * std::abs(x.k[k + c]);
            y.dk_terms[k + c] += scale * one * (std::abs(dp) + terms) * std::abs(x.q[q + c]);
          }
          add(y.dv, k, one, x.dout, q);
        }
      }
  return y;
}

// Largest difference in a row of `width` elements, relative to the row's largest `terms`, or to `floor` times the
// overall largest.
inline double row_difference(const std::vector<double>& found, const std::vector<double>& expected, int64_t width,
                             double floor, const std::vector<double>& terms) {
  const auto w = static_cast<size_t>(width);
  double all = 0, worst = 0;
  for (const double e : terms) all = std::max(all, std::abs(e));
  for (size_t row = 0; row < expected.size(); row += w) {
    double largest = std::max(floor * all, 1e-30), off = 0;
    for (size_t c = row; c < row + w; ++c) {
      largest = std::max(largest, std::abs(terms[c]));
      off = std::isfinite(found.at(c)) ? std::max(off, std::abs(found[c] - expected[c])) : INFINITY;
    }
    worst = std::max(worst, off / largest);
  }
  return worst;
}
inline double row_difference(const std::vector<double>& found, const std::vector<double>& expected, int64_t width,
                             double floor) {
  return row_difference(found, expected, width, floor, expected);
}

}  // namespace tessera::test
