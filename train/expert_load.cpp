// Each rank counts its own tokens, and layers of its own.
#include "train/expert_load.h"

#include <algorithm>
#include <numeric>

#include "train/trainer.h"

namespace tessera {

ExpertLoad::Busiest ExpertLoad::busiest() const {
  Busiest out;
  for (size_t layer = 0; layer < rows.size(); ++layer) {
    const auto most = std::ranges::max_element(rows[layer]);
    const int64_t sum = std::accumulate(rows[layer].begin(), rows[layer].end(), int64_t{0});
    if (sum == 0) continue;
    const double times =
        static_cast<double>(*most) * static_cast<double>(rows[layer].size()) / static_cast<double>(sum);
    if (times > out.times) out = {times, static_cast<int64_t>(layer), most - rows[layer].begin()};
  }
  return out;
}

ExpertLoad expert_load(Trainer& trainer) {
  const int64_t experts = trainer.model().config.experts.count;
  if (experts == 0) return {};
  std::vector<int64_t> counts;
  ExpertLoad out;
  for (MixtureOfExperts* mixture : trainer.model().all<MixtureOfExperts>()) {
    MixtureOfExperts::Load load = mixture->take_load();
    if (trainer.mesh().coordinate("tp") > 0) load = {std::vector<int64_t>(load.rows.size())};  // its ranks route alike
    counts.insert(counts.end(), load.rows.begin(), load.rows.end());
    out.dropped += load.dropped;
  }
  counts.push_back(out.dropped);
  const Tensor sums = Tensor::of<int64_t>(counts, {std::ssize(counts)}, trainer.arena()->host());
  trainer.world().all_reduce(sums);
  const int64_t* at = sums.data<int64_t>();
  for (int64_t i = 0; i + experts < std::ssize(counts); i += experts, at += experts)
    out.rows.emplace_back(at, at + experts);
  out.dropped = *at;
  return out;
}

}  // namespace tessera
