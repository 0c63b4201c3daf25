// Corresponding elements of two recordings.
#pragma once
#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "verify/audit/recording.h"

namespace tessera::audit {

// Least-squares statistics of found and expected values; elements in no slice are skipped.
struct Sums {
  double ff = 0, fe = 0, ee = 0, dd = 0;  // dd: squared differences from `scale` times the expected values
  int64_t n = 0;
  // Four independent sums per quantity, which vectorize.
  void add(std::span<const double> found, std::span<const double> expected, double scale) {
    constexpr size_t kLanes = 4;
    std::array<double, kLanes> f2{}, e2{}, product{}, d2{}, count{};
    const auto element = [&](size_t lane, double f, double e) {
      const bool both = f == f && e == e;
      const double x = both ? f : 0, y = both ? scale * e : 0;
      f2[lane] += x * x, e2[lane] += y * y, product[lane] += x * y, d2[lane] += (x - y) * (x - y);
      count[lane] += both ? 1.0 : 0.0;
    };
    size_t i = 0;
    for (; i + kLanes <= found.size(); i += kLanes)
      for (size_t lane = 0; lane < kLanes; ++lane) element(lane, found[i + lane], expected[i + lane]);
    for (; i < found.size(); ++i) element(0, found[i], expected[i]);
    for (size_t lane = 0; lane < kLanes; ++lane) {
      ff += f2[lane], fe += product[lane], ee += e2[lane], dd += d2[lane];
      n += static_cast<int64_t>(count[lane]);
    }
  }
  void add(double f, double e, double scale) { add(std::span(&f, 1), std::span(&e, 1), scale); }
  void add(const Sums& s) { ff += s.ff, fe += s.fe, ee += s.ee, dd += s.dd, n += s.n; }
  double factor() const { return ee > 0 ? fe / ee : 1; }
  double distance() const { return dd == 0 ? 0 : std::sqrt(dd / ee); }
  // The distance that remains after applying factor().
  double residual() const { return ee > 0 && ff > 0 ? std::sqrt(std::max(0.0, 1 - fe * fe / (ff * ee))) : 0; }
};

// Rows of the global batch with equal tokens in both recordings.
class RowMatch {
 public:
  RowMatch(const Recording& found, const Recording& expected);
  struct Place {
    Batch batch;
    int64_t row = 0, samples = 0;  // samples of that batch
    int64_t tokens = 0;            // 0: all
  };
  // Null if the row has no counterpart. Without tokens, rows correspond by position.
  const Place* find(Batch batch, int64_t row) const;
  // Sequences of a micro-batch of `found`.
  int64_t samples(Batch batch) const;
  // Rows of `found` with a counterpart, and of these with other targets; rows of `expected` without; rows of `found`
  // that occur more often; rows of `found` without a counterpart.
  int64_t matched = 0, other_targets = 0, dropped = 0, repeated = 0, foreign = 0;

 private:
  std::map<std::pair<Batch, int64_t>, Place> places_;
  std::map<Batch, int64_t> samples_;
};

// A block of corresponding rows of a tensor.
struct Block {
  Batch found_batch, expected_batch;
  int64_t sample = 0;       // of the micro-batch; 0 for parameters
  Range rows, other;        // in the tensors' rows
  int64_t first_token = 0;  // of `rows`
};
constexpr bool is_batched(Kind kind) { return kind == Kind::output || kind == Kind::output_grad; }

// Corresponding tensors and rows of a recording and its reference.
class Pairing {
 public:
  // Of the output gradients of two micro-batches, relative to the reference's.
  using Factors = std::map<std::pair<Batch, Batch>, double>;

  Pairing(const Recording& found, const Recording& expected)
      : found_(found), expected_(expected), match_(found, expected) {}

  const RowMatch& match() const { return match_; }
  const Factors& factors() const { return factors_; }
  // The reference's tensor of the same role; the table if a tied head has none. Null if there is none.
  const std::map<Batch, StoredTensor>* counterpart(const Key& key) const;
  // What the expected values of a block are multiplied by.
  double scale(Kind kind, const Block& block) const;
  // Position of a module in the forward pass; lower first.
  double order(const std::string& name) const;
  // Of the innermost module around a parameter that has a recorded output; -infinity if there is none.
  double enclosing_order(std::string name) const;

  const Recording &found_, &expected_;

 protected:
  RowMatch match_;
  Factors factors_;
};

// Calls f(rows) for successive rows of a tensor, of limited size together.
template <class F>
void for_each_rows(int64_t rows, int64_t width, const F& f) {
  constexpr int64_t kElements = int64_t{1} << 15;  // a few such blocks fit into a core's cache
  const int64_t at_once = std::max<int64_t>(1, kElements / std::max<int64_t>(1, width));
  for (int64_t row = 0; row < rows; row += at_once) f(Range{row, std::min(rows, row + at_once)});
}

// Calls f(block, found tensor, expected tensor) for blocks of limited size; skips rows that do not correspond.
template <class F>
void for_each_block(const RowMatch& match, const std::map<Batch, StoredTensor>& found,
                    const std::map<Batch, StoredTensor>& expected, bool batched, const F& f) {
  const auto blocks = [&](const StoredTensor& a, const StoredTensor& b, const Block& block) {
    for_each_rows(block.rows.size(), a.width(), [&](Range rows) {
      Block now = block;
      now.rows = {block.rows.begin + rows.begin, block.rows.begin + rows.end};
      now.other = {block.other.begin + rows.begin, block.other.begin + rows.end};
      now.first_token = rows.begin;
      f(now, a, b);
    });
  };
  for (const auto& [batch, a] : found) {
    if (!batched) {
      const StoredTensor& b = expected.begin()->second;
      const int64_t rows = std::min(a.rows(), b.rows());
      if (a.shape.size() == b.shape.size()) blocks(a, b, {batch, {}, 0, {0, rows}, {0, rows}, 0});
      continue;
    }
    const int64_t samples = match.samples(batch);
    if (samples == 0 || a.rows() % samples != 0 || a.shape.size() < 2) continue;
    for (int64_t sample = 0; sample < samples; ++sample) {
      const RowMatch::Place* const place = match.find(batch, sample);
      if (!place) continue;
      const auto there = expected.find(place->batch);
      if (there == expected.end() || there->second.rows() % place->samples != 0) continue;
      const StoredTensor& b = there->second;
      const int64_t own = a.rows() / samples, other = b.rows() / place->samples;
      int64_t rows = std::min(own, other);
      if (place->tokens > 0 && own > 1) rows = std::min(rows, place->tokens);
      blocks(a, b,
             {batch,
              place->batch,
              sample,
              {sample * own, sample * own + rows},
              {place->row * other, place->row * other + rows},
              0});
    }
  }
}

// Statistics of the columns that both have, of widths `width` and `other`.
inline Sums compare_rows(std::span<const double> a, std::span<const double> b, int64_t width, int64_t other,
                         double scale) {
  Sums out;
  if (width == other) {
    out.add(a.first(std::min(a.size(), b.size())), b, scale);
    return out;
  }
  const auto columns = static_cast<size_t>(std::min(width, other)), w = static_cast<size_t>(width);
  for (size_t r = 0; w > 0 && r < a.size() / w; ++r)
    out.add(a.subspan(r * w, columns), b.subspan(r * static_cast<size_t>(other), columns), scale);
  return out;
}

// Calls f(found, expected, row, column) for the elements of the columns that both have.
template <class F>
void for_each_element(const std::vector<double>& a, const std::vector<double>& b, int64_t width, int64_t other,
                      const F& f) {
  const int64_t columns = std::min(width, other), rows = static_cast<int64_t>(a.size()) / std::max<int64_t>(1, width);
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t c = 0; c < columns; ++c)
      f(a[static_cast<size_t>(r * width + c)], b[static_cast<size_t>(r * other + c)], r, c);
}

}  // namespace tessera::audit
