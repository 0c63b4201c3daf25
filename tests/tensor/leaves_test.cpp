// Sums in leaves (docs/layout_invariant.md): matmuls, sums over tokens, and the log-sum-exp are bitwise independent of
// the instruction set, threads and other rows and columns; shards continue the tree of one rank.
#include <gtest/gtest.h>

#include <cstdint>
#include <vector>

#include "tensor/kernels.h"
#include "tensor/math.h"
#include "tensor/ops/cross_entropy.h"
#include "tensor/ops/elementwise.h"
#include "tensor/ops/matmul/cpu/leaf_gemm.h"
#include "tensor/ops/matmul/matmul.h"
#include "tensor/ops/reduce.h"
#include "tests/support/one_thread.h"
#include "tests/support/tensors.h"

namespace tessera {
namespace {

using cpu::InstructionSet;
using test::bitwise_equal;

class Leaves : public test::OneThread {
 protected:
  Leaves() { arena_->local<KernelChoice>().layout_invariant = true; }
  Tensor random(const Shape& shape, DType dtype, uint64_t seed) {
    const Philox random = Philox::named(seed, "leaves");
    return test::made(shape, dtype, arena_, [&](size_t i) { return 2 * random.uniform(i) - 1; });
  }
  Tensor product(const Tensor& a, const Tensor& b, const LeafOrder& order,
                 InstructionSet isa = cpu::instruction_set()) {
    Tensor out = Tensor::empty({a.dim(0), b.dim(1)}, accum_dtype(a.dtype()), arena_);
    cpu::leaf_matmul(out, a, b, order, isa);
    return out;
  }
  ArenaPtr arena_ = make_arena();
};

// One chain of fused multiply-adds per leaf, and the tree.
template <class A>
A leaf_sum(const std::vector<double>& a, const std::vector<double>& b, const LeafOrder& order) {
  std::vector<A> leaves;
  int64_t at = 0;
  A sum = 0;
  for (const LeafOrder::Run& run : order.runs)
    for (int64_t i = run.begin; i < run.begin + run.size; ++i) {
      while (at == order.ends[leaves.size()]) leaves.push_back(sum), sum = 0;
      sum = math::fma(static_cast<A>(a[static_cast<size_t>(i)]), static_cast<A>(b[static_cast<size_t>(i)]), sum);
      ++at;
    }
  while (leaves.size() < order.ends.size()) leaves.push_back(sum), sum = 0;
  for (size_t step = 1; step < leaves.size(); step *= 2)
    for (size_t i = 0; i < leaves.size(); i += 2 * step) leaves[i] += leaves[i + step];
  return leaves[0];
}

TEST_F(Leaves, MatmulsEqualScalarLoopsOnEveryInstructionSet) {
  for (const DType dtype : {DType::float32, DType::float64, DType::bfloat16})
    for (const int64_t k : {3, 8, 61, 200})
      for (const bool transposed : {false, true}) {
        const int64_t m = 29, n = 75;
        const Tensor a = transposed ? random({k, m}, dtype, 1).transpose(0, 1) : random({m, k}, dtype, 1),
                     b = transposed ? random({n, k}, dtype, 2).transpose(0, 1) : random({k, n}, dtype, 2);
        const LeafOrder order = transposed ? token_leaves(1, k, kLeaves) : channel_leaves(k, kLeaves);
        const Tensor y = product(a, b, order);
        for (const auto isa : {InstructionSet::avx512, InstructionSet::avx2, InstructionSet::baseline})
          if (isa >= cpu::instruction_set()) EXPECT_TRUE(bitwise_equal(y, product(a, b, order, isa)));
        const std::vector<double> found = test::host_values(y), of_a = test::host_values(a),
                                  of_b = test::host_values(b.transpose(0, 1));
        for (const int64_t i : {int64_t{0}, m - 1})
          for (const int64_t j : {int64_t{0}, n / 2, n - 1}) {
            const auto row = [k](const std::vector<double>& x, int64_t r) {
              return std::vector<double>(x.begin() + r * k, x.begin() + (r + 1) * k);
            };
            const double expected = dtype == DType::float64
                                        ? leaf_sum<double>(row(of_a, i), row(of_b, j), order)
                                        : static_cast<double>(leaf_sum<float>(row(of_a, i), row(of_b, j), order));
            EXPECT_EQ(found[static_cast<size_t>(i * n + j)], expected) << k << " [" << i << ", " << j << "]";
          }
      }
}

TEST_F(Leaves, ResultsAreIndependentOfOtherRowsColumnsAndThreads) {
  const Tensor a = random({97, 120}, DType::float32, 3), b = random({120, 170}, DType::float32, 4);
  const LeafOrder order = channel_leaves(120, kLeaves);
  const Tensor all = product(a, b, order);
  EXPECT_TRUE(bitwise_equal(all.narrow(0, 13, 1), product(a.narrow(0, 13, 1), b, order)));
  EXPECT_TRUE(bitwise_equal(all.narrow(1, 33, 7), product(a, b.narrow(1, 33, 7), order)));
  cpu::set_threads(3);
  EXPECT_TRUE(bitwise_equal(all, product(a, b, order)));
}

// Partial sums of ranks that shard K, or the segments of fused outputs, are subtrees.
TEST_F(Leaves, ShardsContinueTheTree) {
  const std::vector<int64_t> segments{32, 16, 16};
  const Tensor x = random({10, 64}, DType::float32, 5), w = random({64, 24}, DType::float32, 6);
  for (const bool fused : {false, true}) {
    const Tensor full = product(x, w, channel_leaves(64, kLeaves, fused ? segments : std::vector<int64_t>{}));
    for (const int64_t ranks : {2, 4, 8}) {
      std::vector<Tensor> sums;
      for (int64_t r = 0; r < ranks; ++r) {
        std::vector<int64_t> here;
        Tensor a = Tensor::empty({10, 64 / ranks}, DType::float32, arena_),
               b = Tensor::empty({64 / ranks, 24}, DType::float32, arena_);
        int64_t from = 0, to = 0;
        for (const int64_t segment : fused ? segments : std::vector<int64_t>{64}) {
          const int64_t size = segment / ranks;
          a.narrow(1, to, size).copy_from(x.narrow(1, from + r * size, size));
          b.narrow(0, to, size).copy_from(w.narrow(0, from + r * size, size));
          here.push_back(size);
          from += segment;
          to += size;
        }
        sums.push_back(product(a, b, channel_leaves(64 / ranks, kLeaves / ranks, here)));
      }
      for (size_t step = 1; step < sums.size(); step *= 2)
        for (size_t r = 0; r < sums.size(); r += 2 * step) add_(sums[r], sums[r + step]);
      EXPECT_TRUE(bitwise_equal(full, sums[0])) << ranks << " ranks";
    }
  }
}

// Rank r has chunks r and 2 n - 1 - r of the tokens, and sums them by the same rule.
TEST_F(Leaves, MirroredShardsOfTokensContinueTheTree) {
  for (const int64_t tokens : {16, 48}) {
    const Tensor x = random({3, tokens, 70}, DType::float32, 7);
    Tensor full = Tensor::empty({70}, DType::float32, arena_);
    sum_rows(full, x);
    for (const int64_t ranks : {2, 4, 8}) {
      std::vector<Tensor> sums;
      const int64_t size = tokens / (2 * ranks);
      for (int64_t r = 0; r < ranks; ++r) {
        const Tensor own = Tensor::empty({3, 2 * size, 70}, DType::float32, arena_);
        own.narrow(1, 0, size).copy_from(x.narrow(1, r * size, size));
        own.narrow(1, size, size).copy_from(x.narrow(1, (2 * ranks - 1 - r) * size, size));
        sum_rows(sums.emplace_back(Tensor::empty({70}, DType::float32, arena_)), own);
      }
      for (size_t step = 1; step < sums.size(); step *= 2)
        for (size_t r = 0; r < sums.size(); r += 2 * step) add_(sums[r], sums[r + step]);
      EXPECT_TRUE(bitwise_equal(full, sums[0])) << tokens << " tokens, " << ranks << " ranks";
    }
  }
}

TEST_F(Leaves, SumsOfOddTokenCountsCountEachTokenOnce) {
  for (const int64_t tokens : {1, 2, 3, 5, 6, 7, 12}) {
    const Tensor x = Tensor::empty({2, tokens, 3}, DType::float64, arena_);
    for (int64_t i = 0; i < x.numel(); ++i) x.data<double>()[i] = static_cast<double>(int64_t{1} << (i / 3));
    Tensor sums = Tensor::empty({3}, DType::float64, arena_);
    sum_rows(sums, x);
    EXPECT_EQ(sums.data<double>()[1], static_cast<double>((int64_t{1} << (2 * tokens)) - 1)) << tokens;
  }
}

TEST_F(Leaves, LogSumExpOfVocabularyShardsEqualsOneRank) {
  const Tensor logits = random({9, 64}, DType::float32, 8);
  const Tensor targets = Tensor::zeros({9}, DType::int32, arena_);
  const CrossEntropy one = cross_entropy(logits, targets);
  const Tensor top = row_max(logits);
  std::vector<Tensor> sums;
  for (int64_t r = 0; r < 4; ++r) sums.push_back(row_sum_exp(logits.narrow(1, 16 * r, 16).contiguous(), top, 2));
  for (size_t r : {0U, 2U}) add_(sums[r], sums[r + 1]);
  add_(sums[0], sums[2]);
  const CrossEntropy joined = joined_cross_entropy(top, sums[0], target_logits(logits, targets, {0, 64}), targets);
  EXPECT_TRUE(bitwise_equal(one.lse, joined.lse));
  EXPECT_EQ(double{one.loss_sum}, double{joined.loss_sum});
}

}  // namespace
}  // namespace tessera
