// Products of few rows against a sum in float64, over random shapes, strides and dtypes, and their promise of equal
// bits.

#include "tensor/ops/elementwise.h"
#include "tensor/ops/matmul/cpu/products.h"
#include "tests/support/tensors.h"

namespace tessera {
namespace {

using cpu::InstructionSet;
using test::numbers;

class FewRows : public testing::Test {
 protected:
  ~FewRows() override { cpu::set_threads(threads_); }

  // (rows, cols), rows further apart than they are long.
  Tensor random(int64_t rows, int64_t cols, DType dtype, uint64_t seed) {
    const Tensor wide = Tensor::empty({rows, cols + 3}, DType::float32, arena_);
    const Philox random = Philox::named(seed, "few rows");
    for (int64_t i = 0; i < wide.numel(); ++i)
      wide.data<float>()[i] = static_cast<float>(2 * random.uniform(static_cast<uint64_t>(i)) - 1);
    return wide.to(dtype).narrow(1, 1, cols);
  }

  ArenaPtr arena_ = make_arena();
  int threads_ = cpu::threads();
};

void expect_product(const Tensor& out, const Tensor& a, const Tensor& w, const Tensor& bias) {
  const std::vector<double> y = numbers(out), x = numbers(a), v = numbers(w);
  const std::vector<double> added = bias.defined() ? numbers(bias) : std::vector<double>();
  const auto n = static_cast<size_t>(w.dim(0)), k = static_cast<size_t>(w.dim(1));
  const double unit = out.dtype() == DType::float32 ? 1e-6 : 1.0 / 256;
  for (size_t i = 0; i < y.size(); ++i) {
    double sum = added.empty() ? 0 : added[i % n], size = std::abs(sum);
    for (size_t p = 0; p < k; ++p) {
      const double term = x[i / n * k + p] * v[i % n * k + p];
      sum += term;
      size += std::abs(term);
    }
    ASSERT_NEAR(y[i], sum, unit * std::abs(sum) + 1e-6 * size) << "row " << i / n << ", column " << i % n;
  }
}

TEST_F(FewRows, AreThoseOfFloat64WithTheSameBitsHoweverTheyAreMade) {
  const Philox shapes = Philox::named(5, "shapes");
  for (uint64_t round = 0; round < 60; ++round) {
    const auto draw = [&](int64_t low, int64_t high, uint64_t step) {
      return low + static_cast<int64_t>(shapes.below(static_cast<uint64_t>(high - low + 1), round, step));
    };
    const int64_t m = draw(1, 8, 0), n = draw(1, 150, 1), k = round % 4 == 0 ? draw(1, 20, 2) : draw(16, 300, 2);
    const DType dtype = draw(0, 1, 3) ? DType::bfloat16 : DType::float32;
    const DType wanted = draw(0, 1, 4) ? dtype : DType::float32;
    SCOPED_TRACE(testing::Message() << "(" << m << ", " << k << ") x (" << k << ", " << n << ") round " << round);
    const Tensor a = random(m, k, dtype, 3 * round), w = random(n, k, dtype, 3 * round + 1);
    const Tensor bias = draw(0, 1, 5) ? random(1, n, wanted, 3 * round + 2).contiguous().reshape({n}) : Tensor();
    ASSERT_TRUE(cpu::few_rows_takes(a, w.transpose(0, 1)));
    Tensor first = Tensor::empty({m, n}, wanted, arena_);
    cpu::set_threads(1);
    cpu::few_rows_matmul(first, a, w.transpose(0, 1), bias);
    expect_product(first, a, w, bias);
    for (const auto isa : {InstructionSet::avx512, InstructionSet::avx2, InstructionSet::baseline})
      for (const int team : {1, 3}) {
        if (isa < cpu::instruction_set()) continue;  // better than this processor's
        cpu::set_threads(team);
        Tensor wide = Tensor::zeros({m + 1, n + 5}, wanted, arena_);
        wide.fill(7);
        Tensor again = wide.narrow(0, 0, m).narrow(1, 2, n);
        cpu::few_rows_matmul(again, a, w.transpose(0, 1), bias, isa);
        EXPECT_EQ(numbers(again), numbers(first)) << "instruction set " << static_cast<int>(isa) << ", " << team;
        again.fill(7);
        EXPECT_EQ(numbers(wide), std::vector<double>(static_cast<size_t>(wide.numel()), 7)) << "it wrote elsewhere";
      }
    const int64_t row = draw(0, m - 1, 6);
    Tensor alone = Tensor::empty({1, n}, wanted, arena_);
    cpu::few_rows_matmul(alone, a.narrow(0, row, 1), w.transpose(0, 1), bias);
    EXPECT_EQ(numbers(alone), numbers(first.narrow(0, row, 1))) << "a row by itself";
  }
}

}  // namespace
}  // namespace tessera
