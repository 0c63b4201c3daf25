// A matrix in 4 bits: each row has, for each group of columns that follow one another, one scale, and each element a
// code q in [0, 15].
//
//   w = scale (q - 8)        symmetric: from -8 to 7 scales
//
// It is what GPTQ makes (train/gptq.h) and what its files hold (hub/gptq_format.h), in an order in which rows run on,
// so that a fused matrix is the rows of its parts. A scale has 11 bits and q - 8 four: w is exact in float32.
#pragma once
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "tensor/half.h"

namespace tessera {

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
  // What tensor/ops/quantize/quantize.h calls the bytes of a whole matrix: codec gptq, of these rows, columns and
  // groups. Throws Error where groups do not divide a row, or are of an odd number.
  std::vector<std::byte> packed() const;
  // Adds the rows of another matrix below. Throws Error where columns or groups differ.
  void append(const Int4Matrix& below);
};

}  // namespace tessera
