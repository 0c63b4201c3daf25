// Counts of all ranks, added up.
#include "train/usage.h"

namespace tessera {

RunUsage usage_of(Communicator& world, const std::vector<Communicator*>& axes, const ArenaPtr& arena) {
  std::vector<int64_t> counts;  // before this function communicates itself
  for (const Communicator* axis : axes)
    for (const OpCount& c : axis->counts()) counts.insert(counts.end(), {c.calls, c.sent});
  const ArenaPtr host = arena->host();
  const Tensor total = Tensor::of<int64_t>(counts, {std::ssize(counts)}, host);
  const Tensor peak = Tensor::of<int64_t>(std::vector<int64_t>{arena->total().peak}, {1}, host);
  const Tensor peaks = Tensor::empty({world.size()}, DType::int64, host);
  world.all_reduce(total);
  world.all_gather(peak, peaks);
  RunUsage usage{.peak_bytes = peaks.to_vector<int64_t>(), .sent = {}};
  const int64_t* at = total.data<int64_t>();
  for (const Communicator* axis : axes)
    for (int op = 0; op < kOps; ++op, at += 2)
      if (at[0] > 0) usage.sent.push_back({axis->axis(), std::string(name_of(static_cast<Op>(op))), at[0], at[1]});
  return usage;
}

}  // namespace tessera
