// Distribution of elementwise work over threads.
#include "tensor/cpu/loops.h"

#include <algorithm>
#include <cstdint>
#include <functional>
#include <span>

namespace tessera::cpu {
void for_each_row(std::span<const Tensor* const> operands, const std::function<void(const Row&)>& f) {
  const MergedDims m = merged_dims(operands);
  const int64_t inner = m.shape[-1];
  split(m.shape.numel(), kGrain, [&](int64_t begin, int64_t end) {
    for (int64_t at = begin; at < end;) {
      const int64_t column = at % inner;
      Row row;
      row.n = std::min(inner - column, end - at);
      int64_t rest = at / inner;
      for (size_t k = 0; k < operands.size(); ++k) {
        row.step[k] = m.strides[k][-1];
        row.at[k] = column * row.step[k];
      }
      for (int d = m.shape.ndim() - 2; d >= 0; --d) {
        const int64_t coordinate = rest % m.shape[d];
        rest /= m.shape[d];
        for (size_t k = 0; k < operands.size(); ++k) row.at[k] += coordinate * m.strides[k][d];
      }
      f(row);
      at += row.n;
    }
  });
}

}  // namespace tessera::cpu
