// Partitioning of a model's layers over a mesh, for LanguageModel::place().
//
//   std::unique_ptr<LanguageModel> model = make_model(config);      // shapes only
//   model->place({.tp = &mesh["tp"], .between = S(1), .cp = &mesh["cp"]});
//   a data-parallel strategy materializes it
//   model->set_step({..., .tokens_total = T});
//   Loss loss = model->head_loss(model->hidden(ids), targets, scale);
#pragma once
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "models/language_model.h"
#include "parallel/context_parallel.h"
#include "parallel/tensor_parallel.h"

namespace tessera {

// The axes must outlive the model; null: size 1. The loss is the same on every tp rank.
struct ModelAxes {
  Communicator* tp = nullptr;
  // Placement of activations between sharded matmuls: I, or S(1) for Megatron's sequence parallelism. S(1, T) specifies
  // T tokens per sequence if T is not the context.
  Placement between = I;
  // Each rank has the tokens at context_positions(); steps must specify StepInfo::positions and the total number of
  // tokens.
  Communicator* cp = nullptr;
  ContextMode cp_mode = ContextMode::ring;
  // Ranks with different sequences that shard the experts of each layer.
  Communicator* ep = nullptr;
};

// "2 or 4": the divisors of n nearest to `wanted`.
std::string divisors_near(int64_t n, int64_t wanted);
inline bool is_cut(const Communicator* axis) { return axis && axis->size() > 1; }

// ModelAxes::between for any number of tokens. Throws Error (usage) with the sizes and the nearest valid values if tp
// does not divide the heads or the tokens of S(1), or exceeds the vocabulary.
Placement checked_between(const ModelConfig& config, const ModelAxes& axes);

// Shards each expert over tp, its tokens over cp, and the set of experts of a layer over ep. Throws FieldError for ep
// without experts.
void place_experts(LanguageModel& model, const ModelAxes& axes, const Placement& between);

Attention::Core context_core(Communicator& cp, ContextMode mode);

}  // namespace tessera
