// Products that make GELU, its gradient or the gradient of a bias on their way, beside the same in float64 and beside
// the product and its pass.

#include "tensor/kernels.h"
#include "tensor/ops/activations.h"
#include "tensor/ops/matmul/cuda/product.h"
#include "tensor/ops/reduce.h"
#include "tests/support/gpu.h"
#include "tests/support/tensors.h"

namespace tessera {
namespace {

using test::numbers;
using LinearGeluGpu = test::OnGpu;

Tensor normal(uint64_t seed, const Shape& shape, DType dtype, const ArenaPtr& arena) {
  return test::normal(shape, dtype, seed, "linear gelu", arena);
}

// The same numbers in float64 on the host: what ops make of them is exact beside bfloat16.
Tensor exactly(const Tensor& t) { return t.defined() ? t.on_host().to(DType::float64) : Tensor(); }

// That no element is further from `exact` than `part` of it and `rest` of the largest.
void expect_near(const Tensor& found, const Tensor& exact, double part, double rest, const std::string& what) {
  const std::vector<double> a = numbers(found), b = numbers(exact);
  ASSERT_EQ(a.size(), b.size()) << what;
  double largest = 0;
  for (const double x : b) largest = std::max(largest, std::abs(x));
  for (size_t i = 0; i < a.size(); ++i)
    ASSERT_LE(std::abs(a[i] - b[i]), part * std::abs(b[i]) + rest * largest) << what << ", element " << i;
}

struct Sizes {
  int64_t rows, in, out;
};
// The last of them the library may not do with its own GELU: rows of h that are no multiple of 8.
constexpr Sizes kSizes[] = {{5, 16, 24}, {64, 8, 8}, {33, 40, 64}, {7, 3, 16}, {9, 16, 13}};
constexpr double kRounding = 0x1p-8;

TEST_F(LinearGeluGpu, ForwardIsThatOfFloat64) {
  for (const DType dtype : {DType::bfloat16, DType::float32})
    for (const auto [rows, in, out] : kSizes)
      for (const bool with_bias : {false, true}) {
        const Tensor x = normal(1, {2, rows, in}, dtype, arena), w = normal(2, {out, in}, dtype, arena),
                     b = with_bias ? normal(3, {out}, dtype, arena) : Tensor();
        const BiasGelu made = linear_gelu(x, w, b), exact = linear_gelu(exactly(x), exactly(w), exactly(b));
        const double unit = dtype == DType::bfloat16 ? kRounding : 1e-6;
        EXPECT_EQ(made.y.shape(), (Shape{2, rows, out}));
        expect_near(made.h, exact.h, unit, unit, "h");  // apart, the product is rounded before the bias comes
        expect_near(made.y, exact.y, 2 * unit, unit, "y");
      }
}

TEST_F(LinearGeluGpu, BackwardIsThatOfFloat64) {
  for (const DType dtype : {DType::bfloat16, DType::float32})
    for (const auto [rows, in, out] : kSizes)
      for (const bool with_bias : {false, true}) {
        const Tensor dy = normal(4, {2, rows, in}, dtype, arena), w = normal(5, {in, out}, dtype, arena),
                     h = normal(6, {2, rows, out}, dtype, arena);
        Tensor dbias = h.make({out}, DType::float32), exact_bias = exactly(h).make({out}, DType::float64);
        const int64_t before = arena->local<KernelLog>().gelu_gradient.fused;
        const Tensor dh = linear_input_grad_gelu(dy, w, h, with_bias ? &dbias : nullptr),
                     exact = linear_input_grad_gelu(exactly(dy), exactly(w), exactly(h), &exact_bias);
        const double unit = dtype == DType::bfloat16 ? kRounding : 1e-6;
        expect_near(dh, exact, 2 * unit, unit, "dh");
        EXPECT_EQ(dbias.defined(), !with_bias || arena->local<KernelLog>().gelu_gradient.fused == before);
        if (!with_bias || !dbias.defined()) continue;  // the gradient of the weight brings it along
        Tensor sums = h.make({out}, DType::float32);
        sum_rows(sums, dh);  // sums dh as it was rounded
        expect_near(dbias, sums, 1e-5, 1e-5, "dbias");
      }
}

TEST_F(LinearGeluGpu, AWeightsGradientBringsItsBiasAlong) {
  int brought = 0;
  for (const DType grads : {DType::float32, DType::bfloat16})
    for (const auto [rows, in, out] : kSizes) {
      const Tensor dy = normal(7, {2, rows, out}, DType::bfloat16, arena),
                   x = normal(8, {2, rows, in}, DType::bfloat16, arena);
      Tensor dw = dy.make({out, in}, grads), alone = dw.make(dw.shape(), grads), db = dy.make({out}, grads);
      const Tensor sums = linear_weight_grad_and_sums(dw, dy, x);
      linear_weight_grad(alone, dy, x);
      sum_rows(db, dy);
      const double unit = grads == DType::bfloat16 ? kRounding : 1e-5;
      expect_near(dw, alone, unit, unit, "dw");
      if (!sums.defined()) continue;
      ++brought;
      expect_near(sums, db, unit, unit, "db");
    }
  EXPECT_TRUE(brought > 0 || !test::emulated());  // on a GPU the clock decides
}

// The elements of t with a stride between columns, or from an address that nothing is aligned to.
Tensor otherwise(const Tensor& t, bool strided) {
  if (strided && t.rank() == 2) {
    const Tensor view = t.make({t.dim(1), t.dim(0) + 3}).narrow(1, 2, t.dim(0)).transpose(0, 1);
    Tensor written = view;
    written.copy_from(t);
    return view;
  }
  Tensor view = t.make({t.numel() + 1}).narrow(0, 1, t.numel()).reshape(t.shape());
  view.copy_from(t);
  return view;
}

TEST_F(LinearGeluGpu, StridesAndPlacesChangeNoBit) {
  for (const auto [rows, in, out] : kSizes) {
    const Tensor x = normal(1, {rows, in}, DType::bfloat16, arena), w = normal(2, {out, in}, x.dtype(), arena),
                 b = normal(3, {out}, x.dtype(), arena), dy = normal(4, {rows, out}, x.dtype(), arena),
                 h = normal(5, {rows, in}, x.dtype(), arena);
    const auto all = [&](const auto& lay) {
      const BiasGelu forward = linear_gelu(lay(x), lay(w), lay(b));
      Tensor dw = lay(w.to(DType::float32)), product = lay(dw.make(dy.shape()));
      const Tensor sums = linear_weight_grad_and_sums(dw, lay(dy), lay(x)),
                   dh = linear_input_grad_gelu(lay(dy), lay(w), lay(h), nullptr);
      linear_into(product, lay(x).to(DType::float32), lay(w).to(DType::float32), {});
      std::vector<Tensor> made{forward.h, forward.y, dh, dw, product};
      if (sums.defined()) made.push_back(sums);
      return made;
    };
    const std::vector<Tensor> expected = all([](const Tensor& t) { return t.clone(); });
    // The float32 elements here are written too, and the rows of that run on.
    for (const std::vector<Tensor>& found :
         {all([](const Tensor& t) { return otherwise(t, false); }), all([](const Tensor& t) {
            return t.dtype() == DType::float32 ? otherwise(t, false) : otherwise(t, true);
          })}) {
      ASSERT_EQ(found.size(), expected.size());
      for (size_t i = 0; i < found.size(); ++i) EXPECT_EQ(numbers(found[i]), numbers(expected[i])) << i << " " << out;
    }
  }
}

// Whether the three are made in one product at all: on a GPU by the clock, on the emulated one always, and never where
// that is not allowed.
TEST_F(LinearGeluGpu, OneProductOnlyWhereItMayBe) {
  if constexpr (kWithCuda) {
    const auto tries = [&](DType dtype, int64_t out) {
      const Tensor a = normal(1, {32, 16}, dtype, arena), b = normal(2, {16, out}, dtype, arena);
      const Tensor h = Tensor::zeros({32, out}, dtype, arena), y = a.make({32, out});
      return cuda::matmul_gelu(y, h, a, b, Tensor()) || cuda::matmul_gelu_gradient(y, a, b, h, Tensor());
    };
    EXPECT_FALSE(tries(DType::float32, 16));
    EXPECT_FALSE(tries(DType::float64, 16));
    EXPECT_FALSE(tries(DType::bfloat16, 12));
    const KernelLog& log = arena->local<KernelLog>();
    EXPECT_EQ(log.gelu.fused + log.gelu_gradient.fused, 0);
    EXPECT_EQ(log.gelu.apart, 3);
    EXPECT_EQ(log.gelu_gradient.apart, 3);
    const bool first = tries(DType::bfloat16, 16);
    EXPECT_EQ(log.gelu.fused + log.gelu_gradient.fused, first ? 1 : 0);
    EXPECT_TRUE(first || !test::emulated());
    EXPECT_EQ(tries(DType::bfloat16, 16), first) << "one choice for good";
    arena->local<KernelChoice>().deterministic = true;
    EXPECT_FALSE(tries(DType::bfloat16, 16));
  }
}

}  // namespace
}  // namespace tessera
