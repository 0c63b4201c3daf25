// All ranks' choices, put in the order of the sequence and counted.
#include "parallel/experts/expert_capacity.h"

#include <algorithm>

#include "tensor/cpu/vectorize.h"

namespace tessera {

Tensor earlier_choices(const Tensor& chosen, int64_t sequences, int64_t experts, Communicator& cp, Balance balance) {
  const int64_t n = chosen.dim(0), k = chosen.dim(1), here = n / sequences, context = here * cp.size();
  const Tensor all = chosen.make({cp.size(), sequences, here, k});
  Tensor out = chosen.make(chosen.shape());
  cp.all_gather(chosen.contiguous(), all);
  if (cpu::Idle::here()) {  // as if every choice had a place
    std::fill_n(out.data<int32_t>(), out.numel(), 0);
    return out;
  }
  std::vector<int64_t> rank_of(static_cast<size_t>(context)), place_of(rank_of);  // by position in a sequence
  for (int r = 0; r < cp.size(); ++r) {
    const std::vector<int64_t> positions = context_positions(context, cp.size(), r, balance);
    for (size_t i = 0; i < positions.size(); ++i) {
      rank_of[static_cast<size_t>(positions[i])] = r;
      place_of[static_cast<size_t>(positions[i])] = static_cast<int64_t>(i);
    }
  }
  for (int64_t s = 0; s < sequences; ++s) {
    std::vector<int32_t> before(static_cast<size_t>(experts), 0);
    for (int64_t j = 0; j < k; ++j)
      for (size_t t = 0; t < rank_of.size(); ++t) {
        const int64_t choice = (s * here + place_of[t]) * k + j;  // among those of its rank
        int32_t& count = before[static_cast<size_t>(all.data<int32_t>()[rank_of[t] * n * k + choice])];
        if (rank_of[t] == cp.rank()) out.data<int32_t>()[choice] = count;
        ++count;
      }
  }
  return out;
}

}  // namespace tessera
