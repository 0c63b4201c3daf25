// Process groups, and the construction of a rank's part.
#include "train/state.h"

#include <algorithm>
#include <cstdint>
#include <memory>
#include <variant>
#include <vector>

#include "train/device.h"

namespace tessera {
namespace {

std::vector<MeshAxis> mesh_axes(const Plan& p) {
  const auto size = [](int64_t n) { return static_cast<int>(n); };
  return {{"pp", size(p.pp)}, {"dp", size(p.dp)}, {"cp", size(p.cp)}, {"tp", size(p.tp)}};
}

}  // namespace

// Ranks [g e, (g + 1) e) of the data axis are an expert-parallel group; ranks of a sharding group that are equal modulo
// e shard the same experts.
RankGroups::RankGroups(const TrainConfig& job, Communicator& all)
    : world(with_one_job(all, job)),
      mesh(world, mesh_axes(job.plan)),
      data(job.plan.cp > 1 ? mesh.flat({"dp", "cp"}) : mesh["dp"]) {
  const auto e = static_cast<int>(job.plan.ep);
  if (job.plan.layout_invariant) mesh["tp"].add_in_pairs();
  if (e == 1) return;
  const int rank = data.rank(), group = job.plan.shard_ranks > 0 ? static_cast<int>(job.plan.shard_ranks) : data.size();
  experts = data.split(rank / e, rank % e, "ep");
  same_experts = data.split(rank / group * e + rank % e, rank / e, "edp");
}

TrainState::TrainState(const TrainConfig& of_run, int64_t vocab, Communicator& world, Trace* trace)
    : job(of_run),
      groups(job, world),
      arena(rank_arena(job.plan, world)),
      full_model_(tessera::full_model(job, vocab)) {
  if (trace) {
    trace->watch(arena);
    for (Communicator* axis : communicators()) axis->set_trace(trace);
  }
  Mesh& mesh = groups.mesh;
  part_ = std::make_unique<ModelPart>(
      *full_model_, job.make, ModelPart::Axes{mesh["pp"], groups.data, mesh["cp"], mesh["tp"], groups.experts.get()},
      part_options(trace));
  join_tied_weights();
  if (find_row(job.optim.optimizer).updates_matrices)
    matrices_ = std::make_unique<MatrixOwners>(strategy(), mesh["tp"]);
  optimizer_ = make_optimizer(job, strategy().shards(), matrices_ ? matrices_->hook() : nullptr);
  strategy().set_masters(optimizer_->masters());
}

ModelPart::Options TrainState::part_options(Trace* trace) {
  const Plan& p = job.plan;
  DataOptions data = data_options(job);
  data.experts = groups.same_experts.get();
  if (auto* const diloco = std::get_if<DilocoOptions>(&data.strategy)) {
    diloco->context = &groups.mesh["cp"];
    diloco->replicas = &groups.mesh["dp"];
  }
  if (p.offload == Offload::parameters)
    std::get<ZeroOptions>(data.strategy).shard_arena = offload_arena(p.device);  // which requires stage 3
  return {.plan = p,
          .schedule = make_schedule(p),
          .data = data,
          .sequences = job.optim.batch / (p.dp * p.microbatches),
          .arena = arena,
          .trace = trace};
}

// If the first and the last stage are on different ranks, these ranks reduce the tied weight's gradients.
void TrainState::join_tied_weights() {
  const std::vector<int>& ranks = part_->schedule().rank_of_stage;
  const int first = ranks.front(), last = ranks.back(), own = groups.mesh.coordinate("pp");
  const std::vector<Parameter*> all = full_model_->parameters();
  if (first == last || std::ranges::none_of(all, [](const Parameter* p) { return p->is_tied(); })) return;
  std::vector<int> at = groups.mesh.coordinates(groups.world.rank());
  at[0] = own == first || own == last ? 0 : own;  // other ranks form groups of one
  const int offset = own == first || own == last ? 0 : groups.world.size();
  groups.tied = groups.world.split(groups.mesh.rank_at(at) + offset, own == first ? 0 : 1, "tied");
}

void TrainState::set_done(int64_t steps, int64_t updates) {
  optimizer_->set_steps(updates);
  strategy().set_steps_done(steps);
  more_updates_ = updates - steps;
}

std::vector<Communicator*> TrainState::communicators() {
  std::vector<Communicator*> out{&groups.world};
  for (const char* axis : {"pp", "dp", "cp", "tp"}) out.push_back(&groups.mesh[axis]);
  if (&groups.data != &groups.mesh["dp"]) out.push_back(&groups.data);
  if (part_ && strategy().replicate_axis())
    out.insert(out.end(), {&strategy().shard_axis(), strategy().replicate_axis()});
  for (Communicator* axis : {groups.experts.get(), groups.same_experts.get(), groups.tied.get()})
    if (axis) out.push_back(axis);
  return out;
}

}  // namespace tessera
