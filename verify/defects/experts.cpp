// Defects of experts: their tokens, the counts of these, and the sums of their gradients.
#include <utility>

#include "verify/defects/groups.h"
#include "verify/defects/spoilt_transport.h"

namespace tessera {
namespace {

Needs of_experts(const Job& job) {
  return Needs(job)
      .need(job.plan.tp == 1, "tp", "1")
      .need(job.plan.cp == 1, "cp", "1")
      .need(!job.plan.sp, "sp", "false")
      .need(job.model.lora.rank == 0, "lora_rank", "0")
      .need(job.model.experts.count >= 4, "experts", "4")
      .need(job.model.experts.per_token == 2, "experts_per_token", "2");
}

// Two of four experts and more on each rank of ep.
Needs of_expert_axis(const Job& job) {
  return of_experts(job)
      .need(job.plan.dp % 2 == 0, "dp", "2")
      .need(job.plan.ep == 2, "ep", "2")
      .need(job.model.experts.count % 4 == 0, "experts", "4")
      .ddp()
      .need(job.plan.all_reduce != Algorithm::ring, "all_reduce", "direct");
}

// The expert that the router likes best for the first token, and the one that it likes least, change places.
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
  if (t.world().rank() + 1 != t.world().size()) return;
  DecoderLayer& last = t.model().layer(t.model().config.layers - 1);
  Linear& router = *last.all<MixtureOfExperts>().at(0)->all<Linear>().at(0);
  router.wrap([](const Module::Inner& inner, const Var& x) {
    const Var logits = inner(x);
    return record_one("lose_a_token", with_a_lost_token(logits.value()), {logits.edge()},
                      [](Grads& g) { g.give(0, g.take_output(0)); });
  });
}

// How many rows the first rank sends to the first and to the second expert of the last rank.
int64_t swap_counts(Transport& transport, const Call& call) {
  const int64_t sent = transport.direct(call);
  auto* const counts = reinterpret_cast<int64_t*>(call.out);
  if (transport.rank() + 1 == transport.size()) std::swap(counts[0], counts[1]);
  return sent;
}

void sum_over_all(Trainer& t) {
  if (!t.expert_ranks()) return;
  for (const FlatUnit& shard : t.strategy().shards())
    if (shard.trainable() && shard.slots[0].parameter->is_expert) t.expert_ranks()->all_reduce(shard.grads);
}

}  // namespace

std::vector<Defect> defects_of_experts() {
  return {
      {"misrouted-token", "the first token of every micro-batch goes to the expert that the router likes least",
       Cause::wrong_expert, [](const Job& j) { return of_experts(j); },
       [](const Job& j) { return in_last_block(j) + ", " + on_last_rank(j); },
       [](VerifyHooks& h, const Job&) {
         h.made = [before = std::move(h.made)](Trainer& t) {
           before(t);
           lose_a_token(t);
         };
       }},
      {"swapped-expert-counts", "a rank takes the number of rows for one of its experts for that of another",
       Cause::wrong_expert, [](const Job& j) { return of_expert_axis(j); },
       [](const Job&) { return "on the last rank of each group of ep"; },
       [](VerifyHooks& h, const Job&) {
         spoil(h, {[](const std::string& axis, const Call& call) {
                     return axis == "ep" && call.op == Op::all_to_all && call.dtype == DType::int64;
                   },
                   swap_counts});
       }},
      {"experts-summed-over-all",
       "gradients of experts are summed over all data ranks, as others are, though these have other experts",
       Cause::wrong_expert_sum, [](const Job& j) { return of_expert_axis(j); }, everywhere,
       [](VerifyHooks& h, const Job&) {
         h.summed = [before = std::move(h.summed)](Trainer& t) {
           before(t);
           sum_over_all(t);
         };
       }},
  };
}

}  // namespace tessera
