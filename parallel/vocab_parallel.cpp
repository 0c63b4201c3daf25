// Sharded lookup and cross-entropy.
#include <algorithm>
#include <cstdint>
#include <string>

#include "parallel/tensor_parallel.h"
#include "tensor/ops/embedding.h"

namespace tessera {

Var vocab_parallel_embedding(const Tensor& ids, const Var& table, const Communicator& tp, int64_t vocab) {
  const Range rows = chunk_range(vocab, tp.size(), tp.rank());
  if (table.shape().ndim() != 2 || table.dim(0) != rows.size())
    throw Error("[vocab_parallel_embedding] " + tp.axis() + " axis: the table of rank " + std::to_string(tp.rank()) +
                " is " + table.value().describe() + "; expected " + std::to_string(rows.size()) + " of " +
                std::to_string(vocab) + " rows");
  const VocabShard part{rows.begin, vocab};
  const Tensor own = ids_on_device(table.value(), ids, part).contiguous();
  return record_one(
      "vocab_parallel_embedding", embedding(own, table.value(), part), {table.edge()}, [own, part](Grads& g) {
        g.write_grad(0, [own, part, dy = g.output()](Tensor& dtable) { embedding_backward(dtable, dy, own, part); });
      });
}

void vocab_wise(Embedding& e, Communicator& tp, Placement between) {
  if (tp.size() == 1) return;
  const int64_t vocab = e.weight.dim(0);
  shard_parameter(e, e.weight, 0, tp);
  e.hooks.lookup = [&tp, between, vocab](const Tensor& ids, const Var& table) {
    return join(vocab_parallel_embedding(ids, table, tp, vocab), tp, between);
  };
  e.hooks.matmul = [&tp, input = column_input(tp, between)](const Var& x, const Var& w, const Var& b,
                                                            PackedWeights* packs) {
    if (packs) packs->shards.outputs = tp.size();
    return linear(x, w, b, packs, input);
  };
  e.hooks.loss = [&e, &tp, vocab](const Var& x, const Tensor& targets, double scale) {
    return vocab_parallel_cross_entropy(e.logits(x), targets, scale, tp, vocab);
  };
}

Loss vocab_parallel_cross_entropy(Var logits, const Tensor& targets, double scale, Communicator& tp, int64_t vocab) {
  if (tp.size() == 1) return cross_entropy(std::move(logits), targets, scale);
  const Range own = chunk_range(vocab, tp.size(), tp.rank());
  if (logits.shape().ndim() != 2 || logits.dim(1) != own.size())
    throw Error("[vocab_parallel_cross_entropy] " + tp.axis() + " axis: the logits of rank " +
                std::to_string(tp.rank()) + " are " + logits.value().describe() + "; expected (N, " +
                std::to_string(own.size()) + ") of " + std::to_string(vocab) + " columns");
  const VocabShard part{own.begin, vocab};
  const Var edge = logits.edge();
  Tensor x = std::move(logits).take();
  const Tensor of_target = target_logits(x, targets, part), top = row_max(x);
  tp.all_reduce(top, Reduction::max);
  const Tensor sum = row_sum_exp(x, top, tp.adds_in_pairs() ? kLeaves / tp.size() : 0);
  tp.all_reduce(sum);
  tp.all_reduce(of_target);
  const CrossEntropy r = joined_cross_entropy(top, sum, of_target, targets);
  Var root = record_one("vocab_parallel_cross_entropy", tessera::scale(r.sum, scale), {edge},
                        [x = std::move(x), targets, lse = r.lse, scale, part](Grads& g) mutable {
                          const GradientScale by(scale, g.output());
                          g.set(0, cross_entropy_backward(std::move(x), targets, lse, by, part));
                        });
  return {std::move(root), r.loss_sum, r.count};
}

}  // namespace tessera
