// Choosing among logits, and the walk along the text.
#include "models/sample.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "tensor/random.h"

namespace tessera {
namespace {

// How many of the `order`ed weights take part, by top-k and top-p.
size_t kept(const std::vector<double>& weights, const std::vector<int32_t>& order, const SampleOptions& o) {
  size_t n = order.size();
  if (o.top_k > 0) n = std::min(n, static_cast<size_t>(o.top_k));
  if (o.top_p >= 1) return n;
  double total = 0, reached = 0;
  for (size_t i = 0; i < n; ++i) total += weights[static_cast<size_t>(order[i])];
  size_t take = 0;
  while (take < n && reached < o.top_p * total) reached += weights[static_cast<size_t>(order[take++])];
  return std::max<size_t>(take, 1);
}

Tensor as_ids(const std::vector<int32_t>& tokens, size_t from, const Tensor& like) {
  const std::span<const int32_t> part = std::span(tokens).subspan(from);
  return Tensor::of<int32_t>(part, {1, static_cast<int64_t>(part.size())}, like.arena());
}

}  // namespace

int32_t draw_token(const Tensor& logits_any, const SampleOptions& o, uint64_t index) {
  const std::vector<double> logits = logits_any.to(DType::float64).to_vector<double>();
  const size_t vocab = o.vocab > 0 ? std::min(logits.size(), static_cast<size_t>(o.vocab)) : logits.size();
  std::vector<int32_t> order(vocab);
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int32_t a, int32_t b) {
    return logits[static_cast<size_t>(a)] > logits[static_cast<size_t>(b)];
  });
  if (o.temperature == 0) return order[0];
  const double top = logits[static_cast<size_t>(order[0])];
  std::vector<double> weights(vocab);
  for (size_t i = 0; i < vocab; ++i) weights[i] = std::exp((logits[i] - top) / o.temperature);
  const size_t n = kept(weights, order, o);
  double total = 0;
  for (size_t i = 0; i < n; ++i) total += weights[static_cast<size_t>(order[i])];
  double left = static_cast<double>(Philox::named(o.seed, "sample").uniform(index)) * total;
  for (size_t i = 0; i < n; ++i)
    if ((left -= weights[static_cast<size_t>(order[i])]) < 0) return order[i];
  return order[n - 1];
}

void sample(LanguageModel& model, const std::vector<int32_t>& prompt, int64_t count, const SampleOptions& options,
            const std::function<bool(int32_t)>& f) {
  if (prompt.empty()) throw Error("[sample] the prompt has no tokens; expected at least one");
  const auto context = static_cast<size_t>(model.config.context);
  const Tensor& like = model.parameters().at(0)->var.value();
  std::vector<int32_t> text = prompt;
  auto caches = model.caches(1);
  size_t from = text.size() > context ? text.size() - context : 0;
  for (int64_t i = 0; i < count; ++i) {
    if (static_cast<size_t>(caches[0].length) + text.size() - from > context) {
      from = text.size() - std::max<size_t>(1, context / 2);
      for (KvCache& c : caches) c.length = 0;
    }
    const Tensor logits = model.decode(as_ids(text, from, like), caches);
    const int32_t next = draw_token(logits, options, static_cast<uint64_t>(i));
    from = text.size();
    text.push_back(next);
    if (!f(next)) return;
  }
}

}  // namespace tessera
