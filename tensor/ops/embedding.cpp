// CPU embedding: threads split the gradient by columns, so that no two accumulate into one element.
#include "tensor/ops/embedding.h"

#include <algorithm>
#include <cstdint>
#include <string>

#include "tensor/cpu/loops.h"

namespace tessera {
namespace {

const int32_t* checked(const Tensor& ids, int64_t vocab) {
  const int32_t* const id = ids.data<int32_t>();
  for (int64_t i = 0; i < ids.numel() && !cpu::DryRun::here(); ++i)  // in a dry run the ids are uninitialized
    if (id[i] < 0 || id[i] >= vocab)
      throw Error("[embedding] id " + std::to_string(id[i]) + " at position " + std::to_string(i) + " is outside [0, " +
                  std::to_string(vocab) + ")");
  return id;
}

int64_t full_index(const Tensor& table, const VocabShard& s) { return s.total > 0 ? s.total : table.dim(0); }

void embedding_on_cpu(const Tensor& out, const Tensor& ids, const Tensor& table, const VocabShard& shard) {
  const int64_t rows = table.dim(0), first = shard.first, c = table.dim(1), row_bytes = c * element_size(table.dtype());
  const int32_t* const id = checked(ids, full_index(table, shard));
  const std::byte* const from = table.raw();
  std::byte* const to = out.raw();
  cpu::split(ids.numel(), cpu::rows_per_task(c), [=](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t row = id[i] - first;
      if (row >= 0 && row < rows)
        std::copy_n(from + row * row_bytes, row_bytes, to + i * row_bytes);
      else
        std::fill_n(to + i * row_bytes, row_bytes, std::byte{});
    }
  });
}

// The sum of the row and the zeros of other shards: -0 becomes +0, whether or not the vocabulary is sharded.
void add_zero(const Tensor& out) {
  with_floating(out.dtype(), "embedding", [&]<class T>(T) {
    T* const y = out.data<T>();
    cpu::parallel_for(out.numel(), cpu::kGrain, [=](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) y[i] = T(static_cast<Accumulate<T>>(y[i]) + Accumulate<T>(0));
    });
  });
}

void embedding_backward_on_cpu(Tensor& sums, const Tensor& dy, const Tensor& ids, const VocabShard& shard) {
  const int64_t rows = sums.dim(0), first = shard.first, c = sums.dim(1), n = ids.numel();
  const int32_t* const id = checked(ids, full_index(sums, shard));
  sums.fill(0);
  with_floating(dy.dtype(), "embedding_backward", [&]<class T>(T) {
    using A = Accumulate<T>;
    const T* const from = dy.data<T>();
    A* const to = sums.data<A>();
    cpu::parallel_for(c, 64, [=](int64_t begin, int64_t end) {
      for (int64_t i = 0; i < n; ++i) {
        const int64_t place = id[i] - first;
        if (place < 0 || place >= rows) continue;
        A* const row = to + place * c;
        const T* const g = from + i * c;
#pragma GCC ivdep
        for (int64_t j = begin; j < end; ++j) row[j] += static_cast<A>(g[j]);
      }
    });
  });
}

}  // namespace

Tensor ids_on_device(const Tensor& table, const Tensor& ids, const VocabShard& shard) {
  if (ids.device() == table.device()) return ids;
  checked(ids.on_host().contiguous(), full_index(table, shard));
  return ids.to(table.arena());
}

Tensor embedding(const Tensor& ids_any, const Tensor& table_any, const VocabShard& shard) {
  if (table_any.ndim() != 2) throw Error("[embedding] table is " + table_any.describe() + "; expected (V, C)");
  const Tensor ids = ids_any.contiguous(), table = table_any.contiguous();
  Shape shape = ids.shape();
  shape.push_back(table.dim(1));
  Tensor out = table.make(shape);
  on_device(
      table.device(),
      [&] {
        embedding_on_cpu(out, ids, table, shard);
        if (adds_by_leaves(out)) add_zero(out);
      },
      [&] { cuda::embedding(out, ids, table, shard); });
  return out;
}

void embedding_backward(Tensor& dtable, const Tensor& dy_any, const Tensor& ids_any, const VocabShard& shard) {
  const Tensor ids = ids_any.contiguous(), dy = dy_any.contiguous();
  dy.check_size(ids.numel() * dtable.dim(1));
  const DType wide = accum_dtype(dy.dtype());
  const bool direct = dtable.dtype() == wide && dtable.is_contiguous();
  Tensor sums = direct ? dtable : dy.make(dtable.shape(), wide, Category::workspace);
  on_device(
      dy.device(), [&] { embedding_backward_on_cpu(sums, dy, ids, shard); },
      [&] { cuda::embedding_backward(sums, dy, ids, shard); });
  if (!direct) dtable.copy_from(sums);
}

}  // namespace tessera
