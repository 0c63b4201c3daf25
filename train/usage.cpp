// Usage summed over all ranks.
#include "train/usage.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <numeric>
#include <optional>
#include <string>
#include <vector>

#include "parallel/comm/trace.h"
#include "train/state.h"

namespace tessera {

std::optional<Straggler> find_straggler(const std::vector<double>& waited, double seconds) {
  constexpr double kMinSeconds = 2, kMinFraction = 0.2, kMinTimes = 2;
  const auto others = static_cast<double>(waited.size()) - 1;
  if (others < 1 || seconds < kMinSeconds) return {};
  const auto longest = std::ranges::max_element(waited);
  const double fraction = *longest / (others * seconds),
               mean = (std::accumulate(waited.begin(), waited.end(), 0.0) - *longest) / others;
  if (fraction < kMinFraction || *longest < kMinTimes * mean) return {};
  return Straggler{static_cast<int>(longest - waited.begin()), fraction};
}

RunUsage run_usage(Communicator& world, const std::vector<Communicator*>& axes, const ArenaPtr& arena) {
  std::vector<int64_t> counts;  // before this function's own communication
  for (const Communicator* axis : axes)
    for (const OpCount& c : axis->counts()) counts.insert(counts.end(), {c.calls, c.sent});
  std::vector<double> waited = world.flight() ? world.flight()->waits() : std::vector<double>();
  const double seconds = world.flight() ? world.flight()->seconds() : 0;
  const ArenaPtr host = arena->host();
  const Tensor total = Tensor::of<int64_t>(counts, {std::ssize(counts)}, host);
  const int64_t peak = arena->total().peak;
  world.all_reduce(total);
  RunUsage usage{.peak_bytes = all_gather_values<int64_t>(world, {peak}, host), .sent = {}, .arena = arena};
  world.sum(waited);
  usage.straggler = find_straggler(waited, seconds);
  const int64_t* at = total.data<int64_t>();
  for (const Communicator* axis : axes)
    for (int op = 0; op < kOps; ++op, at += 2)
      if (at[0] > 0) usage.sent.push_back({axis->axis(), std::string(to_string(static_cast<Op>(op))), at[0], at[1]});
  return usage;
}

ExpertLoad::Busiest ExpertLoad::busiest() const {
  Busiest out;
  for (size_t layer = 0; layer < rows.size(); ++layer) {
    const auto highest = std::ranges::max_element(rows[layer]);
    const int64_t sum = std::accumulate(rows[layer].begin(), rows[layer].end(), int64_t{0});
    if (sum == 0) continue;
    const double times =
        static_cast<double>(*highest) * static_cast<double>(rows[layer].size()) / static_cast<double>(sum);
    if (times > out.times) out = {times, static_cast<int64_t>(layer), highest - rows[layer].begin()};
  }
  return out;
}

ExpertLoad expert_load(TrainState& train) {
  const int64_t experts = train.model().config.experts.count;
  if (experts == 0) return {};
  std::vector<int64_t> counts;
  ExpertLoad out;
  for (MixtureOfExperts* mixture : train.model().all<MixtureOfExperts>()) {
    MixtureOfExperts::Load load = mixture->take_load();
    // all tp ranks route identically
    if (train.groups.mesh.coordinate("tp") > 0) load = {std::vector<int64_t>(load.rows.size())};
    counts.insert(counts.end(), load.rows.begin(), load.rows.end());
    out.dropped += load.dropped;
  }
  counts.push_back(out.dropped);
  const Tensor sums = Tensor::of<int64_t>(counts, {std::ssize(counts)}, train.arena->host());
  train.groups.world.all_reduce(sums);
  const int64_t* at = sums.data<int64_t>();
  for (int64_t i = 0; i + experts < std::ssize(counts); i += experts, at += experts)
    out.rows.emplace_back(at, at + experts);
  out.dropped = *at;
  return out;
}

}  // namespace tessera
