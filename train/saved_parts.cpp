// From the layouts that a model declares.
#include "train/saved_parts.h"

#include <algorithm>
#include <memory>
#include <utility>

#include "models/layout.h"
#include "models/stages.h"
#include "parallel/comm/fake_transport.h"
#include "tensor/field_error.h"
#include "train/whole_state.h"

namespace tessera {
namespace {

// Elements of a unit that a rank of the data axis saves.
Range saved_range(const Plan& plan, int64_t size, int rank) {
  const Range all{0, size}, none{0, 0};
  if (plan.zero != ZeroStage::none) {
    const int cut = static_cast<int>(shared_over(plan));
    return rank < cut ? shard_range(size, cut, rank) : none;
  }
  if (plan.dp_mode == DataMode::ps_sync) return shard_range(size, static_cast<int>(plan.servers), rank);
  return rank == 0 ? all : none;
}

// The kinds of state that a rank of the data axis has of a unit to save, as names end.
std::vector<std::string> saved_kinds(const Job& job, bool matrices, int rank) {
  std::vector<std::string> kinds = state_kinds(job.optim, matrices);
  const Plan& plan = job.plan;
  if (plan.dp_mode != DataMode::diloco) return kinds;
  const auto cp = static_cast<int>(plan.cp);
  if (rank % cp != 0) return {};
  kinds.emplace_back("value");
  for (std::string& kind : kinds) kind += suffix_of_copy(rank / cp);
  if (rank > 0) return kinds;
  kinds.emplace_back("common");
  if (plan.outer_momentum > 0) kinds.emplace_back("outer");
  return kinds;
}

}  // namespace

std::vector<std::vector<SavedPart>> parts_of_ranks(const Job& job, bool state) {
  const Plan& plan = job.plan;
  if (plan.dp_mode == DataMode::ps_async)
    throw FieldError("dp_mode", "the servers of ps-async save whole tensors; expected another one");
  const Schedule schedule = schedule_of(plan);
  const auto data_ranks = static_cast<int>(plan.dp * plan.cp), tp_ranks = static_cast<int>(plan.tp);
  ModelConfig config = model_config(job, job.model.vocab);
  config.tie_copies = plan.tie_copies || schedule.stages > 1;
  std::vector<std::vector<SavedPart>> out(static_cast<size_t>(plan.ranks()));
  for (int tp = 0; tp < tp_ranks; ++tp) {
    Communicator axis(std::make_unique<FakeTransport>(tp, tp_ranks), "tp");
    const std::unique_ptr<LanguageModel> model = job.make(config);
    model->place({.tp = &axis, .between = plan.sp ? S(1, config.context / plan.cp) : I});
    const std::vector<Module::Unit> units = model->layout();
    const std::vector<int> stages = stages_of_units(*model, split_layers(*model, schedule.stages));
    for (size_t u = 0; u < units.size(); ++u) {
      if (state && !units[u].trainable) continue;
      const int pp = schedule.rank_of_stage[static_cast<size_t>(stages[u])];
      for (int data = 0; data < data_ranks; ++data) {
        const bool apart = state && plan.dp_mode == DataMode::diloco;
        const Range range = apart ? Range{0, units[u].size} : saved_range(plan, units[u].size, data);
        const int number = (pp * data_ranks + data) * tp_ranks + tp;
        std::vector<SavedPart>& rank = out[static_cast<size_t>(number)];
        const std::vector<std::string> kinds =
            state ? saved_kinds(job, units[u].matrices, data) : std::vector<std::string>{""};
        for (const Slot& slot : units[u].slots) {
          const Parameter& p = *slot.parameter;
          const int64_t from = std::max(slot.begin, range.begin), to = std::min(slot.end(), range.end);
          if (from >= to || p.is_copy() || (p.shard.is_whole() && tp > 0)) continue;
          for (const std::string& kind : kinds)
            rank.push_back({kind.empty() ? p.source() : p.source() + "." + kind,
                            p.stored(),
                            {.axis = {}, .dim = p.stored_shard().dim, .runs = p.stored_shard().runs},
                            from - slot.begin,
                            to - from});
        }
      }
    }
  }
  return out;
}

}  // namespace tessera
