// Sums of a residual stream that are made late, and gradients that travel beside others.

#include "autograd/ops.h"
#include "tensor/kernels.h"
#include "tests/support/gpu.h"
#include "tests/support/tensors.h"

namespace tessera {
namespace {

using test::drawn;
using test::same_bits;

struct Streams {
  Tensor normed, sum;
  std::vector<Tensor> grads;  // gradients of x, y, gamma, beta
};

// The layers of a block's end and of the next one's beginning: s = x + y, norm(s), and s once more.
Streams run(const ArenaPtr& arena, DType dtype, const std::function<Var(const Var& x, Var y)>& add_them) {
  const auto leaf = [&](const Shape& shape, const char* name) {
    return Var(drawn(shape, dtype, name, 0.5, 1.5).to(arena), true);
  };
  const Var x = leaf({3, 17, 24}, "x"), y = leaf({3, 17, 24}, "y"), gamma = leaf({24}, "gamma"),
            beta = leaf({24}, "beta");
  const Var s = add_them(scale(x, 1.25), scale(y, 0.5));
  const Var n = norm(s, gamma, beta);
  backward(sum(n * n) + sum(s * scale(s, 0.125)));
  return {n.value(), s.value(), {x.grad(), y.grad(), gamma.grad(), beta.grad()}};
}

TEST(Residual, IsTheSumWhoeverReadsItFirst) {
  const auto arena = make_arena();
  for (const DType dtype : {DType::float64, DType::float32, DType::bfloat16}) {
    const Streams whole = run(arena, dtype, [](const Var& x, Var y) { return add(x, std::move(y)); });
    const Streams late = run(arena, dtype, [](const Var& x, Var y) { return add_residual(x, std::move(y)); });
    const Streams early = run(arena, dtype, [](const Var& x, Var y) {
      Var s = add_residual(x, std::move(y));
      EXPECT_TRUE(s.is_late());
      EXPECT_EQ(s.shape(), Shape({3, 17, 24}));
      EXPECT_TRUE(s.is_late());  // a shape asks for no sum
      s.value();
      EXPECT_FALSE(s.is_late());
      return s;
    });
    bool came_by = false;
    const Streams watched = run(arena, dtype, [&](const Var& x, Var y) {
      const Var s = add_residual(x, std::move(y)), same = on_backward(s, [&] { came_by = true; });
      EXPECT_TRUE(same.is_late());
      EXPECT_TRUE(same_bits(same.value(), s.value()));
      return same;
    });
    EXPECT_TRUE(came_by);
    for (const Streams* other : {&late, &early, &watched}) {
      EXPECT_TRUE(same_bits(other->sum, whole.sum));
      EXPECT_TRUE(same_bits(other->normed, whole.normed));
      for (size_t i = 0; i < whole.grads.size(); ++i) EXPECT_TRUE(same_bits(other->grads[i], whole.grads[i])) << i;
    }
  }
}

TEST(Residual, OfOtherShapesOrTypesIsMadeAtOnce) {
  const auto arena = make_arena();
  const Var x(drawn({4, 6}, DType::float32, "x").to(arena), true),
      row(drawn({6}, DType::float32, "row").to(arena), true);
  EXPECT_FALSE(add_residual(x, row).is_late());
  EXPECT_TRUE(same_bits(add_residual(x, row).value(), add(x, row).value()));
}

// A norm adds its gradient to what its input has by then: the sum is that of float64, with one rounding less than two
// gradients that are added.
TEST(Residual, GradientsOfTheStreamMeetInTheNorm) {
  const auto arena = make_arena();
  const auto gradient = [&](DType dtype, bool through_input) {
    const auto of = [&](const Shape& shape, const char* name) {
      return drawn(shape, DType::bfloat16, name, 0.5, 1.5).to(dtype).to(arena);
    };
    const Var x(of({40, 32}, "x"), true), gamma(of({32}, "gamma"), true);
    const Var in = through_input ? Var::input(x.value()) : scale(x, 1);
    const Var n = norm(in, gamma, Var()), weights(of({40, 32}, "w"));
    backward(sum(n * weights) + sum(in * weights));  // the stream's own gradient comes first
    return (through_input ? in : x).grad().to(DType::float64);
  };
  const Tensor exact = gradient(DType::float64, false);
  for (const bool through_input : {false, true}) {
    const std::vector<double> found = gradient(DType::bfloat16, through_input).to_vector<double>(),
                              expected = exact.to_vector<double>();
    for (size_t i = 0; i < found.size(); ++i)
      EXPECT_NEAR(found[i], expected[i], 0x1p-8 * std::abs(expected[i]) + 1e-3) << i;
  }
  EXPECT_TRUE(same_bits(gradient(DType::bfloat16, true), gradient(DType::bfloat16, false)));
}

using ResidualGpu = test::OnGpu;

// The gradient of a bias before a norm, made beside the norm's, has the bits of sum_rows().
TEST_F(ResidualGpu, BiasSumsRideOnTheNorm) {
  arena->local<KernelChoice>().deterministic = true;  // else sums that do not ride may be a product's
  for (const DType dtype : test::floating(arena))
    for (const bool later : {false, true}) {
      const auto bias_gradient = [&](bool rides) {
        const auto leaf = [&](const Shape& shape, const char* name) {
          return Var(drawn(shape, dtype, name, 0.5, 1.5).to(arena), true);
        };
        const Var x = leaf({2, 50, 16}, "x"), w = leaf({24, 16}, "w"), b = leaf({24}, "b"), r = leaf({2, 50, 24}, "r"),
                  gamma = leaf({24}, "gamma");
        Var y = linear(x, w, b);
        EXPECT_TRUE(y.wants_row_sums());
        if (!rides) y = reshape(y, y.shape());  // an op that passes no sums on
        const Var weights(drawn({2, 50, 24}, dtype, "weights").to(arena));
        if (later) {
          const Var s = add_residual(r, std::move(y));
          EXPECT_EQ(s.wants_row_sums(), rides);
          backward(sum(norm(s, gamma, Var()) * weights) + sum(s * weights));
        } else {
          const auto [s, n] = add_norm(r, std::move(y), gamma, Var());
          backward(sum(n * weights) + sum(s * weights));
        }
        return std::vector<Tensor>{b.grad(), w.grad(), r.grad(), gamma.grad()};
      };
      const std::vector<Tensor> rides = bias_gradient(true), alone = bias_gradient(false);
      for (size_t i = 0; i < rides.size(); ++i) EXPECT_TRUE(same_bits(rides[i], alone[i])) << i;
    }
}

// Put-off work makes the sums itself, as a stage whose gradient comes from elsewhere does: in the same order, never in
// a product's, whose bits would be others.
TEST_F(ResidualGpu, BiasSumsThatDoNotArriveAreNoProducts) {
  const auto gradients = [&](bool put_off) {
    const auto leaf = [&](const Shape& shape, const char* name) {
      return Var(drawn(shape, DType::bfloat16, name, 0.5, 1.5).to(arena), true);
    };
    const Var x = leaf({64, 16}, "x"), w = leaf({24, 16}, "w"), b = leaf({24}, "b"), r = leaf({64, 24}, "r"),
              gamma = leaf({24}, "gamma"), w2 = leaf({24, 24}, "w2"), b2 = leaf({24}, "b2");
    const auto [s, n] = add_norm(r, linear(x, w, b), gamma, Var());
    const Var last = norm(add_residual(s, reshape(linear(n, w2, b2), n.shape())), gamma, Var());
    DeferredWeightGrads later;
    backward(sum(last), {.seed = {}, .defer = put_off ? &later : nullptr});
    later.run();
    return std::vector<Tensor>{b.grad(), w.grad()};
  };
  KernelLog::Pass& counted = arena->local<KernelLog>().bias_sums;
  const int64_t before = counted.fused;
  const std::vector<Tensor> at_once = gradients(false);
  const int64_t fused = counted.fused - before;
  const std::vector<Tensor> later = gradients(true);
  EXPECT_EQ(counted.fused - before, 2 * fused);  // the other layer's, behind a reshape
  for (size_t i = 0; i < later.size(); ++i) EXPECT_TRUE(same_bits(later[i], at_once[i])) << i;
}

// Sums of a gradient that another gradient joins are not those of the whole.
TEST_F(ResidualGpu, SumsOfAPartOfTheGradientAreNotTaken) {
  Var x(drawn({30, 16}, DType::float32, "x").to(arena), true), w(drawn({24, 16}, DType::float32, "w").to(arena), true),
      b(drawn({24}, DType::float32, "b").to(arena), true), gamma(drawn({24}, DType::float32, "gamma").to(arena), true);
  const Var y = linear(x, w, b);
  const Var early = scale(y, 2);  // its gradient comes after the norm's
  backward(sum(norm(y, gamma, Var()) * early));
  Tensor found = b.grad().clone();
  const Var again = linear(x, w, b), more = scale(reshape(again, again.shape()), 2);
  b.clear_grad();
  backward(sum(norm(reshape(again, again.shape()), gamma, Var()) * more));
  const std::vector<float> one = found.on_host().to_vector<float>(), two = b.grad().on_host().to_vector<float>();
  for (size_t i = 0; i < one.size(); ++i) EXPECT_NEAR(one[i], two[i], 1e-4 * std::abs(two[i]) + 1e-4) << i;
}

}  // namespace
}  // namespace tessera
