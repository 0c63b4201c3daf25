// Choices, places and weights. Threads split the tokens.
#include "tensor/ops/experts/route.h"

#include <algorithm>
#include <cmath>
#include <string>

#include "tensor/ops/experts/cpu/host.h"
#include "tensor/ops/experts/token.h"

namespace tessera {
namespace {

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
    A largest = 0, most = 0;
    for (int64_t i = 0; i < n; ++i) {
      widen(logits.data<decltype(t)>() + i * experts, experts, l.data());
      token::choose(l.data(), experts, k, own.data());
      for (const A x : l) largest = std::max(largest, std::abs(x));
      const A margin = token::margin_of(l.data(), own.data(), out.chosen.data<int32_t>() + i * k, k);
      if (margin >= 0) ++out.elsewhere;
      most = std::max(most, margin);
    }
    out.margin = largest > 0 ? static_cast<double>(most) / static_cast<double>(largest) : 0;
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
      std::vector<A> l(static_cast<size_t>(experts));
      for (int64_t i = begin; i < end; ++i) {
        widen(in + i * experts, experts, l.data());
        if (!o.given.defined()) token::choose(l.data(), experts, k, chosen + i * k);
        token::weigh(l.data(), experts, chosen + i * k, k, o.softmax_first, weights + i * k);
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
  double* const choices = out.of_sequences.data<double>();
  std::fill_n(choices, out.of_sequences.numel(), 0.0);
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
    for (int64_t i = s * length * k; i < (s + 1) * length * k; ++i) ++choices[s * experts + chosen[i]];
  }
  std::vector<int64_t> next;
  int64_t rows = 0;
  for (const int64_t count : out.counts) {
    next.push_back(rows);
    rows += count;
  }
  for (int64_t i = 0; i < n * k; ++i)
    if (place[i] == 0) place[i] = static_cast<int32_t>(next[static_cast<size_t>(chosen[i])]++);
}

void route_on_cpu(Routed& out, const Tensor& logits, const RouteOptions& o) {
  if (o.given.defined()) compare_choices(logits, o, out);
  if (cpu::Idle::here())
    share_out_evenly(logits.dim(1), out.chosen);
  else
    choose_all(logits, o, out);
  place_all(o, logits.dim(1), out);
}

void route_backward_on_cpu(const Tensor& out, const Tensor& dweights, const Tensor& logits, const Routed& routed,
                           const RouteOptions& o) {
  const int64_t n = logits.dim(0), experts = logits.dim(1), k = o.per_token, length = n / o.sequences;
  if (cpu::Idle::here()) return;
  const double* const choices = o.balance != 0 ? routed.of_sequences.data<double>() : nullptr;
  with_floating(logits.dtype(), "route_backward", [&](auto t) {
    using T = decltype(t);
    using A = Accumulate<T>;
    const token::Gradient<A> all{.chosen = routed.chosen.data<int32_t>(),
                                 .weights = routed.weights.data<A>(),
                                 .dweights = dweights.data<A>(),
                                 .k = k,
                                 .softmax_first = o.softmax_first,
                                 .choices = choices,
                                 .slopes = token::slopes_of(o, n, experts)};
    const T* const in = logits.data<T>();
    T* const to = out.data<T>();
    cpu::split(n, tokens_together(experts), [&](int64_t begin, int64_t end) {
      std::vector<A> l(static_cast<size_t>(experts));
      for (int64_t i = begin; i < end; ++i) {
        widen(in + i * experts, experts, l.data());
        all.of(i, i / length, experts).of_logits(l.data(), experts);
        for (int64_t e = 0; e < experts; ++e) to[i * experts + e] = static_cast<T>(l[static_cast<size_t>(e)]);
      }
    });
  });
}

}  // namespace

Routed route(const Tensor& logits_any, const RouteOptions& o) {
  if (logits_any.rank() != 2 || o.per_token < 1 || o.per_token > logits_any.dim(1) || o.sequences < 1 ||
      logits_any.dim(0) % o.sequences != 0)
    throw Error("[route] logits are " + logits_any.describe() + " for " + std::to_string(o.per_token) +
                " experts per token and " + std::to_string(o.sequences) +
                " sequences; expected (N, E), at most E per token, and sequences that divide N");
  const Tensor logits = logits_any.contiguous();
  const Shape shape{logits.dim(0), o.per_token};
  Routed out{.chosen = logits.make(shape, DType::int32),
             .place = logits.make(shape, DType::int32),
             .weights = logits.make(shape, wide_of(logits.dtype())),
             .counts = std::vector<int64_t>(static_cast<size_t>(logits.dim(1))),
             .of_sequences = logits.make({o.sequences, logits.dim(1)}, DType::float64)};
  if (o.given.defined()) {
    o.given.check_size(shape.numel());
    out.chosen.copy_from(o.given.reshape(shape));
  }
  on_device(
      logits.device(), [&] { route_on_cpu(out, logits, o); }, [&] { cuda::route(out, logits, o); });
  for (const int64_t count : out.counts) out.rows += count;
  out.dropped = shape.numel() - out.rows;
  return out;
}

Tensor route_backward(const Tensor& dweights_any, const Tensor& logits_any, const Routed& routed,
                      const RouteOptions& o) {
  const Tensor logits = logits_any.contiguous(), dweights = dweights_any.contiguous();
  Tensor out = logits.make(logits.shape());
  dweights.check_size(logits.dim(0) * o.per_token);
  on_device(
      logits.device(), [&] { route_backward_on_cpu(out, dweights, logits, routed, o); },
      [&] { cuda::route_backward(out, dweights, logits, routed, o); });
  return out;
}

}  // namespace tessera
