// Reference validation loss of a model on one rank, in plain loops.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "models/language_model.h"
#include "tests/support/tensors.h"

namespace tessera::test {

// Sum of the losses of `targets`, the next tokens of `ids`, for one unpadded sequence.
inline double direct_loss_sum(LanguageModel& model, std::span<const int32_t> ids, std::span<const int32_t> targets,
                              const ArenaPtr& arena) {
  const NoGrad no_grad;
  model.set_step({});
  const auto count = static_cast<int64_t>(ids.size());
  const std::vector<double> logits =
      host_values(model.logits(model.hidden(Tensor::of<int32_t>(ids, {1, count}, arena))).value());
  const size_t vocab = logits.size() / ids.size();
  double sum = 0;
  for (size_t t = 0; t < ids.size(); ++t) {
    const std::span<const double> row(logits.data() + t * vocab, vocab);
    const double largest = *std::max_element(row.begin(), row.end());
    double total = 0;
    for (const double z : row) total += std::exp(z - largest);
    sum += largest + std::log(total) - row[static_cast<size_t>(targets[t])];
  }
  return sum;
}

// Mean loss over all tokens except the first, each predicted once, in windows of the context length; documents after an
// `end` token are independent.
inline double direct_loss(LanguageModel& model, const std::vector<int32_t>& tokens, const ArenaPtr& arena,
                          std::optional<int32_t> end = {}) {
  const size_t last = tokens.size() - 1, context = static_cast<size_t>(model.config.context);
  double sum = 0;
  for (size_t begin = 0, stop = 0; begin < last; begin = stop) {
    const size_t window_ends = std::min(last, (begin / context + 1) * context);
    for (stop = begin + 1; stop < window_ends && !(end && tokens[stop - 1] == *end);) ++stop;
    const std::span<const int32_t> all(tokens);
    sum += direct_loss_sum(model, all.subspan(begin, stop - begin), all.subspan(begin + 1, stop - begin), arena);
  }
  return sum / static_cast<double>(last);
}

}  // namespace tessera::test
