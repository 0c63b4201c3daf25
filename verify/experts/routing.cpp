// Places the choices of local tokens in the global batch.
#include "verify/experts/routing.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <memory>
#include <numeric>
#include <span>
#include <vector>

#include "train/plan.h"

namespace tessera {
namespace {

// Counts rows sent to other ranks of the expert-parallel group, and rows of local experts.
void count_rows(TrainState& train, const std::vector<int64_t>& rows, Routing& out) {
  Communicator& ep = *train.groups.experts;
  const auto here = std::ssize(rows) / ep.size();
  std::vector<double> all(rows.begin(), rows.end());
  const double sent = std::accumulate(all.begin(), all.end(), 0.0);
  const auto own = [&] {
    return std::accumulate(all.begin() + here * ep.rank(), all.begin() + here * (ep.rank() + 1), 0.0);
  };
  out.leaving += static_cast<int64_t>(sent - own());
  ep.sum(all);
  const double sum = std::accumulate(all.begin(), all.end(), 0.0);
  if (sum > 0) out.imbalance = std::max(out.imbalance, own() * ep.size() / sum);
}

}  // namespace

Routing::Routing(const LanguageModel& model, int64_t batch) {
  const ArenaPtr arena = make_arena();
  for (int64_t i = 0; i < model.config.layers; ++i)
    chosen.push_back(Tensor::zeros({batch, model.config.context, model.config.experts.per_token}, DType::int64, arena));
}

void Routing::place(size_t layer, const std::vector<MixtureOfExperts::Pass>& passes,
                    std::span<const int64_t> positions) {
  const Tensor& full = chosen.at(layer);
  const int64_t context = full.dim(1), k = full.dim(2), here = positions.empty() ? context : std::ssize(positions);
  for (const MixtureOfExperts::Pass& pass : passes)
    for (int64_t i = 0; i < std::ssize(pass.chosen); ++i) {
      const int64_t token = i / k % here, sequence = pass.first_sequence + i / k / here,
                    at = positions.empty() ? token : positions[static_cast<size_t>(token)];
      full.data<int64_t>()[(sequence * context + at) * k + i % k] = pass.chosen[static_cast<size_t>(i)];
    }
}

bool replays_routing(const TrainConfig& job) { return job.model.experts.count > 0 && splits_sums(job.plan); }

void record_passes(LanguageModel& model) {
  for (MixtureOfExperts* mixture : model.all<MixtureOfExperts>()) mixture->record_passes();
}

Routing read_routing(TrainState& train) {
  Routing out(train.full_model(), train.job.optim.batch);
  const bool first = train.groups.mesh.coordinate("tp") == 0;  // all tp ranks route identically
  size_t layer = 0;
  for (MixtureOfExperts* mixture : train.model().all<MixtureOfExperts>()) {
    const std::vector<MixtureOfExperts::Pass> passes = mixture->take_load().passes;
    if (first) out.place(layer, passes, train.part().positions());
    for (const MixtureOfExperts::Pass& pass : passes)
      if (train.groups.experts) count_rows(train, pass.rows, out);
    train.groups.world.all_reduce(out.chosen[layer++]);
  }
  out.leaving = static_cast<int64_t>(train.groups.world.sum(static_cast<double>(out.leaving)));
  out.imbalance = train.groups.world.max(out.imbalance);
  return out;
}

void replay(LanguageModel& model, const std::shared_ptr<const Routing>& routing) {
  size_t next = 0;
  for (MixtureOfExperts* mixture : model.all<MixtureOfExperts>())
    mixture->set_choices([routing, layer = next++](int64_t first, int64_t sequences) {
      const Tensor slice = routing->chosen.at(layer).narrow(0, first, sequences);
      const std::vector<int64_t> choices = slice.to_vector<int64_t>();
      return Tensor::of<int32_t>(std::vector<int32_t>(choices.begin(), choices.end()), {std::ssize(choices)},
                                 slice.arena());
    });
}

}  // namespace tessera
