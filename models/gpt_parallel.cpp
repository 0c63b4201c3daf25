// Which layer is cut how.
#include "models/gpt_parallel.h"

#include <string>
#include <utility>

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

void check(const GptConfig& config, const Communicator& tp, const Placement& between) {
  if (!(between == I) && !(between == S(1)))
    throw Error("[tensor_parallel] between the blocks: expected I or S(1), found " + between.str());
  check_divides(tp, config.heads, "heads");
  if (between == S(1)) check_divides(tp, between.whole > 0 ? between.whole : config.context, "tokens of a sequence");
  if (config.vocab < tp.size())
    throw Error("[tensor_parallel] " + tp.axis() + " axis: " + std::to_string(tp.size()) + " ranks cannot share " +
                std::to_string(config.vocab) + " entries of a vocabulary; at most " + std::to_string(config.vocab) +
                " ranks can");
}

void cut(Block& b, int64_t heads, Communicator& tp, const Placement& between) {
  token_wise(b.norm1, tp, between);
  colwise(b.attn.qkv, tp, between, 3);
  head_wise(b.attn, tp, heads);
  rowwise(b.attn.proj, tp, between);
  token_wise(b.drop1, tp, between);
  token_wise(b.norm2, tp, between);
  colwise(b.mlp.up, tp, between);
  rowwise(b.mlp.down, tp, between);
  token_wise(b.drop2, tp, between);
}

}  // namespace

void tensor_parallel(Gpt& model, Communicator& tp, Placement between) {
  if (tp.size() == 1) return;
  check(model.config, tp, between);
  between.whole = 0;  // any number of tokens that the ranks divide
  vocab_wise(model.tokens, tp, between);
  if (between == S(1))  // the positions' lookup, (T, C), is the same everywhere
    model.positions.wrap(
        [&tp](const Module::Inner& inner, const Var& x) { return redistribute(inner(x), tp, I, S(0)); });
  token_wise(model.drop, tp, between);
  for (Block* block : model.blocks) cut(*block, model.config.heads, tp, between);
  token_wise(model.norm, tp, between);
  if (!model.config.tied) vocab_wise(model.head, tp, between);
}

void context_parallel(Gpt& model, Communicator& cp, ContextMode mode) {
  if (cp.size() == 1) return;
  for (Block* block : model.blocks)
    block->attn.set_core([&cp, mode](const Var& qkv, int64_t heads, const AttentionOptions& options) {
      return mode == ContextMode::ring ? ring_attention(qkv, heads, options, cp)
                                       : ulysses_attention(qkv, heads, options, cp);
    });
}

Loss parallel_loss(Gpt& model, const Var& hidden, const Tensor& targets, double scale, Communicator& tp) {
  if (tp.size() == 1) return model.head_loss(hidden, targets, scale);
  return vocab_parallel_cross_entropy(model.logits(hidden), targets.contiguous().reshape({-1}), scale, tp,
                                      model.config.vocab);
}

}  // namespace tessera
