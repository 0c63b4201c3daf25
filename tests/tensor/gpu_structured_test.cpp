// Structured ops on a GPU where the op table does not reach: long rows, many rows, tokens of one kind, indices outside,
// parts of a vocabulary, tiles of a mask.

#include <limits>

#include "tensor/ops/activations.h"
#include "tensor/ops/attention/attention.h"
#include "tensor/ops/dropout.h"
#include "tensor/ops/elementwise.h"
#include "tensor/ops/embedding.h"
#include "tensor/ops/norm.h"
#include "tests/support/errors.h"
#include "tests/support/gpu.h"
#include "tests/support/tensors.h"
#include "tests/support/two_libraries.h"

namespace tessera {
namespace {

using test::apart;
using test::drawn;
using test::same_bits;
using StructuredGpu = test::OnGpu;

// One element may be rounded the other way: half a unit in the last place, and what the sums lose.
double bound(DType dtype) { return dtype == DType::float64 ? 1e-13 : dtype == DType::float32 ? 1e-5 : 8e-3; }

Tensor ids_of(const std::vector<int32_t>& v) {
  return Tensor::of<int32_t>(v, {static_cast<int64_t>(v.size())}, make_arena());
}
std::vector<int32_t> drawn_ids(int64_t n, int64_t below, const std::string& name) {
  const Philox random = Philox::named(3, name);
  std::vector<int32_t> ids(static_cast<size_t>(n));
  for (size_t i = 0; i < ids.size(); ++i) ids[i] = static_cast<int32_t>(random.below(static_cast<uint64_t>(below), i));
  return ids;
}

// Rows of one warp, of a block, and past what a block keeps in registers; with and without whole parts of 16 bytes.
TEST_F(StructuredGpu, NormsAndSoftmaxOfRowsOfAnyLength) {
  for (const DType dtype : test::floating(arena))
    for (const int64_t c : {1, 96, 1001, 2048, 4100, 8193, 17000}) {
      SCOPED_TRACE(std::string(name_of(dtype)) + " " + std::to_string(c));
      const Tensor x = drawn({3, c}, dtype, "x"), y = drawn({3, c}, dtype, "y"), gamma = drawn({c}, dtype, "gamma"),
                   beta = drawn({c}, dtype, "beta");
      const AddNormed here = add_norm(x, y.clone(), gamma, beta),
                      there = add_norm(x.to(arena), y.to(arena), gamma.to(arena), beta.to(arena));
      EXPECT_TRUE(same_bits(there.sum, here.sum));
      if (c > 1) {
        EXPECT_LT(apart(there.normed.y, here.normed.y), bound(dtype));
        const Tensor dx = norm_backward(y, x, gamma, here.normed, Tensor());
        const Normed on_gpu{Tensor(), here.normed.mean.to(arena), here.normed.rstd.to(arena)};
        EXPECT_LT(apart(norm_backward(y.to(arena), x.to(arena), gamma.to(arena), on_gpu, Tensor()), dx), bound(dtype));
        const Tensor more = norm_backward(y, x, gamma, here.normed, x.clone());
        EXPECT_LT(apart(norm_backward(y.to(arena), x.to(arena), gamma.to(arena), on_gpu, x.to(arena).clone()), more),
                  bound(dtype));
      }
      EXPECT_LT(apart(softmax(x.to(arena)), softmax(x)), bound(dtype));
      EXPECT_LT(apart(log_softmax(x.to(arena)), log_softmax(x)), bound(dtype));
      EXPECT_LT(apart(softmax_backward(y.to(arena), x.to(arena)), softmax_backward(y, x)), bound(dtype));
      EXPECT_LT(apart(log_softmax_backward(y.to(arena), x.to(arena)), log_softmax_backward(y, x)), bound(dtype));
    }
}

// More rows than are summed in one run, and a row that does not begin at 16 bytes.
TEST_F(StructuredGpu, SumsOverManyRows) {
  for (const DType dtype : test::floating(arena))
    for (const Shape& shape : {Shape{9000, 5}, Shape{70000, 2}, Shape{65, 40}, Shape{0, 3}}) {
      SCOPED_TRACE(std::string(name_of(dtype)) + " " + shape.str());
      const Tensor x = drawn(shape, dtype, "x", 0.5, 1.5), there = x.to(arena);
      const DType widest = dtype == DType::float64 ? dtype : DType::float32;
      Tensor expected = x.make({shape[1]}, DType::float64), found = there.make({shape[1]}, widest);
      sum_rows(expected, x.to(DType::float64));
      sum_rows(found, there);
      EXPECT_LT(apart(found, expected), dtype == DType::float64 ? 1e-13 : 1e-5);
      Tensor narrow = there.make({shape[1], 2}, DType::bfloat16).select(1, 1);
      sum_rows(narrow, there);
      EXPECT_TRUE(same_bits(narrow, found.to(DType::float32).to(DType::bfloat16)));
      EXPECT_TRUE(same_bits(sum(there), sum(x)));
      if (shape[0] < 3) continue;
      Tensor all = there.make({shape[1]}), part = there.make({shape[1]});
      sum_rows(all, there.narrow(0, 1, shape[0] - 1).clone());
      sum_rows(part, there.narrow(0, 1, shape[0] - 1));
      EXPECT_TRUE(same_bits(all, part));
      const Tensor wide = sum_to(there.reshape({shape[0], shape[1], 1}).transpose(0, 1), {shape[1], 1, 1});
      EXPECT_TRUE(same_bits(wide, sum_to(x.reshape({shape[0], shape[1], 1}).transpose(0, 1), {shape[1], 1, 1})));
    }
}

TEST_F(StructuredGpu, WeightGradientsOfManyRows) {
  for (const DType dtype : test::floating(arena))
    for (const Shape& shape : {Shape{9000, 5}, Shape{130, 64}, Shape{40, 4100}, Shape{33, 8193}, Shape{0, 8}}) {
      SCOPED_TRACE(std::string(name_of(dtype)) + " " + shape.str());
      const Tensor x = drawn(shape, dtype, "x"), dy = drawn(shape, dtype, "dy", 0, 1),
                   c = drawn({shape[1]}, dtype, "c");
      const Normed here = norm(x, c, c), there{Tensor(), here.mean.to(arena), here.rstd.to(arena)};
      const NormSums sums{.gamma = {x.make({shape[1]})}, .beta = {x.make({shape[1]}, DType::float32)}};
      norm_backward(dy, x, c, here, {}, sums);
      // Sums that are added to what stands there, where they do not lie together, of two dtypes.
      Tensor parts, gamma = x.to(arena).make({shape[1], 2}).select(1, 1),
                    beta = x.to(arena).make({shape[1]}, DType::float32);
      gamma.fill(0);
      beta.fill(0);
      const NormSums sums_there{.gamma = {gamma, true}, .beta = {beta, false}, .parts = &parts};
      const Tensor dx = norm_backward(dy.to(arena), x.to(arena), c.to(arena), there, {}, sums_there);
      EXPECT_LT(apart(gamma, sums.gamma.to), 20 * bound(dtype));
      EXPECT_LT(apart(beta, sums.beta.to), bound(dtype));
      // The first pass of a bias's gradient rides on the kernel that makes dx.
      Tensor along = beta.clone(), alone = beta.clone();
      sum_parts(along, parts);
      sum_rows(alone, dx);
      EXPECT_TRUE(same_bits(along, alone));
      // A gradient that is added to another is rounded first.
      Tensor twice = along.clone();
      const NormSums again{.beta = {twice, true}};
      norm_backward(dy.to(arena), x.to(arena), c.to(arena), there, {}, again);
      add_(along, beta);
      EXPECT_TRUE(same_bits(twice, along));
      if (shape[0] == 0) continue;
      for (const GeluForm form : {GeluForm::tanh, GeluForm::erf}) {
        Tensor dbias = sums.gamma.to.clone(), dbias_there = gamma.contiguous();
        const Tensor dh = bias_gelu_backward(dy.clone(), x, &dbias, form);
        const Tensor dh_there = bias_gelu_backward(dy.to(arena).clone(), x.to(arena), &dbias_there, form);
        with_gelu(form, [&](auto op) { test::expect_near_gradient<decltype(op)>(dh_there, dh, dy, x); });
        EXPECT_LT(apart(dbias_there, dbias), bound(dtype));
      }
    }
}

// A row that many tokens have, more than a block keeps at a time; rows that none has; a table of another dtype.
TEST_F(StructuredGpu, EmbeddingGradientsAreSummedInTokenOrder) {
  for (const int64_t vocab : {3, 300, 2100})
    for (const DType dtype : test::floating(arena)) {
      SCOPED_TRACE(std::string(name_of(dtype)) + " " + std::to_string(vocab));
      std::vector<int32_t> v = drawn_ids(vocab == 3 ? 9000 : 700, vocab, "ids");
      std::fill(v.begin() + 200, v.begin() + 500, 1);
      const Tensor ids = ids_of(v), dy = drawn({ids.numel(), vocab == 3 ? 9 : 72}, dtype, "dy");
      for (const DType to : {dtype, DType::float32}) {
        if (to == DType::float32 && dtype == DType::float64) continue;
        Tensor here = dy.make({vocab, dy.dim(1)}, to), there = here.to(arena);
        embedding_backward(here, dy, ids);
        embedding_backward(there, dy.to(arena), ids.to(arena));
        EXPECT_TRUE(same_bits(there, here));
      }
    }
}

TEST_F(StructuredGpu, IndicesOutsideAreNamedWhenSomeoneWaits) {
  const Tensor table = drawn({50, 8}, DType::float32, "table"), there = table.to(arena);
  const Tensor ids = ids_of({1, 2, 70000, 3, -4});
  const std::string expected = error_of([&] { embedding(ids, table); });
  EXPECT_EQ(expected, "[embedding] id 70000 at position 2 is outside [0, 50)");
  Tensor rows = embedding(ids.to(arena), there);
  EXPECT_EQ(error_of([&] { rows.to_vector<float>(); }), expected);
  const std::vector<float> after = rows.to_vector<float>();  // told once; what is outside is zero
  EXPECT_EQ(after[2 * 8 + 3], 0);
  EXPECT_EQ(after[8 + 3], table.to_vector<float>()[2 * 8 + 3]);
  EXPECT_EQ(error_of([&] { ids_beside(there, ids); }), expected);
  Tensor gradient = there.clone();
  embedding_backward(gradient, rows, ids.to(arena));
  EXPECT_EQ(error_of([&] { gradient.to_vector<float>(); }), expected);

  const Tensor logits = drawn({4, 10}, DType::float32, "logits"), targets = ids_of({1, -1, 10, -2});
  const std::string outside = error_of([&] { cross_entropy(logits, targets); });
  EXPECT_EQ(outside, "[cross_entropy] target 10 of row 2 is outside [0, 10)");
  EXPECT_EQ(error_of([&] { static_cast<void>(double(cross_entropy(logits.to(arena), targets.to(arena)).loss_sum)); }),
            outside);
  EXPECT_EQ(error_of([&] { targets_beside(logits.to(arena), targets, 10); }), outside);
  // More tables than there are slots to complain in.
  for (int64_t vocab = 1; vocab < 200; ++vocab)
    embedding(ids_of({0}).to(arena), drawn({vocab, 2}, DType::float32, "t").to(arena));
  EXPECT_EQ(error_of([&] {
              embedding(ids_of({199}).to(arena), drawn({199, 2}, DType::float32, "t").to(arena)).to_vector<float>();
            }),
            "[embedding] id 199 at position 0 is outside [0, 199)");
}

TEST_F(StructuredGpu, CrossEntropyOfAllAndOfParts) {
  for (const DType dtype : test::floating(arena))
    for (const int64_t vocab : {7, 1024, 5003}) {
      SCOPED_TRACE(std::string(name_of(dtype)) + " " + std::to_string(vocab));
      std::vector<int32_t> v = drawn_ids(70, vocab, "targets");
      v[3] = v[69] = -1;
      const Tensor targets = ids_of(v), on_gpu = targets.to(arena), logits = drawn({70, vocab}, dtype, "logits", -9, 9);
      const CrossEntropy here = cross_entropy(logits, targets), there = cross_entropy(logits.to(arena), on_gpu);
      const double near = dtype == DType::float64 ? 1e-14 : 1e-6;
      EXPECT_EQ(there.count, 68);
      EXPECT_NEAR(there.loss_sum, here.loss_sum, near * here.loss_sum);
      EXPECT_EQ(there.sum.item<double>(), there.loss_sum);
      EXPECT_LT(apart(there.lse, here.lse), near);
      const Tensor dx = cross_entropy_backward(logits.clone(), targets, here.lse, 0.25);
      const Tensor whole = cross_entropy_backward(logits.to(arena), on_gpu, there.lse, 0.25);
      EXPECT_LT(apart(whole, dx), bound(dtype));
      const int64_t cut = vocab / 3;
      std::vector<Tensor> tops, sums, own,
          parts = {logits.to(arena).narrow(1, 0, cut), logits.to(arena).narrow(1, cut, vocab - cut)};
      const VocabPart at[] = {{0, vocab}, {cut, vocab}};
      for (const Tensor& part : parts) tops.push_back(row_max(part));
      const Tensor top = binary<Maximum>(tops[0], tops[1]);
      for (size_t i = 0; i < 2; ++i) {
        sums.push_back(row_sum_exp(parts[i], top));
        own.push_back(target_logits(parts[i], on_gpu, at[i]));
      }
      const CrossEntropy joined =
          joined_cross_entropy(top, binary<Add>(sums[0], sums[1]), binary<Add>(own[0], own[1]), on_gpu);
      EXPECT_EQ(joined.count, 68);
      EXPECT_NEAR(joined.loss_sum, here.loss_sum, near * here.loss_sum);
      for (size_t i = 0; i < 2; ++i) {
        const Tensor mine = cross_entropy_backward(parts[i].clone(), on_gpu, there.lse, 0.25, at[i]);
        EXPECT_TRUE(same_bits(mine, whole.narrow(1, at[i].first, mine.dim(1))));
      }
    }
}

// On a GPU with the row in shared memory where it fits, and by two kernels where it does not, or ends within 16 bytes.
TEST_F(StructuredGpu, CrossEntropyInPlaceHasTheBitsOfTwoPasses) {
  for (const ArenaPtr& where : {arena, make_arena()})
    for (const DType dtype : test::floating(arena))
      for (const int64_t vocab : {7, 512, 5003, 8192, 40000}) {
        SCOPED_TRACE(std::string(name_of(dtype)) + " " + std::to_string(vocab));
        std::vector<int32_t> v = drawn_ids(9, vocab, "targets");
        v[3] = -1;
        const Tensor targets = ids_of(v).to(where), logits = drawn({9, vocab}, dtype, "logits", -9, 9).to(where);
        Tensor x = logits.clone();
        const CrossEntropy apart = cross_entropy(logits, targets), both = cross_entropy_in_place(x, targets, 0.25);
        EXPECT_TRUE(double(both.loss_sum) == double(apart.loss_sum) && double(both.count) == double(apart.count));
        EXPECT_TRUE(same_bits(both.lse, apart.lse));
        const Tensor dx = cross_entropy_backward(logits.clone(), targets, apart.lse, 0.25);
        EXPECT_TRUE(same_bits(x, dx));
        Tensor factor = Tensor::empty({}, DType::float64, where);
        for (const double by : {1.0, 0.5}) {
          factor.fill(by);
          scale_rows_(x, factor);
          EXPECT_TRUE(same_bits(x, scale(dx, by))) << by;
        }
      }
}

// Losses are added by blocks of 4096 rows; and a row of which part is masked out.
TEST_F(StructuredGpu, LossesOfManyRows) {
  const std::vector<int32_t> v = drawn_ids(9001, 3, "targets");
  const Tensor logits = drawn({9001, 3}, DType::float32, "logits").to(arena), targets = ids_of(v).to(arena);
  const CrossEntropy all = cross_entropy(logits, targets);
  double parts = 0;
  for (const int64_t first : {0, 4096, 8192}) {
    const int64_t n = std::min<int64_t>(4096, 9001 - first);
    parts += cross_entropy(logits.narrow(0, first, n), targets.narrow(0, first, n)).loss_sum;
  }
  EXPECT_EQ(all.loss_sum, parts);
  EXPECT_EQ(all.count, 9001);
  Tensor masked = drawn({1, 3000}, DType::bfloat16, "m");
  masked.narrow(1, 0, 2500).fill(-std::numeric_limits<double>::infinity());
  EXPECT_NEAR(cross_entropy(masked.to(arena), ids_of({2700}).to(arena)).loss_sum,
              cross_entropy(masked.narrow(1, 2500, 500), ids_of({200})).loss_sum, 1e-5);
}

TEST_F(StructuredGpu, DropoutDrawsTheMasksOfTheCpu) {
  for (const DType dtype : test::floating(arena))
    for (const int64_t c : {1, 6, 8, 20, 64}) {
      const std::vector<int64_t> positions = {7, 0, 3, 9, 2};
      for (const int64_t first_channel : {0, 3, 4}) {
        const Tensor x = drawn({2, 5, c}, dtype, "x");
        DropoutTile tile;
        tile.random = Philox(5);
        tile.step = (uint64_t{1} << 40) + 9;
        tile.first_sequence = 3;
        tile.first_channel = first_channel;
        tile.channels_total = first_channel + c + (first_channel == 3 ? 2 : 0);
        tile.tokens_total = 10;
        if (first_channel > 0) tile.positions = positions;
        EXPECT_TRUE(same_bits(dropout(x.to(arena), 0.3, tile), dropout(x.clone(), 0.3, tile)))
            << name_of(dtype) << " " << c << " from " << first_channel;
      }
    }
}

TEST_F(StructuredGpu, AttentionOfTwoPartsIsMerged) {
  for (const DType dtype : test::floating(arena)) {
    if (dtype == DType::bfloat16) continue;
    const Attended a{drawn({2, 5, 3, 40}, dtype, "a"), drawn({2, 3, 5}, dtype, "la")},
        b{drawn({2, 5, 3, 40}, dtype, "b"), drawn({2, 3, 5}, dtype, "lb")};
    Tensor wide = a.out.make({2, 5, 3, 50}).to(arena);
    const Attended there{wide.narrow(3, 4, 40), a.lse.to(arena)}, other{b.out.to(arena), b.lse.to(arena)};
    Tensor(there.out).copy_from(a.out);
    merge_attended(a, b);
    merge_attended(there, other);
    EXPECT_LT(apart(there.out, a.out), bound(dtype) / 10);
    EXPECT_LT(apart(there.lse, a.lse), bound(dtype) / 10);
  }
}

}  // namespace
}  // namespace tessera
