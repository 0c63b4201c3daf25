// Lookup by rows; the gradient by columns, so that no two threads add to one element.
#include "tensor/ops/embedding.h"

#include <algorithm>

#include "tensor/cpu/vectorize.h"
#include "tensor/cuda/embedding.h"

namespace tessera {
namespace {

const int32_t* checked(const Tensor& ids, int64_t vocab) {
  const int32_t* const id = ids.data<int32_t>();
  for (int64_t i = 0; i < ids.numel(); ++i)
    if (id[i] < 0 || id[i] >= vocab)
      throw Error("[embedding] id " + std::to_string(id[i]) + " at position " + std::to_string(i) + " is outside [0, " +
                  std::to_string(vocab) + ")");
  return id;
}

void embedding_on_cpu(const Tensor& out, const Tensor& ids, const Tensor& table) {
  const int64_t c = table.dim(1), row_bytes = c * size_of(table.dtype());
  const int32_t* const id = checked(ids, table.dim(0));
  const std::byte* const from = table.raw();
  std::byte* const to = out.raw();
  cpu::split(ids.numel(), std::max<int64_t>(1, cpu::kGrain / std::max<int64_t>(c, 1)), [=](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) std::copy_n(from + id[i] * row_bytes, row_bytes, to + i * row_bytes);
  });
}

void embedding_backward_on_cpu(Tensor& sums, const Tensor& dy, const Tensor& ids) {
  const int64_t c = sums.dim(1), n = ids.numel();
  const int32_t* const id = checked(ids, sums.dim(0));
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
}

}  // namespace

Tensor ids_beside(const Tensor& table, const Tensor& ids) {
  if (ids.device() == table.device()) return ids;
  checked(ids.on_host().contiguous(), table.dim(0));
  return ids.to(table.arena());
}

Tensor embedding(const Tensor& ids_any, const Tensor& table_any) {
  if (table_any.rank() != 2) throw Error("[embedding] table is " + table_any.describe() + "; expected (V, C)");
  const Tensor ids = ids_any.contiguous(), table = table_any.contiguous();
  Shape shape = ids.shape();
  shape.push_back(table.dim(1));
  Tensor out = table.make(shape);
  on_device(
      table.device(), [&] { embedding_on_cpu(out, ids, table); }, [&] { cuda::embedding(out, ids, table); });
  return out;
}

void embedding_backward(Tensor& dtable, const Tensor& dy_any, const Tensor& ids_any) {
  const Tensor ids = ids_any.contiguous(), dy = dy_any.contiguous();
  dy.check_size(ids.numel() * dtable.dim(1));
  const DType wide = dy.dtype() == DType::float64 ? DType::float64 : DType::float32;
  const bool direct = dtable.dtype() == wide && dtable.is_contiguous();
  Tensor sums = direct ? dtable : dy.make(dtable.shape(), wide, Category::workspace);
  on_device(
      dy.device(), [&] { embedding_backward_on_cpu(sums, dy, ids); }, [&] { cuda::embedding_backward(sums, dy, ids); });
  if (!direct) dtable.copy_from(sums);
}

}  // namespace tessera
