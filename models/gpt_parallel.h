// The GPT over the ranks of a mesh: the only file that knows both the model and the strategies.
//
//   Gpt model(config);                                   // shapes only
//   tensor_parallel(model, mesh["tp"], S(1));            // Megatron with sequence parallelism; I: without
//   model.materialize(...), or a strategy of the data axis, which gives it memory
//   model.set_step({..., .tokens_total = T});
//   Loss loss = parallel_loss(model, model.hidden(ids), targets, scale, mesh["tp"]);
#pragma once
#include "models/gpt.h"
#include "parallel/context_parallel.h"
#include "parallel/vocab_parallel.h"

namespace tessera {

// Cuts every block, both embeddings' uses and the head; on an axis of size 1 it does nothing. `between` is I or S(1):
// how the activations between the cut products lie. S(1, T) says how many tokens of a sequence are here, when that is
// not the context. To be called before the model has memory; `tp` must outlive it. Throws Error (usage) naming the
// numbers, and what would work, when the ranks do not divide the heads or those tokens, or are more than the entries of
// the vocabulary.
//
// table of placements, volume: parallel/tensor_parallel.h and parallel/vocab_parallel.h. With S(1) there are also an
// all-gather of e T C bytes, of the position table's gradient, and two all-reduces of C elements for the last norm.
void tensor_parallel(Gpt& model, Communicator& tp, Placement between);

// Attention over sequences of which each rank of `cp` has a part, the tokens at context_positions(): a step must say
// which (StepInfo::positions), and how many there are. On an axis of size 1 it does nothing; `cp` must outlive the
// model. Comes after tensor_parallel(), whose heads it deals out again under `ulysses`.
void context_parallel(Gpt& model, Communicator& cp, ContextMode mode);

// The loss of a model that was cut over `tp`, or of any on an axis of size 1: `hidden` as model.hidden() gives it,
// targets int32 of any shape, `scale` as in cross_entropy(). The same on every rank of `tp`. Ranks that share out the
// vocabulary have their part of the logits whole.
Loss parallel_loss(Gpt& model, const Var& hidden, const Tensor& targets, double scale, Communicator& tp);

}  // namespace tessera
