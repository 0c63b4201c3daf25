// Routing of one token with E `logits` in the accumulation type, shared by CPU and GPU for equal results.
#pragma once
#include <cstdint>

#include "tensor/math.h"
#include "tensor/ops/experts/experts.h"

namespace tessera::token {

constexpr int64_t place_among(const int32_t* chosen, int64_t count, int64_t expert) {
  for (int64_t j = 0; j < count; ++j)
    if (chosen[j] == expert) return j;
  return -1;
}

// The k largest logits, descending; among equal logits and NaNs, the first.
template <class A>
constexpr void choose(const A* logits, int64_t experts, int64_t k, int32_t* chosen) {
  for (int64_t j = 0; j < k; ++j) {
    int64_t best = -1;
    for (int64_t e = 0; e < experts; ++e)
      if (place_among(chosen, j, e) < 0 && (best < 0 || logits[e] > logits[best])) best = e;
    chosen[j] = static_cast<int32_t>(best);
  }
}

// The best logit that `given` excludes minus the lowest that it includes; -1 if `given` equals `own`, the k best.
template <class A>
constexpr A routing_margin(const A* logits, const int32_t* own, const int32_t* given, int64_t k) {
  const A last = logits[own[k - 1]];
  A lowest = last;
  bool same = true;
  for (int64_t j = 0; j < k; ++j) {
    same = same && place_among(own, k, given[j]) >= 0;
    lowest = logits[given[j]] < lowest ? logits[given[j]] : lowest;
  }
  return same ? A(-1) : last - lowest;
}

template <class A>
constexpr A max_logit(const A* logits, int64_t experts) {
  A largest = logits[0];
  for (int64_t e = 1; e < experts; ++e) largest = largest < logits[e] ? logits[e] : largest;
  return largest;
}

template <class A>
constexpr void weigh(const A* logits, int64_t experts, const int32_t* chosen, int64_t k, bool softmax_first,
                     A* weights) {
  const A largest = max_logit(logits, experts);
  A sum = 0;
  if (softmax_first)
    for (int64_t e = 0; e < experts; ++e) sum += math::exp(logits[e] - largest);
  else
    for (int64_t j = 0; j < k; ++j) sum += math::exp(logits[chosen[j]] - largest);
  for (int64_t j = 0; j < k; ++j) weights[j] = math::exp(logits[chosen[j]] - largest) / sum;
}

struct Slopes {
  double fraction = 0;  // E / (k T)
  double balance = 0, z = 0;
};

inline Slopes balance_slopes(const RouteOptions& o, int64_t tokens_here, int64_t experts) {
  const auto length = static_cast<double>(o.tokens > 0 ? o.tokens : tokens_here / o.sequences);
  return {static_cast<double>(experts) / (static_cast<double>(o.per_token) * length), o.balance / length,
          2 * o.z / length};
}

template <class A>
struct Gradient {
  const int32_t* chosen;
  const A *weights, *dweights;
  int64_t k;
  bool softmax_first;
  const double* choices;  // per expert in the token's sequence; null without a balance loss
  Slopes slopes;

  constexpr Gradient of(int64_t token, int64_t sequence, int64_t experts) const {
    Gradient one = *this;
    one.chosen += token * k, one.weights += token * k, one.dweights += token * k;
    if (choices) one.choices += sequence * experts;
    return one;
  }
  // Gradient with respect to the probability over all experts.
  constexpr A probability_grad(int64_t expert) const {
    const int64_t j = softmax_first ? place_among(chosen, k, expert) : -1;
    A sum = j < 0 ? A(0) : dweights[j];
    if (choices) sum += static_cast<A>(slopes.balance) * static_cast<A>(choices[expert] * slopes.fraction);
    return sum;
  }
  // Gradient through the softmax over the chosen experts.
  constexpr A chosen_grad(int64_t expert, A mean) const {
    const int64_t j = softmax_first ? -1 : place_among(chosen, k, expert);
    return j < 0 ? A(0) : weights[j] * (dweights[j] - mean);
  }
  constexpr void logits_grad(A* logits, int64_t experts) const {
    const A largest = max_logit(logits, experts);
    A sum = 0, mean = 0, among = 0;
    for (int64_t e = 0; e < experts; ++e) sum += logits[e] = math::exp(logits[e] - largest);
    for (int64_t e = 0; e < experts; ++e) logits[e] /= sum;
    const A z_loss = static_cast<A>(slopes.z) * (largest + math::log(sum));
    for (int64_t j = 0; j < k; ++j) mean += weights[j] * dweights[j];
    for (int64_t e = 0; e < experts; ++e) among += logits[e] * probability_grad(e);
    for (int64_t e = 0; e < experts; ++e)
      logits[e] = chosen_grad(e, mean) + logits[e] * (probability_grad(e) - among) + logits[e] * z_loss;
  }
};

}  // namespace tessera::token
