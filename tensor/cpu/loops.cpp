// Merging dims and splitting the work among threads, once for all elementwise kernels.
#include "tensor/cpu/loops.h"

#include <algorithm>

namespace tessera::cpu {
namespace {

struct Merged {
  Shape shape;  // the last dim is the inner loop
  std::array<Shape, kMaxOperands> strides;
};

Merged merge(std::span<const Tensor* const> operands) {
  Merged m;
  const Shape& full = operands[0]->shape();
  for (int d = 0; d < full.rank(); ++d) {
    if (full[d] == 1) continue;
    bool merges = m.shape.rank() > 0;
    for (size_t k = 0; merges && k < operands.size(); ++k)
      merges = m.strides[k][-1] == operands[k]->strides()[d] * full[d];
    if (merges)
      m.shape[-1] *= full[d];
    else
      m.shape.push_back(full[d]);
    for (size_t k = 0; k < operands.size(); ++k) {
      if (merges)
        m.strides[k][-1] = operands[k]->strides()[d];
      else
        m.strides[k].push_back(operands[k]->strides()[d]);
    }
  }
  if (m.shape.rank() == 0) {  // one element
    m.shape.push_back(1);
    for (auto& s : m.strides) s.push_back(1);
  }
  return m;
}

}  // namespace

void for_each_row(std::span<const Tensor* const> operands, const std::function<void(const Row&)>& f) {
  const Merged m = merge(operands);
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
      for (int d = m.shape.rank() - 2; d >= 0; --d) {
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
