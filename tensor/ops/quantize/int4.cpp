// Codes and numbers.
#include "tensor/ops/quantize/int4.h"

#include <algorithm>
#include <cstring>
#include <string>

#include "tensor/error.h"

namespace tessera {

Int4Matrix::Int4Matrix(int64_t r, int64_t c, int64_t g) : rows(r), columns(c), group(g) {
  if (rows < 1 || columns < 2 || columns % 2 != 0 || group < 1)
    throw Error("[int4] a matrix (" + std::to_string(rows) + ", " + std::to_string(columns) + ") in groups of " +
                std::to_string(group) + "; expected even columns and sizes above 0");
  codes.assign(static_cast<size_t>(rows * columns / 2), kZero << 4 | kZero);
  scales.assign(static_cast<size_t>(rows * groups()), Half());
}

void Int4Matrix::decode(int64_t begin, std::span<float> out) const {
  size_t done = 0;
  while (done < out.size()) {
    const int64_t at = begin + static_cast<int64_t>(done), row = at / columns, column = at % columns,
                  g = column / group;
    const int64_t end = std::min({columns, (g + 1) * group, column + static_cast<int64_t>(out.size() - done)});
    const auto s = wide(scale(row, g));
    for (int64_t c = column; c < end; ++c) out[done++] = s * static_cast<float>(code(row, c) - kZero);
  }
}

std::vector<std::byte> Int4Matrix::packed() const {
  if (columns % group != 0 || scales.size() % 2 != 0)
    throw Error("[int4] rows of " + std::to_string(columns) + " columns in groups of " + std::to_string(group) +
                "; expected groups that divide a row, and an even number of them in all");
  constexpr size_t kBlock = 2 * sizeof(Half) + 1;  // of two groups: their scales, and both zeros
  std::vector<std::byte> out(codes.size() + scales.size() / 2 * kBlock);
  std::memcpy(out.data(), codes.data(), codes.size());
  std::byte* at = out.data() + codes.size();
  for (size_t g = 0; g < scales.size(); g += 2, at += kBlock) {
    std::memcpy(at, &scales[g], 2 * sizeof(Half));
    at[kBlock - 1] = std::byte{kZero << 4 | kZero};
  }
  return out;
}

void Int4Matrix::append(const Int4Matrix& below) {
  if (below.columns != columns || below.group != group)
    throw Error("[int4] rows of " + std::to_string(below.columns) + " columns in groups of " +
                std::to_string(below.group) + "; expected " + std::to_string(columns) + " in groups of " +
                std::to_string(group));
  rows += below.rows;
  codes.insert(codes.end(), below.codes.begin(), below.codes.end());
  scales.insert(scales.end(), below.scales.begin(), below.scales.end());
}

}  // namespace tessera
