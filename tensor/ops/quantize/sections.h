// Where the parts of a quantised matrix lie in its bytes: what those share who make them and who read them.
#pragma once
#include <vector>

#include "tensor/ops/quantize/quantize.h"

namespace tessera {

inline constexpr int64_t kScalesOfGroup = 256;  // of nf4: scales that are quantised together

// Offsets in the bytes of a part with so many elements.
struct Sections {
  int64_t codes, scales;
  Sections(const Packing& p, int64_t elements)
      : codes(p.shared_bytes()), scales(codes + (elements + p.block() - 1) / p.block() * (p.block() / 2)) {}
};

// Of the pieces of a matrix: where each begins, in blocks, and in groups of nf4's scales.
struct PieceBounds {
  std::vector<int64_t> first_blocks, first_groups;
  int64_t groups = 0;  // in all
  explicit PieceBounds(const Packing& p);
  size_t of_block(int64_t block) const {
    size_t i = first_blocks.size() - 1;
    while (i > 0 && first_blocks[i] > block) --i;
    return i;
  }
};

namespace cuda {
// dequantize() by a kernel, with the CPU's bits: bytes and `out` lie on one GPU. Throws Error for more than kMostPieces
// pieces. Of nf4's runs, where there are several, a table is copied in front of the kernel: 16 bytes for each.
inline constexpr int kMostPieces = 4;
void dequantize(const Packing& p, std::span<const ElementRun> runs, const Tensor& bytes, const Tensor& out);
}  // namespace cuda

}  // namespace tessera
