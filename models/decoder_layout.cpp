// Partitioning of the decoder's layers: the only file that depends on both the decoder and the strategies. Placements
// and volume: parallel/tensor_parallel.h. S(1) adds an all-gather of e T C bytes (e B T C if documents restart
// positions) for the gradient of a position embedding, and two all-reduces of C elements for the last norm.
#include <cstdint>

#include "models/decoder.h"
#include "models/layout.h"

namespace tessera {
namespace {

void cut(DecoderBlock& b, Communicator& tp, const Placement& between) {
  token_wise(b.norm1, tp, between);
  head_wise(b.attn, tp, between);
  token_wise(b.drop1, tp, between);
  token_wise(b.norm2, tp, between);
  if (auto* mlp = dynamic_cast<Mlp*>(&b.mlp)) {
    colwise(mlp->up, tp, between);
    rowwise(mlp->down, tp, between);
  } else if (auto* gated = dynamic_cast<GatedMlp*>(&b.mlp)) {  // else a mixture of experts
    const int64_t hidden = gated->down.weight.dim(1);
    colwise(gated->gate_up, tp, between, {hidden, hidden});
    rowwise(gated->down, tp, between);
  }
  token_wise(b.drop2, tp, between);
}

}  // namespace

void Decoder::place(const ModelAxes& axes) {
  if (is_cut(axes.tp)) {
    Communicator& tp = *axes.tp;
    const Placement between = checked_between(config, axes);
    vocab_wise(tokens, tp, between);
    if (positions && between.kind == Placement::Kind::sharded)  // the lookup, (T, C) or (B, T, C), is replicated
      positions->wrap([&tp, between](const Module::Inner& inner, const Var& x) {
        const Var all = inner(x);
        Placement to = between;
        to.dim = all.shape().ndim() - 2;
        return redistribute(all, tp, I, to);
      });
    token_wise(drop, tp, between);
    for (DecoderBlock* block : blocks) cut(*block, tp, between);
    token_wise(norm, tp, between);
    if (&head != &tokens) vocab_wise(head, tp, between);
  }
  place_experts(*this, axes, {axes.between.kind, axes.between.dim});  // for sequences of any length
  if (is_cut(axes.cp))                                                // after tp, whose heads ulysses redistributes
    for (DecoderBlock* block : blocks) block->attn.set_attention(context_core(*axes.cp, axes.cp_mode));
}

}  // namespace tessera
