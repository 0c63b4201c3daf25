// Sizes from sizes.
#include "train/plan_sizes.h"

#include <algorithm>
#include <utility>

#include "models/layout.h"
#include "nn/adapters/lora.h"
#include "parallel/comm/fake_transport.h"

namespace tessera {
namespace {

void add_adapters(PartSizes& part, Module& unit) {
  for (const Lora* l : unit.all<Lora>())
    ++(l->b.parameter(l->b.weight).shard.is_whole() ? part.row_adapters : part.column_adapters);
}

bool has(const Module::Unit& unit, const Var& weight) {
  return std::ranges::any_of(unit.slots, [&](const Slot& slot) { return &slot.parameter->var == &weight; });
}

// As the model lays itself out on that rank of tp, beside ranks that are not there: of each pipeline rank.
std::vector<PartSizes> parts_of(const Job& job, const PlanSizes& s, const std::vector<Range>& layers, int tp) {
  Communicator axis(std::make_unique<FakeTransport>(tp, static_cast<int>(s.plan.tp)), "tp");
  Communicator ep(std::make_unique<FakeTransport>(0, static_cast<int>(s.plan.ep)), "ep");
  ModelConfig config = s.config;
  config.tie_copies = s.plan.tie_copies || s.schedule.stages > 1;
  const std::unique_ptr<LanguageModel> model = job.make(config);
  model->place({.tp = &axis, .between = s.plan.sp ? S(1, s.tokens) : I, .ep = &ep});
  std::vector<PartSizes> parts(static_cast<size_t>(s.plan.pp));
  const auto part_with = [&](int stage) -> PartSizes& {
    return parts[static_cast<size_t>(s.schedule.rank_of_stage[static_cast<size_t>(stage)])];
  };
  part_with(0).first = true;
  part_with(s.schedule.stages - 1).last = true;
  for (int stage = 0; stage < s.schedule.stages; ++stage)
    part_with(stage).layers += layers[static_cast<size_t>(stage)].size();
  const std::vector<Module::Unit> units = model->layout();
  const std::vector<int64_t> at = model->layers_of_units();
  const std::vector<int> stages = stages_of_units(*model, layers);
  for (size_t u = 0; u < units.size(); ++u) {
    PartSizes& part = part_with(stages[u]);
    UnitSizes unit;
    unit.table = units[u].slots[0].parameter->is_tied();
    unit.layer = at[u];
    unit.trainable = units[u].trainable;
    unit.value = units[u].packed ? 1 : s.value;
    unit.state = unit.trainable ? state_bytes(job.optim, units[u].matrices) : 0;
    if (units[u].is_expert()) unit.ep = s.plan.ep;
    const bool adapters = unit.trainable && config.lora.rank > 0;
    int64_t whole = 0, norms = 0, head_norms = 0;
    for (const Slot& slot : units[u].slots) {
      unit.parameters.push_back(slot.size);
      if (units[u].matrices) unit.matrices.push_back(slot.parameter->whole);
      const ShardSpec& shard = slot.parameter->shard;
      if (shard.is_whole()) ++whole;
      const bool matrix = !shard.is_whole() && slot.parameter->whole.rank() == 2 && !units[u].is_expert();
      if (matrix && !adapters && at[u] >= 0 && at[u] < config.layers) ++(shard.dim == 0 ? part.columns : part.rows);
    }
    if (adapters) add_adapters(part, *units[u].module);
    int64_t routers = 0;
    for (MixtureOfExperts* mixture : units[u].module->all<MixtureOfExperts>()) {
      if (!has(units[u], mixture->router().weight)) continue;
      ++routers;
      const bool pair = mixture->options().experts.shared > 0 && s.plan.tp > 1;  // it goes with the experts
      part.columns -= pair ? 1 : 0;
      part.rows -= pair ? 1 : 0;
    }
    part.routers += routers;
    for (Norm* norm : units[u].module->all<Norm>()) norms += static_cast<int64_t>(norm->parameters().size());
    for (const Attention* attention : units[u].module->all<Attention>()) head_norms += attention->norm_q ? 2 : 0;
    if (config.lora.rank == 0 &&
        !units[u].matrices) {  // else nothing of what is whole is trained but parts of adapters
      part.norms += norms;
      part.head_norms += head_norms;
      (at[u] < 0 ? part.tables : part.biases) += whole - norms - head_norms - routers;
    }
    // A table for look-ups is needed once, the rest forward and backward; a table that is the head too needs both.
    // An expert is needed once more where its layer is made again, since it is a unit below it.
    const bool again = units[u].is_expert() && config.recompute == Recompute::block;
    unit.uses = at[u] >= 0 ? (again ? 3 : 2) : unit.table && !config.tie_copies ? 3 : 1;
    part.units.push_back(std::move(unit));
  }
  return parts;
}

}  // namespace

int64_t UnitSizes::size() const {
  int64_t sum = 0;
  for (const int64_t p : parameters) sum += round_up(p, kSlot);
  return sum;
}

int64_t PartSizes::whole(bool trained) const {
  int64_t sum = 0;
  for (const UnitSizes& u : units) sum += u.trainable || !trained ? u.size() : 0;
  return sum;
}

// A layer is in every `fragments`-th; what stands before the first or behind the last layer goes with it, but the tied
// weight with the first.
int64_t PartSizes::whole_of_fragment(int64_t fragment, int64_t fragments, int64_t all_layers) const {
  int64_t sum = 0;
  for (const UnitSizes& u : units) {
    const int64_t layer = u.table || u.layer < 0 ? 0 : std::min(u.layer, all_layers - 1);
    if (u.trainable && layer % fragments == fragment) sum += u.size();
  }
  return sum;
}

int64_t PartSizes::padded(int64_t ranks, bool trained) const {
  int64_t sum = 0;
  for (const UnitSizes& u : units) sum += u.trainable || !trained ? u.padded(ranks) : 0;
  return sum;
}

int64_t PartSizes::pieces(int64_t ranks, bool trained) const {
  int64_t sum = 0;
  for (const UnitSizes& u : units) sum += u.trainable || !trained ? u.piece(ranks) : 0;
  return sum;
}

int64_t PartSizes::piece_bytes(int64_t ranks) const {
  int64_t sum = 0;
  for (const UnitSizes& u : units) sum += u.piece(ranks) * u.value;
  return sum;
}

int64_t PartSizes::value_bytes(int64_t ranks) const {
  int64_t sum = 0;
  for (const UnitSizes& u : units) sum += (ranks > 0 ? u.padded(ranks) : u.size()) * u.value;
  return sum;
}

int64_t PartSizes::state_bytes(int64_t ranks) const {
  int64_t sum = 0;
  for (const UnitSizes& u : units) sum += (ranks > 0 ? u.piece(ranks) : u.size()) * u.state;
  return sum;
}

PlanSizes::PlanSizes(const Job& job)
    : plan(job.plan),
      config(model_config(job, job.model.vocab)),
      schedule(schedule_of(plan)),
      data(plan.dp * plan.cp),
      cut(shared_over(plan)),
      m(plan.microbatches) {
  const DataOptions d = data_options(job);
  const Optimisation& o = job.optim;
  value = size_of(d.dtype);
  grad = size_of(d.grad_dtype);
  wide = d.dtype == DType::float64 ? 8 : 4;
  bucket_bytes = d.bucket_bytes;
  documents = o.document_mask;
  sequences = o.batch / (plan.dp * m);
  tokens = config.context / plan.cp;
  tied_over_ranks = schedule.rank_of_stage.front() != schedule.rank_of_stage.back();
  const std::unique_ptr<LanguageModel> whole = job.make(config);
  units = static_cast<int64_t>(whole->layout().size());
  const std::vector<Range> layers = split_layers(*whole, schedule.stages);
  parts.resize(static_cast<size_t>(plan.pp));
  // Where the first and the last rank of tp have the same sizes, all have.
  const auto of_rank = [&](int64_t t) { return parts_of(job, *this, layers, static_cast<int>(t)); };
  const std::vector<PartSizes> first = of_rank(0), last = plan.tp > 1 ? of_rank(plan.tp - 1) : first;
  for (int64_t t = 0; t < plan.tp; ++t) {
    const bool middle = t > 0 && t + 1 < plan.tp && first != last;
    const std::vector<PartSizes> here = middle ? of_rank(t) : t + 1 < plan.tp ? first : last;
    for (size_t p = 0; p < parts.size(); ++p) parts[p].push_back(here[p]);
  }
}

int PlanSizes::largest_tp_rank() const {
  std::vector<std::pair<int64_t, int64_t>> sums(parts[0].size());
  for (const std::vector<PartSizes>& of_stage : parts)
    for (size_t t = 0; t < sums.size(); ++t) {
      sums[t].first += of_stage[t].value_bytes(cut);
      sums[t].second += of_stage[t].value_bytes();
    }
  return static_cast<int>(std::ranges::max_element(sums) - sums.begin());
}

}  // namespace tessera
