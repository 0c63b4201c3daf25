// Defects inside the model: the tensor and the context axis, dropout, documents.
#include "parallel/context_parallel.h"
#include "parallel/tensor_parallel.h"
#include "train/plan.h"
#include "verify/defects/groups.h"

namespace tessera {
namespace {

void in_model(VerifyHooks& hooks, const std::function<void(Trainer&)>& spoil) {
  hooks.made = [before = std::move(hooks.made), spoil](Trainer& t) {
    before(t);
    spoil(t);
  };
}

// Of the last layer that a rank has, whole or as a part of a pipeline.
DecoderLayer& last_layer(Trainer& t) { return t.model().layer(t.model().config.layers - 1); }

Needs of_tensor_axis(const Job& job) { return Needs(job).ranks("tp", &Plan::tp, 2); }

// In bf16 the bound of a plan that splits sums is wide enough for a wrong mask, or a sum that is missing in one layer.
Needs of_context_axis(const Job& job) {
  return Needs(job).ranks("cp", &Plan::cp, 2).need(job.optim.dtype != DType::bfloat16, "dtype", "fp32");
}

// R for I: what flows back is this rank's part alone.
void unsum_input(Trainer& t) { last_layer(t).all<Attention>().at(0)->qkv.share(column_input(t.mesh()["tp"], R)); }
// P for I: what flows on is.
void unsum_output(Trainer& t) {
  last_layer(t).all<Attention>().at(0)->proj.set_product(
      [](const Var& x, const Var& w, const Var& b, WeightPacks* packs) { return linear(x, w, b, packs); });
}
void unsum_norm(Trainer& t) {
  last_layer(t).all<Norm>().at(0)->see([](const Var& weight) { return weight; });
}
void unsum_head_norm(Trainer& t) {
  last_layer(t).all<Attention>().at(0)->see([](const Var& gamma) { return gamma; });
}

void take_contiguous(Trainer& t) {
  Communicator& cp = t.mesh()["cp"];
  last_layer(t).all<Attention>().at(0)->set_core(
      [&cp](const Var& qkv, const Heads& heads, const AttentionOptions& options) {
        return ring_attention(qkv, heads, options, cp, Balance::contiguous);
      });
}

StepInfo without_positions(StepInfo at) {
  at.positions = {};
  return at;
}

// Those of the next sequence of the micro-batch.
StepInfo with_other_documents(StepInfo at) {
  const Tensor own = at.documents.starts;
  if (!own.defined()) return at;
  const Tensor others = own.make(own.shape());
  for (int64_t b = 0; b < own.dim(0); ++b) others.narrow(0, b, 1).copy_from(own.narrow(0, (b + 1) % own.dim(0), 1));
  at.documents.starts = others;
  return at;
}

StepInfo with_first_masks(StepInfo at) {
  at.first_sequence = 0;
  return at;
}

}  // namespace

std::vector<Defect> defects_of_layers() {
  return {
      {"missing-input-gradient-sum",
       "the query, key and value layer does not sum the gradient of its input over the tensor ranks",
       Cause::missing_backward_sum,
       [](const Job& j) {
         return of_tensor_axis(j)
             .need(!j.plan.sp, "sp", "false")
             .need(j.model.lora.rank == 0, "lora_rank", "0")
             .need(j.optim.dtype != DType::bfloat16, "dtype", "fp32");
       },
       in_last_block, [](VerifyHooks& h, const Job&) { in_model(h, unsum_input); }},
      {"missing-output-sum", "attention's output layer does not sum its parts over the tensor ranks",
       Cause::missing_forward_sum,
       [](const Job& j) {
         return of_tensor_axis(j)
             .need(!j.plan.sp, "sp", "false")
             .need(j.model.lora.rank == 0, "lora_rank", "0")
             .need(j.optim.dtype != DType::bfloat16, "dtype", "fp32");
       },
       in_last_block, [](VerifyHooks& h, const Job&) { in_model(h, unsum_output); }},
      {"unsummed-norm-weight",
       "each tensor rank has the gradient of a norm's weight for its own tokens, and these gradients are not summed",
       Cause::weight_not_summed,
       [](const Job& j) {
         return of_tensor_axis(j).need(j.plan.sp, "sp", "true").need(j.model.lora.rank == 0, "lora_rank", "0");
       },
       in_last_block, [](VerifyHooks& h, const Job&) { in_model(h, unsum_norm); }},
      {"unsummed-head-norm",
       "the norm of queries and keys does not sum its gradient over the ranks that share out the heads",
       Cause::weight_not_summed,
       [](const Job& j) {
         return of_tensor_axis(j)
             .need(j.model.family == Family::llama, "family", "llama")
             .need(j.model.qk_norm, "qk_norm", "true")
             .need(j.model.lora.rank == 0, "lora_rank", "0");
       },
       in_last_block, [](VerifyHooks& h, const Job&) { in_model(h, unsum_head_norm); }},
      {"wrong-causal-mask", "ring attention treats each rank's tokens as one run of the sequence, though they are two",
       Cause::context_positions,
       [](const Job& j) { return of_context_axis(j).need(j.plan.cp_mode == ContextMode::ring, "cp_mode", "ring"); },
       in_last_block, [](VerifyHooks& h, const Job&) { in_model(h, take_contiguous); }},
      {"wrong-positions", "each context rank counts the rotary positions of its tokens from 0",
       Cause::context_positions,
       [](const Job& j) { return of_context_axis(j).need(j.model.family == Family::llama, "family", "llama"); },
       in_last_block,
       [](VerifyHooks& h, const Job&) {
         in_model(h, [](Trainer& t) { last_layer(t).adjust_step(without_positions); });
       }},
      {"wrong-documents", "a layer's attention uses the documents of another sequence", Cause::document_mask,
       [](const Job& j) {
         return Needs(j)
             .need(j.optim.document_mask, "document_mask", "true")
             .need(!splits_sums(j.plan) || j.optim.dtype != DType::bfloat16, "dtype", "fp32")
             .batch_of(2);
       },
       in_last_block,
       [](VerifyHooks& h, const Job&) {
         in_model(h, [](Trainer& t) { last_layer(t).adjust_step(with_other_documents); });
       }},
      {"repeated-dropout", "every micro-batch draws the dropout masks of the first one", Cause::dropout_masks,
       [](const Job& j) {
         return Needs(j)
             .need(j.model.dropout > 0, "dropout", "0.1")
             .need(j.plan.microbatches * j.plan.dp > 1, "microbatches", "2");
       },
       everywhere,
       [](VerifyHooks& h, const Job&) { in_model(h, [](Trainer& t) { t.model().adjust_step(with_first_masks); }); }},
  };
}

}  // namespace tessera
