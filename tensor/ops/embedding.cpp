// Lookup by rows; the gradient by columns, so that no two threads add to one element.
#include "tensor/ops/embedding.h"

#include <algorithm>

#include "tensor/cpu/vectorize.h"

namespace tessera {
namespace {

const int32_t* checked_ids(const Tensor& ids, int64_t vocab) {
  const int32_t* const id = ids.data<int32_t>();
  for (int64_t i = 0; i < ids.numel(); ++i)
    if (id[i] < 0 || id[i] >= vocab)
      throw Error("[embedding] id " + std::to_string(id[i]) + " at position " + std::to_string(i) + " is outside [0, " +
                  std::to_string(vocab) + ")");
  return id;
}

}  // namespace

Tensor embedding(const Tensor& ids_any, const Tensor& table_any) {
  if (table_any.rank() != 2) throw Error("[embedding] table is " + table_any.describe() + "; expected (V, C)");
  const Tensor ids = ids_any.contiguous(), table = table_any.contiguous();
  const int64_t c = table.dim(1), row_bytes = c * size_of(table.dtype());
  const int32_t* const id = checked_ids(ids, table.dim(0));
  Shape shape = ids.shape();
  shape.push_back(c);
  Tensor out = table.make(shape);
  const std::byte* const from = table.raw();
  std::byte* const to = out.raw();
  cpu::split(ids.numel(), std::max<int64_t>(1, cpu::kGrain / std::max<int64_t>(c, 1)), [=](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) std::copy_n(from + id[i] * row_bytes, row_bytes, to + i * row_bytes);
  });
  return out;
}

void embedding_backward(Tensor& dtable, const Tensor& dy_any, const Tensor& ids_any) {
  const Tensor ids = ids_any.contiguous(), dy = dy_any.contiguous();
  const int64_t vocab = dtable.dim(0), c = dtable.dim(1), n = ids.numel();
  dy.check_size(n * c);
  const int32_t* const id = checked_ids(ids, vocab);
  const DType wide = dy.dtype() == DType::float64 ? DType::float64 : DType::float32;
  const bool direct = dtable.dtype() == wide && dtable.is_contiguous();
  Tensor sums = direct ? dtable : dy.make({vocab, c}, wide, Category::workspace);
  sums.fill(0);
  with_floating(dy.dtype(), "embedding_backward", [&](auto t) {
    using T = decltype(t);
    using A = Accumulate<T>;
    const T* const from = dy.data<T>();
    A* const to = sums.data<A>();
    cpu::parallel_for(c, 64, [=](int64_t begin, int64_t end) {
      for (int64_t i = 0; i < n; ++i) {
        A* const row = to + id[i] * c;
        const T* const g = from + i * c;
#pragma GCC ivdep
        for (int64_t j = begin; j < end; ++j) row[j] += static_cast<A>(g[j]);
      }
    });
  });
  if (!direct) dtable.copy_from(sums);
}

}  // namespace tessera
