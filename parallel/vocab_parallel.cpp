// Rows of a table that other ranks have in part, and a softmax over columns that they have in part.
#include "parallel/vocab_parallel.h"

#include <algorithm>
#include <cstddef>
#include <string>
#include <utility>
#include <vector>

#include "parallel/cuda/rows.h"
#include "tensor/ops/cross_entropy.h"
#include "tensor/ops/embedding.h"

namespace tessera {
namespace {

// The ids of this rank's entries, counted from its first, and where they stand.
struct OwnIds {
  Tensor ids;                   // int32 (n)
  std::vector<int64_t> places;  // n
};

OwnIds own_ids(const Tensor& ids_any, const Range& own, int64_t vocab) {
  const Tensor ids = ids_any.on_host().contiguous();
  const int32_t* const id = ids.data<int32_t>();
  OwnIds out;
  std::vector<int32_t> here;
  for (int64_t i = 0; i < ids.numel(); ++i) {
    if (id[i] < 0 || id[i] >= vocab)
      throw Error("[embedding] id " + std::to_string(id[i]) + " at position " + std::to_string(i) + " is outside [0, " +
                  std::to_string(vocab) + ")");
    if (id[i] < own.begin || id[i] >= own.end) continue;
    here.push_back(static_cast<int32_t>(id[i] - own.begin));
    out.places.push_back(i);
  }
  out.ids = Tensor::of<int32_t>(here, {static_cast<int64_t>(here.size())}, ids_any.arena());
  return out;
}

// Row k of `few` and row places[k] of `all`, in the host's memory: calls f(few row, all row, bytes).
template <class F>
void for_each_place(const OwnIds& own, const Tensor& few, const Tensor& all, const F& f) {
  const auto row = static_cast<size_t>(few.dim(-1) * size_of(few.dtype()));
  for (size_t k = 0; k < own.places.size(); ++k)
    f(few.raw() + k * row, all.raw() + static_cast<size_t>(own.places[k]) * row, row);
}

Tensor places_on_gpu(const OwnIds& own, const Tensor& few) {
  return Tensor::of<int64_t>(own.places, {few.dim(0)}, few.arena());
}

// Rows of `few` to where they belong in `all`.
void spread(const OwnIds& own, const Tensor& few, const Tensor& all) {
  const auto on_cpu = [&] {
    for_each_place(own, few, all,
                   [](const std::byte* from, std::byte* to, size_t bytes) { std::copy_n(from, bytes, to); });
  };
  on_device(few.device(), on_cpu, [&] { cuda::spread_rows(all, few, places_on_gpu(own, few)); });
}

// And back.
void collect(const OwnIds& own, const Tensor& few, const Tensor& all) {
  const auto on_cpu = [&] {
    for_each_place(own, few, all,
                   [](std::byte* to, const std::byte* from, size_t bytes) { std::copy_n(from, bytes, to); });
  };
  on_device(few.device(), on_cpu, [&] { cuda::collect_rows(few, all, places_on_gpu(own, few)); });
}

}  // namespace

Var vocab_parallel_embedding(const Tensor& ids, const Var& table, const Communicator& tp, int64_t vocab) {
  const Range rows = piece(vocab, tp.size(), tp.rank());
  if (table.shape().rank() != 2 || table.dim(0) != rows.size())
    throw Error("[vocab_parallel_embedding] " + tp.axis() + " axis: the table of rank " + std::to_string(tp.rank()) +
                " is " + table.value().describe() + "; expected " + std::to_string(rows.size()) + " of " +
                std::to_string(vocab) + " rows");
  const OwnIds own = own_ids(ids, rows, vocab);
  Shape shape = ids.shape();
  shape.push_back(table.dim(1));
  Tensor out = table.value().make(shape);
  out.fill(0);
  const Tensor found = embedding(own.ids, table.value());
  spread(own, found, out);
  return record_one("vocab_parallel_embedding", std::move(out), {table.edge()}, [own](Grads& g) {
    g.give_into(0, [own, dy = g.output().contiguous()](Tensor& dtable) {
      const Tensor few = dy.make({own.ids.numel(), dy.dim(-1)});
      collect(own, few, dy);
      embedding_backward(dtable, few, own.ids);
    });
  });
}

void vocab_wise(Embedding& e, Communicator& tp, Placement between) {
  if (tp.size() == 1) return;
  const int64_t vocab = e.weight.dim(0);
  cut_over_ranks(e, e.weight, 0, tp);
  e.set_lookup([&tp, between, vocab](const Tensor& ids, const Var& table) {
    return join(vocab_parallel_embedding(ids, table, tp, vocab), tp, between);
  });
  e.set_product(column_product(tp, between));
}

Loss vocab_parallel_cross_entropy(Var logits, const Tensor& targets, double scale, Communicator& tp, int64_t vocab) {
  if (tp.size() == 1) return cross_entropy(std::move(logits), targets, scale);
  const Range own = piece(vocab, tp.size(), tp.rank());
  if (logits.shape().rank() != 2 || logits.dim(1) != own.size())
    throw Error("[vocab_parallel_cross_entropy] " + tp.axis() + " axis: the logits of rank " +
                std::to_string(tp.rank()) + " are " + logits.value().describe() + "; expected (N, " +
                std::to_string(own.size()) + ") of " + std::to_string(vocab) + " columns");
  const VocabPart part{own.begin, vocab};
  const Var edge = logits.edge();
  Tensor x = std::move(logits).take();
  const Tensor of_target = target_logits(x, targets, part), top = row_max(x);
  tp.all_reduce(top, Reduction::max);
  const Tensor sum = row_sum_exp(x, top);
  tp.all_reduce(sum);
  tp.all_reduce(of_target);
  const CrossEntropy r = joined_cross_entropy(top, sum, of_target, targets);
  Var root = record_one("vocab_parallel_cross_entropy", tessera::scale(r.sum, scale), {edge},
                        [x = std::move(x), targets, lse = r.lse, scale, part](Grads& g) mutable {
                          const GradientScale by(scale, g.output());
                          g.give(0, cross_entropy_backward(std::move(x), targets, lse, by, part));
                        });
  return {std::move(root), r.loss_sum, r.count};
}

}  // namespace tessera
