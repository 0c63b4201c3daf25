// Two products cut over ranks by placements alone, the first by columns and the second by rows (Shoeybi et al. 2019,
// section 3), with what lies between them replicated or cut by tokens (Korthikanti et al. 2022): gradients are those of
// one rank.
#include <gtest/gtest.h>

#include "autograd/ops.h"
#include "parallel/comm/launch.h"
#include "parallel/placement.h"

namespace tessera {
namespace {

constexpr int64_t kTokens = 7, kIn = 5, kHidden = 11, kOut = 6;

Tensor normal(const Shape& shape, const char* name, const ArenaPtr& arena) {
  const Tensor t = Tensor::empty(shape, DType::float64, arena);
  for (int64_t i = 0; i < t.numel(); ++i)
    t.data<double>()[i] = Philox::named(11, name).normal(static_cast<uint64_t>(i));
  return t;
}

// y = gelu(x w1^T + b1) w2^T + b2, and the loss sum(y t).
struct Layers {
  Var x, w1, b1, w2, b2;
  Tensor t;
};

Layers whole(const ArenaPtr& arena) {
  return {Var(normal({kTokens, kIn}, "x", arena), true), Var(normal({kHidden, kIn}, "w1", arena), true),
          Var(normal({kHidden}, "b1", arena), true),     Var(normal({kOut, kHidden}, "w2", arena), true),
          Var(normal({kOut}, "b2", arena), true),        normal({kTokens, kOut}, "t", arena)};
}

Layers one_rank(const ArenaPtr& arena) {
  Layers l = whole(arena);
  const Var y = linear(unary<Gelu>(linear(l.x, l.w1, l.b1)), l.w2, l.b2);
  backward(sum(y * Var(l.t)));
  return l;
}

Tensor cut(const Tensor& t, int dim, const Communicator& axis) {
  const Range own = piece(t.dim(dim), axis.size(), axis.rank());
  return t.narrow(dim, own.begin, own.size()).contiguous();
}

// The loss of rank r when `between` is S(0) is its part of the whole one, so it is a P, whose gradient is one anywhere.
Layers on_ranks(Communicator& axis, Placement between, const ArenaPtr& arena) {
  Layers l = whole(arena);
  l.w1 = Var(cut(l.w1.value(), 0, axis), true);
  l.b1 = Var(cut(l.b1.value(), 0, axis), true);
  l.w2 = Var(cut(l.w2.value(), 1, axis), true);
  if (between.kind == Placement::Kind::sharded) {
    l.x = Var(cut(l.x.value(), 0, axis), true);
    l.t = cut(l.t, 0, axis);
  }
  const Var h = unary<Gelu>(linear(redistribute(l.x, axis, between, R), l.w1, l.b1));
  const Var y =
      redistribute(linear(h, l.w2, Var()), axis, P, between) + redistribute(l.b2, axis, I, between == I ? I : R);
  backward(sum(y * Var(l.t)));
  return l;
}

void expect_gradient(const Var& got, const Tensor& expected, const std::string& what) {
  ASSERT_EQ(got.shape(), expected.shape()) << what;
  const std::vector<double> a = got.grad().to_vector<double>(), b = expected.to_vector<double>();
  double difference = 0, norm = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    difference += (a[i] - b[i]) * (a[i] - b[i]);
    norm += b[i] * b[i];
  }
  EXPECT_GT(norm, 0) << what;
  EXPECT_LE(std::sqrt(difference / norm), 1e-14) << what;
}

TEST(TwoLayers, GradientsAreThoseOfOneRank) {
  for (const int ranks : {1, 2, 3, 4})
    launch({.ranks = ranks, .threads_per_rank = 1, .timeout_s = 20}, [](Communicator& axis) {
      const ArenaPtr arena = make_arena();
      const Layers one = one_rank(arena);
      for (const Placement& between : {I, S(0, kTokens)}) {
        axis.reset_counts();
        const Layers got = on_ranks(axis, between, arena);
        const std::string where = " between " + between.str() + ", rank " + std::to_string(axis.rank());
        expect_gradient(got.x, between == I ? one.x.grad() : cut(one.x.grad(), 0, axis), "x" + where);
        expect_gradient(got.w1, cut(one.w1.grad(), 0, axis), "w1" + where);
        expect_gradient(got.b1, cut(one.b1.grad(), 0, axis), "b1" + where);
        expect_gradient(got.w2, cut(one.w2.grad(), 1, axis), "w2" + where);
        expect_gradient(got.b2, one.b2.grad(), "b2" + where);
        const auto calls = [&](Op op) { return axis.counts()[static_cast<size_t>(op)].calls; };
        const int64_t parallel = axis.size() > 1 ? 1 : 0;
        const bool by_tokens = !(between == I);
        EXPECT_EQ(calls(Op::all_reduce), parallel * (by_tokens ? 1 : 2));  // b2, or y and the gradient of x
        EXPECT_EQ(calls(Op::all_gather), parallel * (by_tokens ? 2 : 0));
        EXPECT_EQ(calls(Op::reduce_scatter), parallel * (by_tokens ? 2 : 0));
      }
    });
}

}  // namespace
}  // namespace tessera
