// Quantization of frozen weights to 4 bits.
#pragma once
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "tensor/tensor.h"

namespace tessera {

enum class Codec : uint8_t { none, nf4, gptq };

// A 4-bit matrix consists of codes and scales:
//
//   nf4    blocks of 64 elements, in storage order. A code selects one of 16 values, the quantiles of a normal
//          distribution, and is scaled by the block's largest magnitude. Scales are quantized too: their mean is
//          subtracted, and in groups of 256 each has 8 bits, relative to the group's largest magnitude (Dettmers et al.
//          2023, "QLoRA", arXiv 2305.14314, sections 2 and 3). 0.5 + 1 / 64 + 4 / 16384 = 0.516 bytes per element.
//   gptq   groups of `group` columns of a row share a scale (float16) and a zero (4 bits): w = scale (code - zero)
//          (Frantar et al. 2022, "GPTQ", arXiv 2210.17323). 0.5 + 2.5 / 128 = 0.520 bytes for groups of 128.
//
// The full matrix is quantized first and then sharded at block boundaries. Fused matrices (q, k and v) are quantized
// separately. A rank's shard has three sections:
//
//   [ shared | codes of each block | scales of each block ]
//
// shared   nf4: the largest magnitudes of the scale groups of all fused matrices (float), then the mean of each matrix
//          (float); replicated. gptq: empty
// codes    four bits per element, the first in the low bits
// scales   nf4: 8 bits, the index of one of 256 values in [-1, 1] (Dettmers et al. 2021, arXiv 2110.02861, section 2.2)
//          gptq: a block is two groups: their scales, and a byte with both zeros

inline constexpr int64_t kNf4Block = 64;  // elements that share a scale

struct Packing {
  Codec codec = Codec::none;
  int64_t rows = 0, columns = 0;
  std::vector<int64_t> fused_rows = {};  // rows of each fused matrix; at least one
  int64_t group = 128;                   // gptq only

  int64_t elements() const { return rows * columns; }
  // Elements; shards begin at block boundaries.
  int64_t block() const { return codec == Codec::nf4 ? kNf4Block : 2 * group; }
  int64_t scale_bytes() const { return codec == Codec::nf4 ? 1 : 5; }  // per block
  int64_t shared_bytes() const;
  int64_t bytes(int64_t elements) const;
  int64_t bytes() const { return bytes(elements()); }
  bool operator==(const Packing&) const = default;
};
// Throws Error unless fused matrices consist of full blocks and gptq groups divide a row.
void check(const Packing& packing, const std::string& name);

// Elements contiguous both in the shard and in the full matrix.
struct ElementRun {
  int64_t here = 0, full = 0, count = 0;
};
// The largest run boundary inside a block; 0 if all boundaries are block-aligned.
int64_t splits_block(const Packing& packing, std::span<const ElementRun> runs);

// Calls f for the byte runs of a shard; offsets are in bytes.
void for_each_byte_run(const Packing& packing, std::span<const ElementRun> runs,
                       const std::function<void(int64_t here, int64_t full, int64_t count)>& f);

// Provides to.size() elements, starting at `begin`.
using FloatSource = std::function<void(int64_t begin, std::span<float> to)>;
// Rounds each element of the full matrix to the nearest value, also for gptq (the algorithm is in
// tensor/ops/quantize/gptq.h). Throws Error for non-finite values. Reads each element once.
std::vector<std::byte> quantize(const Packing& packing, const FloatSource& source);

// Computed in float and rounded once. Cost: reads 0.52 bytes per element, writes `out`.
void dequantize(const Packing& packing, std::span<const ElementRun> runs, const Tensor& bytes, Tensor& out);
void dequantize(const Packing& packing, std::span<const std::byte> full, int64_t begin, std::span<float> to);

std::span<const float, 16> nf4_values();
std::span<const float, 256> dynamic_values();

// A symmetric 4-bit matrix: w = scale (q - 8), with a scale per group of adjacent columns and a code q in [0, 15] per
// element, row-major. Output of GPTQ (tensor/ops/quantize/gptq.h) and contents of its files (hub/gptq_format.h). A
// scale has 11 significant bits and q - 8 has four, so w is exact in float32.

struct Int4Matrix {
  static constexpr int kZero = 8;

  int64_t rows = 0, columns = 0;  // columns even
  int64_t group = 1;              // columns that share a scale; the last group of a row may be smaller
  std::vector<uint8_t> codes;     // (rows, columns / 2): the even column in the low half
  std::vector<Half> scales;       // (rows, groups())

  Int4Matrix() = default;
  // Zeros. Throws Error unless the number of columns is even and every size is positive.
  Int4Matrix(int64_t rows, int64_t columns, int64_t group);

  int64_t groups() const { return (columns + group - 1) / group; }
  int code(int64_t row, int64_t column) const {
    return codes[static_cast<size_t>((row * columns + column) / 2)] >> (column % 2 * 4) & 15;
  }
  void set_code(int64_t row, int64_t column, int code) {
    uint8_t& byte = codes[static_cast<size_t>((row * columns + column) / 2)];
    byte = static_cast<uint8_t>(column % 2 == 0 ? (byte & 0xf0) | code : (byte & 0x0f) | code << 4);
  }
  Half& scale(int64_t row, int64_t g) { return scales[static_cast<size_t>(row * groups() + g)]; }
  Half scale(int64_t row, int64_t g) const { return scales[static_cast<size_t>(row * groups() + g)]; }

  void decode(int64_t begin, std::span<float> out) const;
  // Packing's byte layout with codec gptq. Throws Error if groups do not divide a row, or if their total number is odd.
  std::vector<std::byte> packed() const;
  void append(const Int4Matrix& below);
};

inline constexpr int64_t kScalesOfGroup = 256;  // nf4 scales quantized together

// Byte offsets in a shard.
struct Sections {
  int64_t codes, scales;
  Sections(const Packing& p, int64_t elements)
      : codes(p.shared_bytes()), scales(codes + (elements + p.block() - 1) / p.block() * (p.block() / 2)) {}
};

// First block and first group of nf4 scales of each fused matrix.
struct FusedBounds {
  std::vector<int64_t> first_blocks, first_groups;
  int64_t groups = 0;
  explicit FusedBounds(const Packing& p);
  size_t of_block(int64_t block) const {
    size_t i = first_blocks.size() - 1;
    while (i > 0 && first_blocks[i] > block) --i;
    return i;
  }
};

namespace cuda {
// Bitwise identical to the CPU. Throws Error for more than kMaxFused fused matrices. For several nf4 runs, a table of
// 16 bytes per run is copied to the GPU before the kernel.
inline constexpr int kMaxFused = 4;
void dequantize(const Packing& p, std::span<const ElementRun> runs, const Tensor& bytes, const Tensor& out);
}  // namespace cuda

}  // namespace tessera
