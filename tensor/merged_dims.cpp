// Merging dims, once for all elementwise loops.
#include "tensor/merged_dims.h"

namespace tessera {

MergedDims merged_dims(std::span<const Tensor* const> operands) {
  MergedDims m;
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

}  // namespace tessera
