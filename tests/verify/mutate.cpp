// One defect at a time.
#include "tests/verify/mutate.h"

#include <algorithm>
#include <vector>

#include "parallel/context_parallel.h"
#include "parallel/tensor_parallel.h"
#include "tensor/ops/elementwise.h"
#include "tests/support/fault_transport.h"
#include "train/plan.h"

namespace tessera::test {
namespace {

void scale_gradient(const FlatUnit& shard, double factor) {
  Tensor grads = shard.grads;
  scale_(grads, factor);
}

bool is_last(Trainer& t) { return t.world().rank() == t.world().size() - 1; }

void drop_first_call(LaunchOptions& how) {
  Faults faults;
  for (int r = 0; r < how.ranks; ++r) faults[r] = {{.kind = Fault::Kind::drop}};
  how.around = with_faults(faults);
}

// The sequences that a rank of the world loads.
Sequences mutated(Sequences sequences, Mutation mutation, const Job& job, int rank) {
  const Plan& p = job.plan;
  const int64_t batch = job.optim.batch, size = batch / (p.dp * p.microbatches), last = batch - size,
                context = job.model.context;
  const bool at_end = p.pp > 1 && rank / (p.ranks() / p.pp) == p.pp - 1;  // loads nothing but targets
  auto load = sequences.load;
  sequences.load = [=](int64_t step, int64_t first, int64_t count, int32_t* inputs, int32_t* targets) {
    int64_t from = first;
    if (mutation == Mutation::shift_sequences && first > 0) from = first - 1;
    if (mutation == Mutation::other_microbatch && at_end) from = (first + size) % batch;
    load(step, from, count, inputs, targets);
    if (mutation == Mutation::skip_microbatch && first + count > last) {
      const int64_t tokens = (first + count - std::max(first, last)) * context;
      std::fill(targets + count * context - tokens, targets + count * context, -1);
    }
  };
  return sequences;
}

void damage_model(Trainer& t, Mutation mutation) {
  Communicator &tp = t.mesh()["tp"], &cp = t.mesh()["cp"];
  DecoderLayer& layer = t.model().layer(t.model().config.layers - 1);
  if (mutation == Mutation::unsummed_input) layer.all<Attention>().at(0)->qkv.set_product(column_product(tp, R));
  if (mutation == Mutation::unsummed_norm) layer.all<Norm>().at(0)->see([](const Var& weight) { return weight; });
  if (mutation == Mutation::unsummed_heads) layer.all<Attention>().at(0)->see([](const Var& gamma) { return gamma; });
  if (mutation == Mutation::wrong_positions)
    layer.all<Attention>().at(0)->adjust_step([](StepInfo at) {
      at.positions = {};
      return at;
    });
  if (mutation == Mutation::wrong_documents)
    layer.all<Attention>().at(0)->adjust_step([](StepInfo at) {
      const Tensor own = at.documents.starts, others = own.make(own.shape());
      for (int64_t b = 0; b < own.dim(0); ++b) others.narrow(0, b, 1).copy_from(own.narrow(0, (b + 1) % own.dim(0), 1));
      at.documents.starts = others;
      return at;
    });
  if (mutation == Mutation::wrong_mask)
    layer.all<Attention>().at(0)->set_core([&cp](const Var& qkv, const Heads& heads, const AttentionOptions& options) {
      return ring_attention(qkv, heads, options, cp, Balance::contiguous);
    });
}

void damage_gradients(Trainer& t, Mutation mutation) {
  for (const FlatUnit& shard : t.strategy().shards()) {
    if (mutation == Mutation::divide_twice) scale_gradient(shard, 1.0 / t.data_axis().size());
    if (mutation == Mutation::untied && shard.slots[0].parameter->is_copy()) scale_gradient(shard, 0.5);
  }
}

// The first quarter of each unit stays as it was.
void update_but_a_quarter(Trainer& t, const StepReport& report) {
  std::vector<Tensor> old;
  for (const FlatUnit& unit : t.strategy().residents()) old.push_back(unit.values.clone());
  t.update(report);
  size_t at = 0;
  for (const Tensor& values : old) {
    const Tensor now = t.strategy().residents()[at++].values;
    const int64_t quarter = values.numel() / 4;
    now.narrow(0, 0, quarter).copy_from(values.narrow(0, 0, quarter));
  }
}

void damaged_update(Trainer& t, StepReport report, Mutation mutation) {
  if (mutation == Mutation::unclipped && is_last(t)) report.grad_norm = 0;
  if (mutation == Mutation::stale_shard && is_last(t))
    update_but_a_quarter(t, report);
  else
    t.update(report);
}

}  // namespace

VerifyHooks hooks_of(Mutation mutation) {
  VerifyHooks hooks;
  if (mutation == Mutation::drop_reduction) hooks.launching = drop_first_call;
  if (mutation == Mutation::other_order) hooks.launching = [](LaunchOptions& how) { how.algorithm = Algorithm::ring; };
  hooks.loading = [=](Sequences sequences, const Job& job, int rank) {
    return mutated(std::move(sequences), mutation, job, rank);
  };
  hooks.made = [=](Trainer& t) { damage_model(t, mutation); };
  hooks.summed = [=](Trainer& t) { damage_gradients(t, mutation); };
  hooks.update = [=](Trainer& t, const StepReport& report) { damaged_update(t, report, mutation); };
  return hooks;
}

}  // namespace tessera::test
