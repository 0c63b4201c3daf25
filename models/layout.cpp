// Validation of layouts.
#include "models/layout.h"

#include <algorithm>
#include <cstdint>
#include <functional>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "base/error.h"
#include "parallel/experts/expert_parallel.h"

namespace tessera {
namespace {

void check_divides(const Communicator& tp, int64_t count, const std::string& what) {
  if (count % tp.size() != 0)
    throw Error("[tensor_parallel] " + tp.axis() + " axis: " + std::to_string(tp.size()) + " ranks do not divide " +
                std::to_string(count) + " " + what +
                "; nearest valid number of ranks: " + divisors_near(count, tp.size()));
}

}  // namespace

std::string divisors_near(int64_t n, int64_t wanted) {
  int64_t below = std::min(wanted, n), above = wanted;
  while (below > 1 && n % below != 0) --below;
  while (above < n && n % above != 0) ++above;
  return std::to_string(below) + (above > below && above <= n ? " or " + std::to_string(above) : "");
}

Placement checked_between(const ModelConfig& config, const ModelAxes& axes) {
  require_object(axes.tp, "[tensor_parallel] tp");
  const Communicator& tp = *axes.tp;
  const Placement& between = axes.between;
  if (!(between == I) && !(between == S(1)))
    throw Error("[tensor_parallel] placement between the blocks: expected I or S(1), got " + between.str());
  check_divides(tp, config.heads, "heads");
  check_divides(tp, config.all_heads().key, "key-value heads");
  if (between == S(1))
    check_divides(tp, between.full_size > 0 ? between.full_size : config.context, "tokens of a sequence");
  if (config.vocab < tp.size())
    throw Error("[tensor_parallel] " + tp.axis() + " axis: " + std::to_string(tp.size()) +
                " ranks exceed the vocabulary size, " + std::to_string(config.vocab) + "; expected at most " +
                std::to_string(config.vocab) + " ranks");
  return {between.kind, between.dim, 0, between == S(1) && tp.adds_in_pairs()};
}

void place_experts(LanguageModel& model, const ModelAxes& axes, const Placement& between) {
  if (model.config.experts.count == 0 && is_cut(axes.ep))
    throw FieldError("ep", "a model without experts requires 1, got " + std::to_string(axes.ep->size()));
  for (int64_t i = 0; i < model.config.layers; ++i)
    for (MixtureOfExperts* mixture : model.layer(i).all<MixtureOfExperts>()) {
      if (is_cut(axes.tp)) cut_experts(*mixture, *axes.tp, between);
      if (is_cut(axes.cp)) count_over(*mixture, *axes.cp, sequence_partition(axes.cp_mode));
      if (is_cut(axes.ep)) shard_experts(*mixture, *axes.ep);
    }
}

Attention::Core context_core(Communicator& cp, ContextMode mode) {
  return [&cp, mode](const Var& qkv, const Heads& heads, const AttentionOptions& options) {
    return mode == ContextMode::ring ? ring_attention(qkv, heads, options, cp)
                                     : ulysses_attention(qkv, heads, options, cp);
  };
}

}  // namespace tessera
