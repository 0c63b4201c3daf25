// The bounds of a whole run: counts against formulas.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <string_view>

#include "verify/verify.h"

namespace tessera {
namespace {

constexpr double kPeakSlack = 1.02;     // of the peak of memory, which no formula gives to the byte,
constexpr double kPeakBytes = 1 << 14;  // and some small arrays, which count in models of a few kilobytes
constexpr double kSameBubble = 1e-9;
constexpr size_t kToFall = 40;  // steps after which the loss must have fallen

const SentBytes* find(const std::vector<SentBytes>& all, const SentBytes& wanted) {
  const auto found = std::ranges::find_if(
      all, [&](const SentBytes& s) { return s.axis == wanted.axis && s.operation == wanted.operation; });
  return found == all.end() ? nullptr : &*found;
}

void check_sent(VerifyResult& r) {
  for (const SentBytes& e : r.expected_sent) {
    const SentBytes* const found = find(r.sent, e);
    if (found && found->calls == e.calls && found->bytes == e.bytes) continue;
    const SentBytes f = found ? *found : SentBytes{};
    r.seen.sent.push_back({e.axis, e.operation, f.calls, e.calls, f.bytes, e.bytes});
    r.failures.push_back(fmt::format("{} axis, {}: {} calls and {} bytes; expected {} and {}", e.axis, e.operation,
                                     f.calls, f.bytes, e.calls, e.bytes));
  }
  for (const SentBytes& s : r.sent) {
    if (find(r.expected_sent, s)) continue;
    r.seen.sent.push_back({s.axis, s.operation, s.calls, 0, s.bytes, 0});
    r.failures.push_back(
        fmt::format("{} axis, {}: {} calls and {} bytes; expected none", s.axis, s.operation, s.calls, s.bytes));
  }
}

void check_held(VerifyResult& r) {
  for (size_t rank = 0; rank < r.held.size(); ++rank) {
    const HeldBytes &f = r.held[rank], &e = r.expected_held[rank];
    const auto one = [&](std::string_view what, int64_t found, int64_t expected) {
      if (found == expected) return;
      r.seen.held.push_back({static_cast<int>(rank), std::string(what), found, expected});
      r.failures.push_back(fmt::format("rank {} holds {} bytes of {}; expected {}", rank, found, what, expected));
    };
    one("parameters", f.parameters, e.parameters);
    one("gradients", f.gradients, e.gradients);
    one("optimizer state", f.optimizer, e.optimizer);
    if (r.peak[rank] <= peak_bound(r.expected_peak[rank])) continue;
    r.seen.held.push_back({static_cast<int>(rank), "peak", r.peak[rank], peak_bound(r.expected_peak[rank])});
    r.failures.push_back(fmt::format("rank {} held {} bytes at its peak; expected at most {}", rank, r.peak[rank],
                                     peak_bound(r.expected_peak[rank])));
  }
}

void check_pipeline(VerifyResult& r) {
  if (r.in_flight != r.expected_in_flight && !r.in_flight.empty()) {
    r.seen.in_flight = r.in_flight;
    r.seen.expected_in_flight = r.expected_in_flight;
  }
  for (size_t p = 0; p < r.in_flight.size(); ++p)
    if (r.in_flight[p] != r.expected_in_flight[p])
      r.failures.push_back(fmt::format("pipeline rank {} had {} micro-batches of a stage in flight; expected {}", p,
                                       r.in_flight[p], r.expected_in_flight[p]));
  if (r.bubble && r.bubble_formula && std::abs(*r.bubble - *r.bubble_formula) > kSameBubble)
    r.failures.push_back(
        fmt::format("the bubble on the simulated clock is {} of the time; expected {}", *r.bubble, *r.bubble_formula));
}

void check_losses(VerifyResult& r) {
  for (const double loss : r.losses)
    if (!std::isfinite(loss)) r.failures.emplace_back("a loss is not finite");
  if (r.losses.size() < kToFall) return;
  const auto quarter = static_cast<std::ptrdiff_t>(r.losses.size() / 4);
  const double first = std::accumulate(r.losses.begin(), r.losses.begin() + quarter, 0.0),
               last = std::accumulate(r.losses.end() - quarter, r.losses.end(), 0.0);
  if (!(last < first))
    r.failures.push_back(
        fmt::format("the loss does not fall: {} at the beginning, {} at the end", r.losses.front(), r.losses.back()));
}

// A choice between experts that are this near is the rounding's.
void check_routing(VerifyResult& r) {
  if (r.stray_margin <= r.bound) return;
  r.failures.push_back(fmt::format(
      "{} tokens went to another expert than on one rank, whose logit was lower by up to {:.3g} of the largest; "
      "expected at most {:.3g}",
      r.strayed, r.stray_margin, r.bound));
}

}  // namespace

int64_t peak_bound(int64_t expected) {
  return static_cast<int64_t>(kPeakSlack * static_cast<double>(expected) + kPeakBytes);
}

void check_totals(VerifyResult& r, const Plan& plan) {
  check_sent(r);
  check_held(r);
  check_pipeline(r);
  check_losses(r);
  check_routing(r);
  if (plan.ranks() > 1 && r.sent.empty()) r.failures.emplace_back("no rank has communicated");
}

}  // namespace tessera
