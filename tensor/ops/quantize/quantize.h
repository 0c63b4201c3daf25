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
#pragma once
#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "tensor/ops/quantize/codec.h"
#include "tensor/tensor.h"

namespace tessera {

inline constexpr int64_t kNf4Block = 64;  // elements that share a scale

// How a whole matrix is quantised.
struct Packing {
  Codec codec = Codec::none;
  int64_t rows = 0, columns = 0;
  std::vector<int64_t> pieces = {};  // rows of each matrix that it is fused of, at least one
  int64_t group = 128;               // of gptq

  int64_t elements() const { return rows * columns; }
  int64_t block() const {
    return codec == Codec::nf4 ? kNf4Block : 2 * group;
  }                                                                    // elements; cuts are at multiples of it
  int64_t scale_bytes() const { return codec == Codec::nf4 ? 1 : 5; }  // of a block
  int64_t shared_bytes() const;
  // Of a part with so many elements of the whole.
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

}  // namespace tessera
