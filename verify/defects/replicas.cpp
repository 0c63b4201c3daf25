// Defects of groups of ranks: those between which shards are summed, ranks that train alone, owners of matrices.
#include <algorithm>
#include <memory>
#include <tuple>
#include <utility>

#include "optim/grad_norm.h"
#include "train/plan.h"
#include "verify/defects/groups.h"
#include "verify/defects/spoilt_transport.h"

namespace tessera {
namespace {

// Of the groups that the data axis is cut into the second has the ranks of the first: shards are summed over the ranks
// that they are cut over, and not over those that have the same.
class WrongGroups final : public AroundTransport {
 public:
  // The axis is split so many times before, for other purposes.
  WrongGroups(std::unique_ptr<Transport> inner, std::string axis, int before)
      : AroundTransport(std::move(inner)), data_axis_(std::move(axis)), before_(before) {}
  std::unique_ptr<Transport> split(int color, int key) override {
    if (axis_ == data_axis_) {
      if (splits_ == before_) first_ = {color, key};
      if (splits_++ > before_) std::tie(color, key) = first_;
    }
    return AroundTransport::split(color, key);
  }

 protected:
  std::unique_ptr<Transport> around(std::unique_ptr<Transport> made) const override {
    return std::make_unique<WrongGroups>(std::move(made), data_axis_, before_);
  }

 private:
  std::string data_axis_;
  int before_, splits_ = 0;
  std::pair<int, int> first_;
};

Needs of_groups(const Job& j) {
  const int64_t ranks = j.plan.dp * j.plan.cp, group = j.plan.shard_ranks;
  return Needs(j)
      .data_ranks(4)
      .ddp()
      .direct()
      .need(j.plan.device == Device::cpu, "device", "cpu")
      .need(j.plan.zero != ZeroStage::none, "zero", "1")
      .need(group > 1 && (ranks < 4 || group < ranks), "shard_ranks", "2");
}

Spoilt silent(const std::vector<std::string>& axes, Op op) {
  return {
      [=](const std::string& name, const Call& call) { return call.op == op && std::ranges::count(axes, name) > 0; },
      [](Transport&, const Call&) { return int64_t{0}; }};
}

}  // namespace

std::vector<Defect> defects_of_replicas() {
  return {
      {"unsummed-group", "shards are not summed over the groups: each group trains on its own sequences",
       Cause::group_not_summed, [](const Job& j) { return of_groups(j); }, everywhere,
       [](VerifyHooks& h, const Job&) { spoil(h, silent({"dp.replicate"}, Op::all_reduce)); }},
      {"wrong-group", "shards are summed over the ranks of their group, and not over those that have the same shard",
       Cause::wrong_group, [](const Job& j) { return of_groups(j); }, everywhere,
       [](VerifyHooks& h, const Job& j) {
         const int others = j.plan.ep > 1 ? 2 : 0;  // of experts
         h.launching = [=, before = std::move(h.launching), axis = data_axis_of(j)](LaunchOptions& how) {
           before(how);
           how.around = [=](std::unique_ptr<Transport> transport) {
             return std::make_unique<WrongGroups>(std::move(transport), axis, others);
           };
         };
       }},
      {"forgotten-outer-step", "the first outer step is left out: ranks go on alone", Cause::outer_step,
       [](const Job& j) {
         return Needs(j)
             .data_ranks()
             .need(j.plan.dp_mode == DataMode::diloco, "dp_mode", "diloco")
             .need(j.plan.dp > 1, "dp", "2")
             .need(j.plan.zero == ZeroStage::none, "zero", "0")
             .direct();
       },
       everywhere,
       [](VerifyHooks& h, const Job& j) {
         const Plan& p = j.plan;  // of several fragments the second is the first to make one
         const int64_t first = p.sync_fragments > 1 ? p.sync_every / p.sync_fragments : p.sync_every;
         h.update = [first = std::min(first, j.optim.steps)](Trainer& t, const StepReport& r) {
           if (t.steps_done() + 1 != first) return t.update(r);
           t.optimizer().step(r.lr, clip_factor(r.grad_norm, t.job().optim.clip));
           t.strategy().set_steps_done(first);
         };
       }},
      {"silent-owner", "owners of matrices do not send what they have made orthogonal", Cause::silent_owner,
       [](const Job& j) {
         return Needs(j)
             .data_ranks()
             .ddp()
             .direct()
             .need(j.optim.optimizer == OptimizerKind::muon, "optimizer", "muon")
             .need(j.plan.zero == ZeroStage::none, "zero", "0")
             .need(j.model.lora.rank == 0, "lora_rank", "0");
       },
       everywhere,
       [](VerifyHooks& h, const Job& j) {
         spoil(h, silent({data_axis_of(j), "edp"}, Op::broadcast));
       }},
  };
}

}  // namespace tessera
