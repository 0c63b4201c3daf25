// Which layer of a Llama is cut how; volumes are those of models/gpt_layout.cpp, without a table of positions.
#include "models/layout.h"
#include "models/llama.h"

namespace tessera {

void Llama::place(const ModelAxes& axes) {
  if (is_cut(axes.tp)) {
    Communicator& tp = *axes.tp;
    const Placement between = checked_between(config, axes);
    vocab_wise(tokens, tp, between);
    token_wise(drop, tp, between);
    for (LlamaBlock* b : blocks) {
      token_wise(b->norm1, tp, between);
      head_wise(b->attn, tp, between);
      token_wise(b->drop1, tp, between);
      token_wise(b->norm2, tp, between);
      if (auto* mlp = dynamic_cast<GatedMlp*>(&b->mlp)) {  // else a mixture of experts
        colwise(mlp->gate_up, tp, between, {config.hidden(), config.hidden()});
        rowwise(mlp->down, tp, between);
      }
      token_wise(b->drop2, tp, between);
    }
    token_wise(norm, tp, between);
    if (&head != &tokens) vocab_wise(head, tp, between);
  }
  place_experts(*this, axes, axes.between);
  if (is_cut(axes.cp))
    for (LlamaBlock* b : blocks) b->attn.set_core(context_core(*axes.cp, axes.cp_mode));
}

}  // namespace tessera
