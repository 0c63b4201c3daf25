// Computation faults: sequences and targets, layers, experts, updates; memory and schedule faults, which change no
// values.

#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "optim/grad_norm.h"
#include "parallel/context_parallel.h"
#include "parallel/tensor_parallel.h"
#include "verify/defects/planting.h"

namespace tessera {
namespace {

int64_t micro_size(const TrainConfig& job) { return job.optim.batch / (job.plan.dp * job.plan.microbatches); }
int64_t last_microbatch(const TrainConfig& job) { return job.optim.batch - micro_size(job); }

// Takes each sequence from the index returned by `from`; -1: untrained targets.
using From = int64_t (*)(const TrainConfig& job, int64_t sequence);
auto loads(From from, bool only_targets = false) {
  return [from, only_targets](VerifyHooks& hooks, const TrainConfig& job) {
    hooks.loading = [=, context = job.model.context](Sequences sequences, const TrainConfig& run, int rank) {
      const bool has_last_stage = rank / (run.plan.ranks() / run.plan.pp) == run.plan.pp - 1;
      if (only_targets && !has_last_stage) return sequences;
      sequences.load = [=, load = sequences.load](int64_t step, int64_t first, int64_t count, int32_t* inputs,
                                                  int32_t* targets) {
        for (int64_t i = 0; i < count; ++i) {
          const int64_t place = from(job, first + i);
          load(step, place < 0 ? first + i : place, 1, inputs + i * context, targets + i * context);
          if (place < 0) std::fill_n(targets + i * context, context, -1);
        }
      };
      return sequences;
    };
  };
}

auto in_model(void (*inject)(Trainer& t)) {
  return [inject](VerifyHooks& hooks, const TrainConfig&) { then(hooks.made, inject); };
}

DecoderLayer& last_layer(Trainer& t) { return t.state().model().layer(t.state().model().config.layers - 1); }
Attention& last_attention(Trainer& t) { return *last_layer(t).all<Attention>().at(0); }
Var as_it_is(const Var& weight) { return weight; }

// R in place of I: the input gradient is not reduced.
void unsum_input(Trainer& t) { last_attention(t).qkv.hooks.input = column_input(t.state().groups.mesh["tp"], R); }
// P in place of I: the output is not reduced.
void unsum_output(Trainer& t) {
  last_attention(t).proj.hooks.matmul = [](const Var& x, const Var& w, const Var& b, PackedWeights* packs) {
    return linear(x, w, b, packs);
  };
}

void take_contiguous(Trainer& t) {
  Communicator& cp = t.state().groups.mesh["cp"];
  last_attention(t).set_attention([&cp](const Var& qkv, const Heads& heads, const AttentionOptions& options) {
    return ring_attention(qkv, heads, options, cp, SequencePartition::contiguous);
  });
}

StepInfo without_positions(StepInfo at) {
  at.positions = {};
  return at;
}

// Uses the documents of the micro-batch's next sequence.
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

const Requirement kTensorRanks{"tp", "2", [](const TrainConfig& j) { return j.plan.tp >= 2; }};
const Requirement kContextRanks{"cp", "2", [](const TrainConfig& j) { return j.plan.cp >= 2; }};
const Requirement kNoSequenceParts{"sp", "false", [](const TrainConfig& j) { return !j.plan.sp; }};
const Requirement kLlama{"family", "llama", [](const TrainConfig& j) { return j.model.family == Family::llama; }};
const Requirement kSeveral{"microbatches", "2",
                           [](const TrainConfig& j) { return j.plan.microbatches * j.plan.dp > 1; }};
// In bf16 the tolerance of a plan that splits sums admits a wrong mask, or a missing reduction in one layer.
const Requirement kNarrowBound{"dtype", "fp32", [](const TrainConfig& j) { return j.optim.dtype != DType::bfloat16; }};

const std::vector<Requirement> kExperts =
    wants(kNoTensorRanks, kNoContextRanks, kNoSequenceParts, kNoAdapters,
          Requirement{"experts", "4", [](const TrainConfig& j) { return j.model.experts.count >= 4; }},
          Requirement{"experts_per_token", "2", [](const TrainConfig& j) { return j.model.experts.per_token == 2; }});

// Each ep rank has at least two of at least four experts.
const std::vector<Requirement> kExpertRanks =
    wants(kExperts, Requirement{"dp", "2", [](const TrainConfig& j) { return j.plan.dp % 2 == 0; }},
          Requirement{"ep", "2", [](const TrainConfig& j) { return j.plan.ep == 2; }},
          Requirement{"experts", "4", [](const TrainConfig& j) { return j.model.experts.count % 4 == 0; }}, kDdp,
          Requirement{"all_reduce", "direct",
                      [](const TrainConfig& j) { return find_row(j.plan.all_reduce).adds_uniformly(); }});

// Swaps the first token's logits of the best and the worst expert.
Tensor with_a_lost_token(const Tensor& logits) {
  const Tensor out = logits.on_host().clone();
  with_floating(out.dtype(), "defect", [&](auto t) {
    using T = decltype(t);
    T *const first = out.data<T>(), *best = first, *worst = first;
    for (T* l = first; l < first + out.dim(-1); ++l) {
      if (static_cast<double>(*l) > static_cast<double>(*best)) best = l;
      if (static_cast<double>(*l) <= static_cast<double>(*worst)) worst = l;
    }
    std::swap(*best, *worst);
  });
  return out.to(logits.arena());
}

void lose_a_token(Trainer& t) {
  if (!is_last(t)) return;
  Linear& router = *last_layer(t).all<MixtureOfExperts>().at(0)->all<Linear>().at(0);
  router.wrap([](const Module::Inner& inner, const Var& x) {
    const Var logits = inner(x);
    return record_one("lose_a_token", with_a_lost_token(logits.value()), {logits.edge()},
                      [](Grads& g) { g.set(0, g.take_output(0)); });
  });
}

// Swaps the row counts that the first rank sends to the last rank's first and second expert.
int64_t swap_counts(Transport& transport, const Call& call) {
  const int64_t sent = transport.direct(call);
  auto* const counts = reinterpret_cast<int64_t*>(call.out);
  if (transport.rank() + 1 == transport.size()) std::swap(counts[0], counts[1]);
  return sent;
}

void sum_over_all(Trainer& t) {
  if (!t.state().groups.experts) return;
  for (const FlatUnit& shard : t.state().strategy().shards())
    if (shard.trainable() && shard.slots[0].parameter->is_expert) t.state().groups.experts->all_reduce(shard.grads);
}

const std::vector<Requirement> kShards = wants(
    kDataRanks, kDdp,
    Requirement{"zero", "1",
                [](const TrainConfig& j) { return j.plan.zero == ZeroStage::one || j.plan.zero == ZeroStage::two; }},
    Requirement{"shard_ranks", "2", [](const TrainConfig& j) { return j.plan.shard_ranks != 1; }});

// Does not update the first quarter of each unit.
void update_but_a_quarter(Trainer& t, const StepReport& report) {
  if (!is_last(t)) return t.update(report);
  std::vector<Tensor> quarters;
  for (const FlatUnit& unit : t.state().strategy().resident_units())
    quarters.push_back(unit.values.narrow(0, 0, unit.values.numel() / 4).clone());
  t.update(report);
  for (size_t u = 0; u < quarters.size(); ++u)
    t.state().strategy().resident_units()[u].values.narrow(0, 0, quarters[u].numel()).copy_from(quarters[u]);
}

// Shifts every shard by one position.
void update_and_misplace(Trainer& t, const StepReport& report) {
  t.update(report);
  const int ranks = t.state().strategy().shard_axis().size();
  for (const FlatUnit& unit : t.state().strategy().resident_units()) {
    if (!unit.trainable() && unit.values.numel() % ranks != 0) continue;
    const Tensor right = unit.values.clone();
    const int64_t size = right.numel() / ranks;
    for (int64_t r = 0; r < ranks; ++r)
      unit.values.narrow(0, (r + 1) % ranks * size, size).copy_from(right.narrow(0, r * size, size));
  }
}

void retain_gradients(VerifyHooks& hooks, const TrainConfig& job) {
  then(hooks.made, [retained = std::make_shared<std::vector<Tensor>>(), rank = last_rank(job)](Trainer& t) {
    if (t.state().groups.world.rank() != rank) return;
    for (const FlatUnit& unit : t.state().strategy().shards())
      if (unit.trainable())
        retained->push_back(Tensor::empty({unit.values.numel()}, data_options(t.state().job).grad_dtype,
                                          t.state().arena, Category::gradients));
  });
}

}  // namespace

std::vector<InjectedFault> computation_faults() {
  return {
      {"skipped-microbatch", "the last micro-batch of the last data rank is skipped", "microbatch-skipped",
       "on data rank {dp}", wants(kSeveral),
       loads([](const TrainConfig& j, int64_t s) { return s >= last_microbatch(j) ? -1 : s; })},
      {"repeated-microbatch", "the last data rank computes its second-to-last micro-batch twice and skips its last one",
       "microbatch-repeated", "on data rank {dp}", wants(kMicrobatches),
       loads([](const TrainConfig& j, int64_t s) { return s >= last_microbatch(j) ? s - micro_size(j) : s; })},
      {"shifted-sequences", "all micro-batches except the first begin one sequence too early", "wrong-sequences",
       kEverywhere, wants(kSeveral),
       loads([](const TrainConfig& j, int64_t s) { return s < micro_size(j) ? s : s - 1; }), 2},
      {"other-targets", "the last stage uses the targets of the next micro-batch", "wrong-targets", kOnLastStage,
       wants(kSeveral, kPipeline, kNoV),
       loads([](const TrainConfig& j, int64_t s) { return (s + micro_size(j)) % j.optim.batch; }, true)},
      {"missing-input-gradient-sum",
       "the QKV projection does not all-reduce the gradient of its input over the tensor ranks", "missing-backward-sum",
       kInLastBlock, wants(kTensorRanks, kNoSequenceParts, kNoAdapters, kNarrowBound), in_model(unsum_input)},
      {"missing-output-sum", "the attention output layer does not reduce its partial sums over the tensor ranks",
       "missing-forward-sum", kInLastBlock, wants(kTensorRanks, kNoSequenceParts, kNoAdapters, kNarrowBound),
       in_model(unsum_output)},
      {"unsummed-norm-weight", "the gradients of a norm's weight for each tensor rank's own tokens are not reduced",
       "weight-not-summed", kInLastBlock,
       wants(kTensorRanks, Requirement{"sp", "true", [](const TrainConfig& j) { return j.plan.sp; }}, kNoAdapters),
       in_model([](Trainer& t) { last_layer(t).all<Norm>().at(0)->transform(as_it_is); })},
      {"unsummed-head-norm",
       "the norm of queries and keys does not reduce its gradient over the tensor ranks, which shard the heads",
       "weight-not-summed", kInLastBlock,
       wants(kTensorRanks, kLlama, Requirement{"qk_norm", "true", [](const TrainConfig& j) { return j.model.qk_norm; }},
             kNoAdapters),
       in_model([](Trainer& t) { last_attention(t).transform(as_it_is); })},
      {"wrong-causal-mask", "ring attention treats each rank's two token chunks as one contiguous chunk",
       "context-positions", kInLastBlock,
       wants(kContextRanks, kNarrowBound,
             Requirement{"cp_mode", "ring", [](const TrainConfig& j) { return j.plan.cp_mode == ContextMode::ring; }}),
       in_model(take_contiguous)},
      {"wrong-positions", "each context rank numbers the rotary positions of its tokens from 0", "context-positions",
       kInLastBlock, wants(kContextRanks, kNarrowBound, kLlama),
       in_model([](Trainer& t) { last_layer(t).map_step_info(without_positions); })},
      {"wrong-documents", "a layer's attention uses the documents of a different sequence", "document-mask",
       kInLastBlock,
       wants(
           Requirement{"document_mask", "true", [](const TrainConfig& j) { return j.optim.document_mask; }},
           Requirement{"dtype", "fp32",
                       [](const TrainConfig& j) { return !splits_sums(j.plan) || j.optim.dtype != DType::bfloat16; }}),
       in_model([](Trainer& t) { last_layer(t).map_step_info(with_other_documents); }), 2},
      {"repeated-dropout", "every micro-batch uses the dropout masks of the first one", "dropout-masks", kEverywhere,
       wants(Requirement{"dropout", "0.1", [](const TrainConfig& j) { return j.model.dropout > 0; }}, kSeveral),
       in_model([](Trainer& t) { t.state().model().map_step_info(with_first_masks); })},
      {"misrouted-token", "the first token of every micro-batch is routed to the expert with the lowest score",
       "wrong-expert", "in block {block}, on rank {rank}", kExperts, in_model(lose_a_token)},
      {"swapped-expert-counts", "a rank swaps the row counts of two of its experts", "wrong-expert",
       "on the last rank of each group of ep", kExpertRanks, injects([](const TrainConfig&) {
         return FaultyCall{[](const std::string& axis, const Call& call) {
                             return axis == "ep" && call.op == Op::all_to_all && call.dtype == DType::int64;
                           },
                           swap_counts};
       })},
      {"experts-summed-over-all",
       "expert gradients are reduced over all data ranks, including ranks with different experts", "wrong-expert-sum",
       kEverywhere, kExpertRanks, [](VerifyHooks& h, const TrainConfig&) { then(h.summed, sum_over_all); }},
      {"missing-gather",
       "updated shards are not gathered: each rank continues with old values of the other ranks' shards",
       "missing-gather", kEverywhere, kShards, updates([](Trainer& t, const StepReport& r) {
         t.state().optimizer().step(r.lr, clip_factor(r.grad_norm, t.state().job.optim.clip));
       })},
      {"misplaced-gather", "each gathered shard is written to the position of the next rank's shard",
       "misplaced-gather", kEverywhere, kShards, updates(update_and_misplace)},
      {"stale-part", "after each update a rank continues with old values in a quarter of each unit", "stale-part",
       kOnLastRank, wants(kDdp), updates(update_but_a_quarter)},
      {"skipped-update", "the optimizer increments its step count without updating anything", "update-skipped",
       kEverywhere, wants(), updates([](Trainer& t, const StepReport&) {
         t.state().optimizer().count_step();
         t.state().strategy().gather_parameters();
       })},
      {"unclipped-rank", "one rank does not clip its gradients", "clipping", kOnLastRank,
       wants(kDdp,
             Requirement{"clip", "0.1", [](const TrainConfig& j) { return j.optim.clip > 0 && j.optim.clip <= 0.5; }}),
       updates([](Trainer& t, const StepReport& report) {
         StepReport r = report;
         if (is_last(t)) r.grad_norm = 0;
         t.update(r);
       })},
  };
}

std::vector<InjectedFault> resource_faults() {
  return {
      {"kept-gradients", "a rank retains a second buffer as large as its gradients", "kept-memory", kOnLastRank,
       wants(), retain_gradients},
      {"gpipe-for-1f1b", "all forward passes precede the first backward pass", "schedule", kEverywhere,
       wants(kPipeline,
             Requirement{"schedule", "1f1b",
                         [](const TrainConfig& j) {
                           return j.plan.schedule == ScheduleKind::one_f_one_b && j.plan.schedule_file.empty();
                         }},
             kMicrobatches),
       runs([](TrainConfig& job) { job.plan.schedule = ScheduleKind::gpipe; })},
  };
}

}  // namespace tessera
