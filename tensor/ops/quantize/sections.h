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

}  // namespace tessera
