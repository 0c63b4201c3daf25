// Interleaved 1F1B: each rank has v chunks of layers that lie apart, so a micro-batch goes round the ranks v times, and
// filling and draining the pipeline takes chunks instead of whole shares (Narayanan et al. 2021, "Efficient large-scale
// language model training on GPU clusters using Megatron-LM", section 2.2).
//
//   p = 2, v = 2:  rank 0 has stages 0 and 2, rank 1 has stages 1 and 3
//
//   rank 0 | 0F0 0F1 2F0 2F1 ... ... 2B0 --- ... 2B1 --- 0B0 --- 0B1 ---
//   rank 1 | ... 1F0 1F1 3F0 3B0 --- 3F1 3B1 --- 1B0 --- 1B1 --- ... ...
//
// Micro-batches go in groups of p: a group through chunk 0, then through chunk 1, ...; then the next group. The bubble
// is (p - 1) / (v m), v times less; messages are v times more, and rank 0 has p + (p - 1) / v micro-batches in flight.
#include <algorithm>

#include "parallel/pipeline/schedules.h"
#include "tensor/error.h"

namespace tessera {
namespace {

// The k-th pass through a chunk that a rank makes, of microbatches x chunks.
struct Turns {
  int ranks, chunks;
  int microbatch(int k) const { return k / (ranks * chunks) * ranks + k % ranks; }
  int chunk_forward(int k) const { return k % (ranks * chunks) / ranks; }
  int chunk_backward(int k) const { return chunks - 1 - chunk_forward(k); }
};

}  // namespace

Schedule interleaved(int ranks, int microbatches, int chunks) {
  Schedule s = empty_schedule("interleaved", ranks, chunks, microbatches);
  if (microbatches % ranks != 0) {
    const int below = microbatches / ranks * ranks, above = below + ranks;
    throw Error("[schedule] interleaved: " + std::to_string(microbatches) + " micro-batches are no multiple of " +
                std::to_string(ranks) + " ranks; the nearest that are: " +
                (below > 0 ? std::to_string(below) + " and " : "") + std::to_string(above));
  }
  const Turns turns{ranks, chunks};
  const int total = microbatches * chunks;
  for (int r = 0; r < ranks; ++r) {
    auto& list = s.actions[static_cast<size_t>(r)];
    const auto forward = [&](int k) {
      list.push_back({Do::F, turns.chunk_forward(k) * ranks + r, turns.microbatch(k)});
    };
    // One group reaches the last chunk; twice the ranks after this one, since the way there and the way back both
    // count.
    const int ahead = std::min((chunks - 1) * ranks + 2 * (ranks - r - 1), total);
    for (int k = 0; k < ahead; ++k) forward(k);
    for (int k = 0; k < total; ++k) {
      if (k + ahead < total) forward(k + ahead);
      list.push_back({Do::B, turns.chunk_backward(k) * ranks + r, turns.microbatch(k)});
    }
  }
  return s;
}

}  // namespace tessera
