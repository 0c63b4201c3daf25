// A block of threads for each row, which copies it in words of 16 bytes where rows are made of them.
#include "parallel/cuda/rows.h"
#include "tensor/cuda/launch.cuh"

namespace tessera::cuda {
namespace {

// Rows of `to` and `from`, of which one is counted on and the other looked up in `places`.
struct Rows {
  std::byte* to;
  const std::byte* from;
  const int64_t* places;
  int64_t bytes;  // of a row
  bool spread;
};

template <class Word>
__global__ void copy_rows_kernel(Rows rows) {
  const int64_t own = blockIdx.x, other = rows.places[own];
  Word* const to = reinterpret_cast<Word*>(rows.to + (rows.spread ? other : own) * rows.bytes);
  const Word* const from = reinterpret_cast<const Word*>(rows.from + (rows.spread ? own : other) * rows.bytes);
  const int64_t words = rows.bytes / static_cast<int64_t>(sizeof(Word));
  for (int64_t i = threadIdx.x; i < words; i += blockDim.x) to[i] = from[i];
}

void copy_rows(const Tensor& to, const Tensor& from, const Tensor& places, bool spread) {
  const Rows rows{.to = to.address(),
                  .from = from.address(),
                  .places = places.device_data<int64_t>(),
                  .bytes = to.dim(-1) * size_of(to.dtype()),
                  .spread = spread};
  const auto start = [&](auto kernel) {
    launch(context(to), "copy rows", {.blocks = places.numel(), .threads = 128}, kernel, rows);
  };
  const auto aligned = [](const std::byte* p) { return reinterpret_cast<uintptr_t>(p) % 16 == 0; };
  if (rows.bytes % 16 == 0 && aligned(rows.to) && aligned(rows.from))
    start(copy_rows_kernel<uint4>);
  else
    start(copy_rows_kernel<uint16_t>);
}

}  // namespace

void spread_rows(const Tensor& all, const Tensor& few, const Tensor& places) { copy_rows(all, few, places, true); }
void collect_rows(const Tensor& few, const Tensor& all, const Tensor& places) { copy_rows(few, all, places, false); }

}  // namespace tessera::cuda
