// The ways to hold a matrix in four bits: tensor/ops/quantize/quantize.h.
#pragma once

#include "tensor/tensor.h"

namespace tessera {

enum class Codec : uint8_t { none, nf4, gptq };

// Matrices in four bits, for weights that nobody trains: codes, and what they are multiplied with.
//
//   nf4    blocks of 64 elements, in storage order. A code names one of 16 values, the quantiles of a normal
//          distribution, and the block's largest magnitude scales it. These scales are quantised again: their mean is
//          subtracted, and groups of 256 have 8 bits each and one largest magnitude (Dettmers et al. 2023, "QLoRA",
//          arXiv 2305.14314, sections 2 and 3). 0.5 + 1 / 64 + 4 / 16384 = 0.516 bytes an element.
//   gptq   groups of `group` columns of a row share a scale (float16) and a zero (4 bits): w = scale (code - zero)
//          (Frantar et al. 2022, "GPTQ", arXiv 2210.17323). 0.5 + 2.5 / 128 = 0.520 bytes for groups of 128.
//
// Codes depend on the whole matrix and on nothing else: it is quantised first and cut over ranks after, at bounds of
// blocks. A matrix that is fused of several (q, k and v) has the bits that each of these would have alone. All that a
// rank has of one are bytes in three sections:
//
//   [ shared | codes of each block | scales of each block ]
//
// shared   nf4: the largest magnitudes of the groups of all pieces (float), then the mean of each piece (float); every
//          rank has them all. gptq: nothing
// codes    four bits for each element, the first one in the low bits
// scales   nf4: 8 bits, which one of 256 values between -1 and 1 (Dettmers et al. 2021, arXiv 2110.02861, section 2.2)
//          gptq: a block is two groups: their scales, and a byte with both zeros

inline constexpr int64_t kNf4Block = 64;  // elements that share a scale

// How a whole matrix is quantised.
struct Packing {
  Codec codec = Codec::none;
  int64_t rows = 0, columns = 0;
  std::vector<int64_t> pieces = {};  // rows of each matrix that it is fused of, at least one
  int64_t group = 128;               // elements of a group, in gptq

  int64_t elements() const { return rows * columns; }
  int64_t block() const {
    return codec == Codec::nf4 ? kNf4Block : 2 * group;
  }                                                                    // elements; cuts are at multiples of it
  int64_t scale_bytes() const { return codec == Codec::nf4 ? 1 : 5; }  // bytes of the scales of a block
  int64_t shared_bytes() const;
  // Bytes of a part that has so many elements of the whole.
  int64_t bytes(int64_t elements) const;
  int64_t bytes() const { return bytes(elements()); }
  bool operator==(const Packing&) const = default;
};
// Throws Error naming what does not divide: pieces must be whole blocks, and the groups of gptq divide a row.
void check(const Packing& packing, const std::string& name);

// Elements that follow one another both in what is here and in the whole.
struct ElementRun {
  int64_t here = 0, whole = 0, count = 0;
};
// The largest run bound that lies inside a block, or 0: then the runs can be cut.
int64_t splits_block(const Packing& packing, std::span<const ElementRun> runs);

// Calls f(here, whole, count) for runs of bytes, of a part that has these runs of elements: `here` and `whole` are
// offsets in the part's bytes and in those of the whole.
void for_each_byte_run(const Packing& packing, std::span<const ElementRun> runs,
                       const std::function<void(int64_t here, int64_t whole, int64_t count)>& f);

// Elements of the whole matrix, from the one at `begin` on, as many as `to` has room for.
using FloatSource = std::function<void(int64_t begin, std::span<float> to)>;
// The whole in bytes, each element rounded to the nearest value that there is: gptq without its algorithm, which is in
// tensor/ops/quantize/gptq.h. Throws Error for a number that is not finite. Cost: reads each element once.
std::vector<std::byte> quantize(const Packing& packing, const FloatSource& source);

// The part's elements (rows here, columns here), in the dtype of `out`, which has as many: each is made in float and
// rounded once. Cost: reads 0.52 bytes an element, writes `out`.
void dequantize(const Packing& packing, std::span<const ElementRun> runs, const Tensor& bytes, Tensor& out);
// Elements of a whole in the host's memory, from the one at `begin` on.
void dequantize(const Packing& packing, std::span<const std::byte> whole, int64_t begin, std::span<float> to);

// The 16 values of nf4's codes, and the 256 of its scales' codes, ascending.
std::span<const float, 16> nf4_values();
std::span<const float, 256> dynamic_values();

// A matrix in 4 bits: each row has, for each group of columns that follow one another, one scale, and each element a
// code q in [0, 15].
//
//   w = scale (q - 8)        symmetric: from -8 to 7 scales
//
// It is what GPTQ makes (tensor/ops/quantize/gptq.h) and what its files hold (hub/gptq_format.h), in an order in which
// rows run on, so that a fused matrix is the rows of its parts. A scale has 11 bits and q - 8 four: w is exact in
// float32.

struct Int4Matrix {
  static constexpr int kZero = 8;  // the code of 0

  int64_t rows = 0, columns = 0;  // columns even
  int64_t group = 1;              // columns that share a scale; the last of a row may be fewer
  std::vector<uint8_t> codes;     // (rows, columns / 2): the even column in the low half
  std::vector<Half> scales;       // (rows, groups())

  Int4Matrix() = default;
  // All zeros. Throws Error unless the columns are even and every size is above 0.
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

  // Elements [begin, begin + out.size()) of the matrix, rows one after another. Cost: a multiplication each.
  void decode(int64_t begin, std::span<float> out) const;
  // The bytes of the whole matrix in the layout of Packing: codec gptq, with these rows, columns and groups. Throws
  // Error where groups do not divide a row, or are of an odd number.
  std::vector<std::byte> packed() const;
  // Adds the rows of another matrix below. Throws Error where columns or groups differ.
  void append(const Int4Matrix& below);
};

// The places of a quantised matrix's parts in its bytes, for the code that makes them and the code that reads them.

inline constexpr int64_t kScalesOfGroup = 256;  // nf4 scales that are quantised together

// Offsets in the bytes of a part with so many elements.
struct Sections {
  int64_t codes, scales;
  Sections(const Packing& p, int64_t elements)
      : codes(p.shared_bytes()), scales(codes + (elements + p.block() - 1) / p.block() * (p.block() / 2)) {}
};

// The beginning of each piece of a matrix, in blocks, and in groups of nf4's scales.
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
// dequantize() by a kernel, with the CPU's bits: bytes and `out` lie on one GPU. Throws Error for more than kMaxPieces
// pieces. Where there are several runs of nf4, a table of them is copied in front of the kernel: 16 bytes for each.
inline constexpr int kMaxPieces = 4;
void dequantize(const Packing& p, std::span<const ElementRun> runs, const Tensor& bytes, const Tensor& out);
}  // namespace cuda

}  // namespace tessera
