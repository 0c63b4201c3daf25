// Interleaved 1F1B: each rank has v non-adjacent chunks of layers, so a micro-batch visits each rank v times, and
// warm-up and cooldown take the time of chunks instead of full stages (Narayanan et al. 2021, "Efficient large-scale
// language model training on GPU clusters using Megatron-LM", section 2.2).
//
//   p = 2, v = 2:  rank 0 has stages 0 and 2, rank 1 has stages 1 and 3
//
//   rank 0 | 0F0 0F1 2F0 2F1 ... ... 2B0 --- ... 2B1 --- 0B0 --- 0B1 ---
//   rank 1 | ... 1F0 1F1 3F0 3B0 --- 3F1 3B1 --- 1B0 --- 1B1 --- ... ...
//
// Each group of p micro-batches passes chunk 0, then chunk 1, ..., before the next group. The bubble is (p - 1) / (v
// m), v times smaller; there are v times more messages, and rank 0 has p + (p - 1) / v micro-batches in flight.
#include <fmt/format.h>

#include <algorithm>

#include "base/error.h"
#include "parallel/pipeline/schedules.h"

namespace tessera {

namespace {

// The k-th of a rank's microbatches x chunks passes.
struct PassOrder {
  int ranks, chunks;
  int microbatch(int k) const { return k / (ranks * chunks) * ranks + k % ranks; }
  int chunk_forward(int k) const { return k % (ranks * chunks) / ranks; }
  int chunk_backward(int k) const { return chunks - 1 - chunk_forward(k); }
};

}  // namespace

Schedule interleaved(int ranks, int microbatches, int chunks) {
  Schedule s = empty_schedule("interleaved", ranks, chunks, microbatches);
  if (microbatches % ranks != 0)
    throw Error(
        fmt::format("[schedule] interleaved: {} micro-batches are not a multiple of {} ranks; nearest valid value: {}",
                    microbatches, ranks, multiples_near(ranks, microbatches)));
  const PassOrder order{ranks, chunks};
  const int total = microbatches * chunks;
  for (int r = 0; r < ranks; ++r) {
    auto& list = s.actions[static_cast<size_t>(r)];
    const auto forward = [&](int k) {
      list.push_back({PassKind::F, order.chunk_forward(k) * ranks + r, order.microbatch(k)});
    };
    // Warm-up passes: those before the first group's last chunk, and two per later rank for the round trip.
    const int ahead = std::min((chunks - 1) * ranks + 2 * (ranks - r - 1), total);
    for (int k = 0; k < ahead; ++k) forward(k);
    for (int k = 0; k < total; ++k) {
      if (k + ahead < total) forward(k + ahead);
      list.push_back({PassKind::B, order.chunk_backward(k) * ranks + r, order.microbatch(k)});
    }
  }
  return s;
}

}  // namespace tessera
