// The engine: accumulation, hooks, deferral, recomputation, no-grad, and what it refuses.

#include "autograd/ops.h"
#include "tests/support/errors.h"
#include "tests/support/tensors.h"

namespace tessera {
namespace {

Tensor numbers(std::initializer_list<double> v, const ArenaPtr& arena) {
  return Tensor::of<double>(std::span(v.begin(), v.size()), {static_cast<int64_t>(v.size())}, arena);
}
std::vector<double> grad_of(const Var& v) { return v.grad().to_vector<double>(); }
using Doubles = std::vector<double>;

TEST(Engine, AddsTheGradientsOfAllUses) {
  const ArenaPtr arena = make_arena();
  const Var x(numbers({1, 2, 3}, arena), true);
  const Var y = x * x + x * x * x;  // y' = 2x + 3x^2
  backward(sum(y));
  EXPECT_EQ(grad_of(x), (Doubles{5, 16, 33}));
}

TEST(Engine, GradientsOfSeveralBackwardsAddUpUntilCleared) {
  const ArenaPtr arena = make_arena();
  Var x(numbers({1, 2}, arena), true);
  for (int i = 0; i < 3; ++i) backward(sum(x * x));
  EXPECT_EQ(grad_of(x), (Doubles{6, 12}));
  x.clear_grad();
  EXPECT_FALSE(x.grad().defined());
  backward(sum(x * x));
  EXPECT_EQ(grad_of(x), (Doubles{2, 4}));
}

TEST(Engine, WritesIntoAGivenBufferAndSettlesWithZeros) {
  const ArenaPtr arena = make_arena();
  const Tensor flat = Tensor::zeros({5}, DType::float64, arena);
  Var x(numbers({1, 2}, arena), true), unused(numbers({1, 2}, arena), true);
  flat.narrow(0, 3, 2).fill(7);
  x.set_grad_buffer(flat.narrow(0, 1, 2));
  unused.set_grad_buffer(flat.narrow(0, 3, 2));
  backward(sum(x * x));
  unused.zero_missing_grad();
  EXPECT_EQ(flat.to_vector<double>(), (Doubles{0, 2, 4, 0, 0}));
  EXPECT_THROW(x.set_grad_buffer(flat), Error);
}

TEST(Engine, HooksRunOnceWhenTheLeafIsComplete) {
  const ArenaPtr arena = make_arena();
  Var x(numbers({2}, arena), true), w(Tensor::of<double>(std::array{3.0}, {1, 1}, arena), true);
  Doubles seen;
  x.on_grad([&] { seen.push_back(grad_of(x)[0]); });
  backward(sum(x * x + x));
  EXPECT_EQ(seen, (Doubles{5}));

  int calls = 0;
  w.on_grad([&] { ++calls; });
  DeferredWeightGrads later;
  const Var in = Var::input(Tensor::of<double>(std::array{4.0}, {1, 1}, arena));
  backward(sum(linear(in, w, Var())), {.seed = {}, .defer = &later});
  EXPECT_EQ(grad_of(in), (Doubles{3}));  // the gradient of the input did not wait
  EXPECT_FALSE(w.grad().defined());
  EXPECT_EQ(calls, 0);
  later.run();
  EXPECT_EQ(grad_of(w), (Doubles{4}));
  EXPECT_EQ(calls, 1);
  EXPECT_TRUE(later.empty());
}

TEST(Engine, RefusesASecondBackward) {
  const ArenaPtr arena = make_arena();
  const Var x(numbers({1, 2}, arena), true);
  const Var shared = x * x, a = sum(shared), b = sum(shared + x);
  backward(a);
  EXPECT_EQ(error_of([&] { backward(a); }),
            "[backward] called twice through the same 'sum': its saved values are gone; run the forward pass again");
  EXPECT_THROW(backward(b), Error);                         // through the part that was used up
  EXPECT_EQ(grad_of(x), (Doubles{2, 4}));                   // the refused calls changed nothing
  EXPECT_THROW(backward(Var(numbers({1}, arena))), Error);  // no graph
}

TEST(Engine, RefusesASeedOfAnotherShapeOrNoneForMany) {
  const ArenaPtr arena = make_arena();
  const Var x(numbers({1, 2}, arena), true);
  EXPECT_THROW(backward(x * x, {.seed = numbers({1, 1, 1}, arena)}), Error);
  EXPECT_THROW(backward(x * x), Error);
  EXPECT_THROW(Var(Tensor::of<int32_t>(std::array{1}, {1}, arena), true), Error);
  const Var a(Tensor::zeros({4, 8}, DType::float64, arena), true),
      b(Tensor::zeros({6, 3}, DType::float64, arena), true);
  EXPECT_EQ(error_of([&] { matmul(a, b); }), "[matmul] inner dims differ: a (4, 8) x b (6, 3); b must have 8 rows");
}

TEST(Engine, NoGradRecordsNothingAndFreesEverything) {
  const ArenaPtr arena = make_arena();
  const Var x(numbers({1, 2}, arena), true);
  const int64_t before = arena->total().live;
  {
    const NoGrad off;
    EXPECT_FALSE(grad_enabled());
    const Var y = sum(x * x);
    EXPECT_FALSE(y.requires_grad());
    EXPECT_THROW(backward(y), Error);
  }
  EXPECT_TRUE(grad_enabled());
  EXPECT_EQ(arena->total().live, before);
  {
    const Var y = sum(x * x);
    backward(y);
  }
  EXPECT_EQ(arena->total().live, before + x.grad().nbytes());  // the walk freed what was saved
}

TEST(Engine, CheckpointKeepsOnlyTheInputAndChangesNoBit) {
  const ArenaPtr arena = make_arena();
  Tensor input = Tensor::empty({1000}, DType::float32, arena);
  for (int64_t i = 0; i < 1000; ++i) input.data<float>()[i] = 0.001f * static_cast<float>(i);
  const Tensor one = Tensor::of<float>(std::array{1.5f}, {1}, arena);
  const auto block = [](const Var& w) {
    return [w](const std::vector<Var>& in) {
      Var x = in[0];
      for (int i = 0; i < 6; ++i) x = unary<Tanh>(x * w) + in[0];
      return x;
    };
  };
  const auto run = [&](bool again) {
    const Var x(input, true), w(one, true);
    arena->reset_peaks();
    const int64_t before = arena->total().live;
    const Var y = again ? checkpoint(block(w), {x}) : block(w)({x});
    const int64_t kept = arena->total().live - before;
    backward(sum(y));
    return std::tuple(x.grad().to_vector<float>(), w.grad().to_vector<float>(), kept);
  };
  const auto [dx, dw, kept] = run(false);
  const auto [dx2, dw2, kept2] = run(true);
  EXPECT_EQ(dx, dx2);
  EXPECT_EQ(dw, dw2);
  EXPECT_EQ(kept2, 4000);  // the result; the input was there
  EXPECT_GT(kept, 6 * 4000);
  EXPECT_THROW(checkpoint(block(Var(one, true)), {Var(input)}), Error);
}

TEST(Engine, OpsWriteOverOnlyWhatNobodyElseHolds) {
  const ArenaPtr arena = make_arena();
  const Var x(numbers({1, 2}, arena), true);
  const Var doubled = scale(x, 2);
  const Var y = add(x, doubled);  // `doubled` is held here
  EXPECT_EQ(doubled.value().to_vector<double>(), (Doubles{2, 4}));
  EXPECT_EQ(y.value().to_vector<double>(), (Doubles{3, 6}));
  Var moved = scale(x, 2);
  const void* const memory = moved.value().raw();
  const Var z = add(x, std::move(moved));
  EXPECT_EQ(z.value().raw(), memory);
  backward(sum(z));
  EXPECT_EQ(grad_of(x), (Doubles{3, 3}));
}

}  // namespace
}  // namespace tessera
