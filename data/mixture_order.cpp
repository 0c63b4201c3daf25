// Shares and their order.
#include "data/mixture_order.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <utility>

#include "tensor/error.h"

namespace tessera {
namespace {

constexpr int64_t kMillion = 1'000'000, kMostShares = 256;

int64_t sum_of(std::span<const int64_t> shares) { return std::reduce(shares.begin(), shares.end(), int64_t{0}); }

void divide_by_common(std::vector<int64_t>& shares) {
  int64_t common = 0;
  for (const int64_t s : shares) common = std::gcd(common, s);
  for (int64_t& s : shares) s /= common;
}

}  // namespace

std::vector<int64_t> whole_shares(std::span<const double> weights) {
  constexpr double kLargest = 3e16;  // 256 of them fit into 64 bits
  std::vector<int64_t> shares;
  for (const double scale : {1.0, 1.0 * kMillion}) {
    shares.clear();
    for (const double w : weights) {
      const double scaled = w * scale;
      const bool whole = scaled < kLargest && std::abs(scaled - std::round(scaled)) <= 1e-9 * scaled;
      shares.push_back(whole ? std::llround(scaled) : 0);
    }
    if (std::ranges::find(shares, 0) != shares.end()) continue;
    divide_by_common(shares);
    if (sum_of(shares) <= kMillion) return shares;
  }
  const double largest =
      *std::ranges::max_element(weights);  // first divided by it: a sum may be too large for a double
  double sum = 0;
  for (const double w : weights) sum += w / largest;
  shares.clear();
  for (const double w : weights) shares.push_back(std::max<int64_t>(std::llround(w / largest / sum * kMillion), 1));
  *std::ranges::max_element(shares) += kMillion - sum_of(shares);  // what rounding left
  divide_by_common(shares);
  return shares;
}

MixtureOrder::MixtureOrder(std::vector<int64_t> shares) : shares_(std::move(shares)) {
  const auto count = std::ssize(shares_);
  if (count < 1 || count > kMostShares || *std::ranges::min_element(shares_) < 1 ||
      *std::ranges::max_element(shares_) > kMillion || sum_of(shares_) > kMillion)
    throw Error(fmt::format("[mixture] {} shares; expected 1 to {}, each at least 1 and {} in all at most", count,
                            kMostShares, kMillion));
  const int64_t period = sum_of(shares_), slack = std::max<int64_t>(2 * count - 2, 1);
  std::vector<int64_t> taken(shares_.size());
  period_.reserve(static_cast<size_t>(period));
  for (int64_t n = 1; n <= period; ++n) {
    // Of those that may come now (behind by 1 / slack and more) the one that must come first.
    size_t best = 0;
    int64_t best_room = 0, best_share = 0;
    for (size_t k = 0; k < shares_.size(); ++k) {
      const int64_t behind = shares_[k] * n - taken[k] * period;  // in 1 / period of a sequence
      if (behind * slack < period) continue;
      const int64_t room = period * (slack - 1) - behind * slack;
      if (best_share == 0 || room * best_share < best_room * shares_[k]) {
        best = k;
        best_room = room;
        best_share = shares_[k];
      }
    }
    period_.push_back({static_cast<int32_t>(best), static_cast<int32_t>(taken[best]++)});
  }
}

MixtureOrder::Place MixtureOrder::at(int64_t sequence) const {
  const auto period = std::ssize(period_);
  const Entry& e = period_[static_cast<size_t>(sequence % period)];
  const auto dataset = static_cast<size_t>(e.dataset);
  return {dataset, sequence / period * shares_[dataset] + e.nth};
}

}  // namespace tessera
