// Sampling and generation.
#include "models/sample.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <functional>
#include <map>
#include <numeric>
#include <span>
#include <string>
#include <vector>

#include "tensor/random.h"

namespace tessera {
namespace {

// Divides positive logits and multiplies others, so the probability decreases in both cases.
void penalise(std::vector<double>& logits, std::span<const int32_t> before, double penalty) {
  if (penalty == 1) return;
  std::vector<int32_t> occurred(before.begin(), before.end());
  std::ranges::sort(occurred);
  occurred.erase(std::unique(occurred.begin(), occurred.end()), occurred.end());
  for (const int32_t token : occurred) {
    double& logit = logits[static_cast<size_t>(token)];
    logit = logit > 0 ? logit / penalty : logit * penalty;
  }
}

// The number of weights that pass the filters; `order` lists them from the largest, which is 1. The filters apply
// successively, as in the transformers library: top-k, including ties with the last; top-p; min-p.
size_t filtered_count(const std::vector<double>& weights, const std::vector<int32_t>& order, const SampleOptions& o) {
  const auto weight = [&](size_t i) { return weights[static_cast<size_t>(order[i])]; };
  size_t n = order.size();
  if (o.top_k > 0) n = std::min(n, static_cast<size_t>(o.top_k));
  while (n < order.size() && weight(n) == weight(n - 1)) ++n;
  if (o.top_p < 1) {
    double total = 0, reached = 0;
    for (size_t i = 0; i < n; ++i) total += weight(i);
    size_t take = 0;
    while (take < n && reached < o.top_p * total) reached += weight(take++);
    n = std::max<size_t>(take, 1);
  }
  while (n > 1 && weight(n - 1) < o.min_p) --n;
  return n;
}

}  // namespace

int32_t sample_token(const Tensor& logits_any, const SampleOptions& o, uint64_t index,
                     std::span<const int32_t> before) {
  if (!logits_any.defined()) throw Error("[sample] logits: the tensor is undefined");
  if (!(o.temperature >= 0))
    throw FieldError("temperature", "expected 0 or more, got " + std::to_string(o.temperature));
  if (!(o.repetition_penalty > 0))
    throw FieldError("repetition_penalty", "expected more than 0, got " + std::to_string(o.repetition_penalty));
  for (const auto& [field, p] : {std::pair("top_p", o.top_p), std::pair("min_p", o.min_p)})
    if (!(p >= 0 && p <= 1)) throw FieldError(field, "expected 0 to 1, got " + std::to_string(p));
  if (logits_any.numel() == 0 || logits_any.numel() != logits_any.dim(-1))
    reject("sample", "logits (V)", logits_any.describe());
  for (const int32_t token : before)
    if (token < 0 || token >= logits_any.numel())
      throw Error("[sample] before: token " + std::to_string(token) + " is outside the vocabulary of " +
                  std::to_string(logits_any.numel()));
  std::vector<double> logits = logits_any.to(DType::float64).to_vector<double>();
  if (std::ranges::any_of(logits, [](auto x) { return std::isnan(x); })) reject("sample", "logits without NaN", "NaN");
  if (o.vocab > 0) logits.resize(std::min(logits.size(), static_cast<size_t>(o.vocab)));
  penalise(logits, before, o.repetition_penalty);
  const size_t vocab = logits.size();
  if (o.temperature == 0) return static_cast<int32_t>(std::ranges::max_element(logits) - logits.begin());
  std::vector<int32_t> order(vocab);
  std::iota(order.begin(), order.end(), 0);
  std::ranges::stable_sort(
      order, [&](int32_t a, int32_t b) { return logits[static_cast<size_t>(a)] > logits[static_cast<size_t>(b)]; });
  const double top = logits[static_cast<size_t>(order[0])];
  std::vector<double> weights(vocab);
  for (size_t i = 0; i < vocab; ++i) weights[i] = std::exp((logits[i] - top) / o.temperature);
  const size_t n = filtered_count(weights, order, o);
  double total = 0;
  for (size_t i = 0; i < n; ++i) total += weights[static_cast<size_t>(order[i])];
  double left = static_cast<double>(Philox::named(o.seed, "sample").uniform(index)) * total;
  for (size_t i = 0; i < n; ++i)
    if ((left -= weights[static_cast<size_t>(order[i])]) < 0) return order[i];
  return order[n - 1];
}

DecodingState::DecodingState(const LanguageModel& model, std::vector<int32_t> prompt, int64_t count, uint64_t number)
    : context_(static_cast<size_t>(model.config.context)),
      tokens_(std::move(prompt)),
      prompt_(std::ssize(tokens_)),
      number_(number),
      cache_(model.cache(std::min(model.config.context, prompt_ + count))) {
  if (tokens_.empty()) throw Error("[sample] expected a prompt of at least one token, got none");
  if (tokens_.size() > context_) from_ = tokens_.size() - context_;
}

std::span<const int32_t> DecodingState::unread() {
  int64_t read = 0;
  for (const KvCache& layer : cache_) read = std::max(read, layer.length);
  if (static_cast<size_t>(read) + tokens_.size() - from_ > context_) {
    from_ = tokens_.size() - std::max<size_t>(1, context_ / 2);
    for (KvCache& layer : cache_) layer.length = 0;
  }
  return std::span(tokens_).subspan(from_);
}

int32_t DecodingState::grow(const Tensor& logits, const SampleOptions& options) {
  const int32_t next = sample_token(logits, options, (number_ << 32) + static_cast<uint64_t>(written()), tokens_);
  grow(next);
  return next;
}

void DecodingState::grow(int32_t token) {
  from_ = tokens_.size();
  tokens_.push_back(token);
}

void sample(LanguageModel& model, const std::vector<int32_t>& prompt, int64_t count, const SampleOptions& options,
            const std::function<bool(int32_t)>& f) {
  if (!f) throw Error("[sample] f: expected a callable, got an empty std::function");
  if (count < 0) reject("sample", "a count of at least 0", std::to_string(count));
  const ArenaPtr arena = model.parameters().at(0)->var.value().arena();
  DecodingState text(model, prompt, count);
  for (int64_t i = 0; i < count; ++i) {
    const std::span<const int32_t> unread = text.unread();
    const Tensor logits = model.decode(Tensor::of<int32_t>(unread, {1, std::ssize(unread)}, arena), text.cache());
    if (!f(text.grow(logits, options))) return;
  }
}

}  // namespace tessera
