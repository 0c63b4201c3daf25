// How the ranks of a mesh share the layers of a model, for LanguageModel::place().
//
//   std::unique_ptr<LanguageModel> model = make_model(config);      // shapes only
//   model->place({.tp = &mesh["tp"], .between = S(1), .cp = &mesh["cp"]});
//   a strategy of the data axis gives it memory
//   model->set_step({..., .tokens_total = T});
//   Loss loss = model->head_loss(model->hidden(ids), targets, scale);
#pragma once
#include "models/language_model.h"
#include "parallel/context_parallel.h"
#include "parallel/tensor_parallel.h"

namespace tessera {

// The axes must outlive the model; null is an axis of size 1. The loss is the same on every rank of tp.
struct ModelAxes {
  Communicator* tp = nullptr;
  // How activations lie between the cut products: I, or S(1) for Megatron's sequence parallelism. S(1, T) says how many
  // tokens of a sequence are here, when that is not the context.
  Placement between = I;
  // Each rank has the tokens at context_positions(): a step must say which (StepInfo::positions), and how many there
  // are.
  Communicator* cp = nullptr;
  ContextMode cp_mode = ContextMode::ring;
  // Ranks that share out the experts of each layer, each with sequences of its own.
  Communicator* ep = nullptr;
};

inline bool is_cut(const Communicator* axis) { return axis && axis->size() > 1; }

// How activations lie between the cut products, of any number of tokens. Throws Error (usage) naming the numbers, and
// what would work, when the ranks of tp do not divide the heads or the tokens of S(1), or are more than the entries of
// the vocabulary.
Placement checked_between(const ModelConfig& config, const ModelAxes& axes);

// The experts of each layer: cut over tp, their tokens over cp, and shared out over ep. Throws FieldError for ep
// without experts.
void place_experts(LanguageModel& model, const ModelAxes& axes, const Placement& between);

// Attention over sequences that are cut: each rank of `cp` has a part of each.
Attention::Core context_core(Communicator& cp, ContextMode mode);

}  // namespace tessera
