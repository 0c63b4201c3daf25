// One op for both layers of an Mlp has the bits of the layers one after the other.

#include "nn/layers.h"
#include "tests/support/tensors.h"

namespace tessera {
namespace {

using test::same_bits;

Tensor normal(uint64_t seed, const Shape& shape, DType dtype) { return test::normal(shape, dtype, seed, "mlp"); }

// The output and the gradients of x and both layers' weights and biases.
template <class F>
std::vector<Tensor> results(DType dtype, bool deferred, const F& f) {
  std::vector<Var> v;
  const Shape shapes[] = {{3, 5, 16}, {40, 16}, {40}, {24, 40}, {24}};
  for (uint64_t i = 0; i < 5; ++i) v.emplace_back(normal(i, shapes[i], dtype), true);
  const Var y = f(v);
  DeferredWeightGrads later;
  backward(y, {.seed = normal(9, {3, 5, 24}, dtype), .defer = deferred ? &later : nullptr});
  later.run();
  std::vector<Tensor> all{y.value()};
  for (const Var& one : v) all.push_back(one.grad());
  return all;
}

TEST(GeluMlp, HasTheBitsOfItsLayers) {
  for (const DType dtype : {DType::float32, DType::bfloat16, DType::float64})
    for (const bool deferred : {false, true})
      for (const bool recompute : {false, true}) {
        const auto layers = results(dtype, deferred, [&](const std::vector<Var>& v) {
          return linear(bias_gelu(linear(v[0], v[1], Var()), v[2], recompute), v[3], v[4]);
        });
        const auto one = results(dtype, deferred, [&](const std::vector<Var>& v) {
          return gelu_mlp(v[0], {.w = v[1], .b = v[2]}, {.w = v[3], .b = v[4]}, recompute);
        });
        for (size_t i = 0; i < one.size(); ++i)
          EXPECT_TRUE(same_bits(one[i], layers[i])) << i << " of " << name_of(dtype);
      }
}

// A norm behind the op makes the sums for the last bias beside its own, with the same bits.
TEST(GeluMlp, ItsBiasRidesOnTheNorm) {
  const auto gradient = [](bool rides) {
    std::vector<Var> v;
    for (const Shape& shape : {Shape{6, 16}, Shape{40, 16}, Shape{40}, Shape{24, 40}, Shape{24}, Shape{24}})
      v.emplace_back(normal(v.size(), shape, DType::float32), true);
    Var y = gelu_mlp(v[0], {.w = v[1], .b = v[2]}, {.w = v[3], .b = v[4]});
    EXPECT_TRUE(y.wants_row_sums());
    if (!rides) y = reshape(y, y.shape());  // an op that passes no sums on
    backward(sum(norm(y, v[5], Var()) * Var(normal(9, {6, 24}, DType::float32))));
    return v[4].grad();
  };
  EXPECT_TRUE(same_bits(gradient(true), gradient(false)));
}

// A wrap around a layer, as a tensor axis has one, is called: code between the layers is not passed over.
TEST(GeluMlp, AWrappedLayerIsCalled) {
  Mlp mlp(8, 32, {});
  mlp.materialize(1, make_arena(), DType::float32, DType::float32);
  const Var x(normal(1, {2, 8}, DType::float32));
  const Tensor plain = mlp(x).value();
  int calls = 0;
  mlp.down.wrap([&](const Module::Inner& inner, const Var& in) {
    ++calls;
    return inner(in);
  });
  EXPECT_TRUE(same_bits(mlp(x).value(), plain));
  EXPECT_EQ(calls, 1);
}

}  // namespace
}  // namespace tessera
