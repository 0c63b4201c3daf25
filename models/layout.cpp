// What any family of models can say of its axes.
#include "models/layout.h"

#include <string>

#include "parallel/experts/expert_parallel.h"
#include "tensor/error.h"

namespace tessera {
namespace {

// The rank counts nearest to n that divide `count`: "2", "2 or 4".
std::string nearest_divisors(int64_t count, int64_t n) {
  int64_t below = n, above = n;
  while (count % below != 0) --below;
  while (above < count && count % above != 0) ++above;
  return std::to_string(below) + (count % above == 0 && above > n ? " or " + std::to_string(above) : "");
}

void check_divides(const Communicator& tp, int64_t count, const std::string& what) {
  if (count % tp.size() != 0)
    throw Error("[tensor_parallel] " + tp.axis() + " axis: " + std::to_string(tp.size()) + " ranks cannot share " +
                std::to_string(count) + " " + what +
                "; the nearest number of ranks that can: " + nearest_divisors(count, tp.size()));
}

}  // namespace

Placement checked_between(const ModelConfig& config, const ModelAxes& axes) {
  const Communicator& tp = *axes.tp;
  const Placement& between = axes.between;
  if (!(between == I) && !(between == S(1)))
    throw Error("[tensor_parallel] between the blocks: expected I or S(1), found " + between.str());
  check_divides(tp, config.heads, "heads");
  check_divides(tp, config.all_heads().key, "heads of keys and values");
  if (between == S(1)) check_divides(tp, between.whole > 0 ? between.whole : config.context, "tokens of a sequence");
  if (config.vocab < tp.size())
    throw Error("[tensor_parallel] " + tp.axis() + " axis: " + std::to_string(tp.size()) + " ranks cannot share " +
                std::to_string(config.vocab) + " entries of a vocabulary; at most " + std::to_string(config.vocab) +
                " ranks can");
  return {between.kind, between.dim};
}

void place_experts(LanguageModel& model, const ModelAxes& axes, const Placement& between) {
  if (model.config.experts.count == 0 && is_cut(axes.ep))
    throw FieldError(
        "ep", "a model without experts has none to share out; expected 1, found " + std::to_string(axes.ep->size()));
  for (int64_t i = 0; i < model.config.layers; ++i)
    for (MixtureOfExperts* mixture : model.layer(i).all<MixtureOfExperts>()) {
      if (is_cut(axes.tp)) cut_experts(*mixture, *axes.tp, between);
      if (is_cut(axes.cp)) count_over(*mixture, *axes.cp, balance_of(axes.cp_mode));
      if (is_cut(axes.ep)) share_out_experts(*mixture, *axes.ep);
    }
}

Attention::Core context_core(Communicator& cp, ContextMode mode) {
  return [&cp, mode](const Var& qkv, const Heads& heads, const AttentionOptions& options) {
    return mode == ContextMode::ring ? ring_attention(qkv, heads, options, cp)
                                     : ulysses_attention(qkv, heads, options, cp);
  };
}

}  // namespace tessera
