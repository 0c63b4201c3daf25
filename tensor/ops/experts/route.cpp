// Choices, places and weights. Threads split the tokens.
#include "tensor/ops/experts/route.h"

#include <algorithm>
#include <cmath>
#include <string>

#include "tensor/ops/experts/cpu/host.h"

namespace tessera {
namespace {

// The k largest, the best first; where numbers are equal, or none are, the first of them.
template <class A>
void choose(const A* logits, int64_t experts, int64_t k, int32_t* chosen) {
  for (int64_t j = 0; j < k; ++j) {
    int64_t best = -1;
    for (int64_t e = 0; e < experts; ++e) {
      const bool taken = std::find(chosen, chosen + j, static_cast<int32_t>(e)) != chosen + j;
      if (!taken && (best < 0 || logits[e] > logits[best])) best = e;
    }
    chosen[j] = static_cast<int32_t>(best);
  }
}

// exp(logits - largest), and their sum; the largest goes first.
template <class A>
A exponentials(const A* logits, int64_t experts, A* out, A& largest) {
  largest = *std::max_element(logits, logits + experts);
  A sum = 0;
  for (int64_t e = 0; e < experts; ++e) sum += out[e] = std::exp(logits[e] - largest);
  return sum;
}

template <class T, class A>
void widen(const T* from, int64_t n, A* to) {
  for (int64_t i = 0; i < n; ++i) to[i] = static_cast<A>(from[i]);
}

// How far the given choices are from those that these logits make.
void compare_choices(const Tensor& logits, const RouteOptions& o, Routed& out) {
  const int64_t n = logits.dim(0), experts = logits.dim(1), k = o.per_token;
  with_floating(logits.dtype(), "route", [&](auto t) {
    using A = Accumulate<decltype(t)>;
    std::vector<A> l(static_cast<size_t>(experts));
    std::vector<int32_t> own(static_cast<size_t>(k));
    A largest = 0, margin = 0;
    for (int64_t i = 0; i < n; ++i) {
      widen(logits.data<decltype(t)>() + i * experts, experts, l.data());
      choose(l.data(), experts, k, own.data());
      for (const A x : l) largest = std::max(largest, std::abs(x));
      A lowest = l[static_cast<size_t>(own.back())];
      bool same = true;
      for (int64_t j = 0; j < k; ++j) {
        const int32_t given = o.given.data<int32_t>()[i * k + j];
        same = same && std::ranges::find(own, given) != own.end();
        lowest = std::min(lowest, l[static_cast<size_t>(given)]);
      }
      if (same) continue;
      ++out.elsewhere;
      margin = std::max(margin, l[static_cast<size_t>(own.back())] - lowest);
    }
    out.margin = largest > 0 ? static_cast<double>(margin / largest) : 0;
  });
}

void choose_all(const Tensor& logits, const RouteOptions& o, const Routed& out) {
  const int64_t n = logits.dim(0), experts = logits.dim(1), k = o.per_token;
  with_floating(logits.dtype(), "route", [&](auto t) {
    using T = decltype(t);
    using A = Accumulate<T>;
    const T* const in = logits.data<T>();
    int32_t* const chosen = out.chosen.data<int32_t>();
    A* const weights = out.weights.data<A>();
    cpu::split(n, tokens_together(experts), [&](int64_t begin, int64_t end) {
      std::vector<A> l(static_cast<size_t>(experts)), p(l);
      for (int64_t i = begin; i < end; ++i) {
        widen(in + i * experts, experts, l.data());
        if (!o.given.defined()) choose(l.data(), experts, k, chosen + i * k);
        A largest, sum = exponentials(l.data(), experts, p.data(), largest);
        if (!o.softmax_first) {
          sum = 0;
          for (int64_t j = 0; j < k; ++j) sum += p[static_cast<size_t>(chosen[i * k + j])];
        }
        for (int64_t j = 0; j < k; ++j) weights[i * k + j] = p[static_cast<size_t>(chosen[i * k + j])] / sum;
      }
    });
  });
}

// Without a look at any number.
void share_out_evenly(int64_t experts, const Tensor& chosen) {
  for (int64_t i = 0; i < chosen.numel(); ++i) chosen.data<int32_t>()[i] = static_cast<int32_t>(i % experts);
}

// First whether a choice has a place, then which.
void place_all(const RouteOptions& o, int64_t experts, Routed& out) {
  const int64_t n = out.chosen.dim(0), k = o.per_token, length = n / o.sequences;
  const int32_t* const chosen = out.chosen.data<int32_t>();
  int32_t* const place = out.place.data<int32_t>();
  const Tensor earlier = o.capacity > 0 && o.earlier ? o.earlier(out.chosen) : Tensor();
  out.counts.assign(static_cast<size_t>(experts), 0);
  out.of_sequences.assign(static_cast<size_t>(o.sequences * experts), 0);
  for (int64_t s = 0; s < o.sequences; ++s) {
    std::vector<int64_t> taken(static_cast<size_t>(experts), 0);
    for (int64_t j = 0; j < k; ++j)
      for (int64_t i = s * length; i < (s + 1) * length; ++i) {
        const auto expert = static_cast<size_t>(chosen[i * k + j]);
        const int64_t before = earlier.defined() ? earlier.data<int32_t>()[i * k + j] : taken[expert];
        const bool fits = o.capacity == 0 || before < o.capacity;
        place[i * k + j] = fits ? 0 : -1;
        taken[expert] += fits ? 1 : 0;
      }
    for (size_t e = 0; e < taken.size(); ++e) out.counts[e] += taken[e];
    for (int64_t i = s * length * k; i < (s + 1) * length * k; ++i)
      ++out.of_sequences[static_cast<size_t>(s * experts + chosen[i])];
  }
  std::vector<int64_t> next;
  out.rows = 0;
  for (const int64_t count : out.counts) {
    next.push_back(out.rows);
    out.rows += count;
  }
  for (int64_t i = 0; i < n * k; ++i)
    if (place[i] == 0) place[i] = static_cast<int32_t>(next[static_cast<size_t>(chosen[i])]++);
  out.dropped = n * k - out.rows;
}

int64_t whole_length(const RouteOptions& o, int64_t n) { return o.tokens > 0 ? o.tokens : n / o.sequences; }

// Of each sequence: how many of its choices fell on each expert, dropped or not, in units of (choices / (k T)) E.
std::vector<double> shares_of(const RouteOptions& o, int64_t n, int64_t experts, const Routed& routed) {
  std::vector<double> out;
  const double one = static_cast<double>(experts) / static_cast<double>(o.per_token * whole_length(o, n));
  for (const double choices : routed.of_sequences) out.push_back(choices * one);
  return out;
}

}  // namespace

Routed route(const Tensor& logits_any, const RouteOptions& o) {
  check_on_host("route", logits_any);
  if (logits_any.rank() != 2 || o.per_token < 1 || o.per_token > logits_any.dim(1) || o.sequences < 1 ||
      logits_any.dim(0) % o.sequences != 0)
    throw Error("[route] logits are " + logits_any.describe() + " for " + std::to_string(o.per_token) +
                " experts per token and " + std::to_string(o.sequences) +
                " sequences; expected (N, E), at most E per token, and sequences that divide N");
  const Tensor logits = logits_any.contiguous();
  const Shape shape{logits.dim(0), o.per_token};
  Routed out{.chosen = logits.make(shape, DType::int32),
             .place = logits.make(shape, DType::int32),
             .weights = logits.make(shape, wide_of(logits.dtype()))};
  if (o.given.defined()) {
    o.given.check_size(logits.dim(0) * o.per_token);
    out.chosen.copy_from(o.given.reshape(shape));
    compare_choices(logits, o, out);
  }
  if (cpu::Idle::here())
    share_out_evenly(logits.dim(1), out.chosen);
  else
    choose_all(logits, o, out);
  place_all(o, logits.dim(1), out);
  return out;
}

Tensor route_backward(const Tensor& dweights_any, const Tensor& logits_any, const Routed& routed,
                      const RouteOptions& o) {
  const Tensor logits = logits_any.contiguous(), dweights = dweights_any.contiguous();
  Tensor out = logits.make(logits.shape());
  const int64_t n = logits.dim(0), experts = logits.dim(1), k = o.per_token;
  dweights.check_size(n * k);
  if (cpu::Idle::here()) return out;
  const std::vector<double> shares = o.balance != 0 ? shares_of(o, n, experts, routed) : std::vector<double>();
  const int64_t length = n / o.sequences;
  const auto whole = static_cast<double>(whole_length(o, n));
  with_floating(logits.dtype(), "route_backward", [&](auto t) {
    using T = decltype(t);
    using A = Accumulate<T>;
    const T* const in = logits.data<T>();
    const A* const dw = dweights.data<A>();
    const A* const w = routed.weights.data<A>();
    const int32_t* const chosen = routed.chosen.data<int32_t>();
    T* const to = out.data<T>();
    const A balance = static_cast<A>(o.balance / whole), z = static_cast<A>(2 * o.z / whole);
    cpu::split(n, tokens_together(experts), [&](int64_t begin, int64_t end) {
      std::vector<A> l(static_cast<size_t>(experts)), p(l), dp(l), dl(l);
      for (int64_t i = begin; i < end; ++i) {
        const int32_t* const of = chosen + i * k;
        widen(in + i * experts, experts, l.data());
        A largest;
        const A sum = exponentials(l.data(), experts, p.data(), largest);
        for (A& one : p) one /= sum;
        const A z_loss = z * (largest + std::log(sum));
        std::fill(dp.begin(), dp.end(), A(0));
        std::fill(dl.begin(), dl.end(), A(0));
        A mean = 0;  // of the weights' gradients, by the weights
        for (int64_t j = 0; j < k; ++j) mean += w[i * k + j] * dw[i * k + j];
        for (int64_t j = 0; j < k; ++j) {
          const auto e = static_cast<size_t>(of[j]);
          if (o.softmax_first)
            dp[e] = dw[i * k + j];
          else
            dl[e] = w[i * k + j] * (dw[i * k + j] - mean);
        }
        if (!shares.empty())
          for (int64_t e = 0; e < experts; ++e)
            dp[static_cast<size_t>(e)] +=
                balance * static_cast<A>(shares[static_cast<size_t>(i / length * experts + e)]);
        A among = 0;
        for (size_t e = 0; e < p.size(); ++e) among += p[e] * dp[e];
        for (size_t e = 0; e < p.size(); ++e)
          to[i * experts + static_cast<int64_t>(e)] = static_cast<T>(dl[e] + p[e] * (dp[e] - among) + p[e] * z_loss);
      }
    });
  });
  return out;
}

}  // namespace tessera
