// Products on the processor's tiles against a plain sum, over shapes with and without remainders, for each operand both
// storage orders, and numbers of threads. Skipped where the processor has no tiles.
#include <gtest/gtest.h>

#include <cstring>

#include "tensor/ops/matmul/cpu/products.h"
#include "tensor/random.h"

namespace tessera {
namespace {

struct Case {
  int64_t m, n, k;
  bool a_turned, b_turned, wide, bias;
};

class AmxMatmul : public testing::Test {
 protected:
  void SetUp() override {
    const Tensor whole = Tensor::zeros({64, 64}, DType::bfloat16, arena_);
    if (!cpu::amx_takes(whole, whole)) GTEST_SKIP() << "this processor has no AMX tiles, or TESSERA_AMX=0";
  }
  ~AmxMatmul() override { cpu::set_threads(threads_); }

  // (rows, cols), stored by columns when `turned`.
  Tensor random(int64_t rows, int64_t cols, bool turned, uint64_t seed) {
    Tensor t = Tensor::empty(turned ? Shape{cols, rows} : Shape{rows, cols}, DType::bfloat16, arena_);
    const Philox numbers = Philox::named(seed, "amx");
    for (int64_t i = 0; i < t.numel(); ++i)
      t.data<bfloat16>()[i] = bfloat16(2 * numbers.uniform(static_cast<uint64_t>(i)) - 1);
    return turned ? t.transpose(0, 1) : t;
  }

  ArenaPtr arena_ = make_arena();
  int threads_ = cpu::threads();
};

float at(const Tensor& t, int64_t i, int64_t j) {
  return static_cast<float>(t.data<bfloat16>()[i * t.strides()[0] + j * t.strides()[1]]);
}

void expect_product(const Tensor& out, const Tensor& a, const Tensor& b, const Tensor& bias) {
  const std::vector<float> found = out.to(DType::float32).to_vector<float>();
  const int64_t n = out.dim(1), k = a.dim(1);
  const double unit = out.dtype() == DType::float32 ? 1e-6 : 1.0 / 256;
  for (int64_t i = 0; i < out.dim(0); ++i)
    for (int64_t j = 0; j < n; ++j) {
      double sum = bias.defined() ? static_cast<double>(static_cast<float>(bias.data<bfloat16>()[j])) : 0;
      for (int64_t p = 0; p < k; ++p) sum += static_cast<double>(at(a, i, p)) * static_cast<double>(at(b, p, j));
      const double bound = unit * std::abs(sum) + 2e-6 * static_cast<double>(k);
      ASSERT_NEAR(static_cast<double>(found[static_cast<size_t>(i * n + j)]), sum, bound) << i << ", " << j;
    }
}

TEST_F(AmxMatmul, IsTheProductForEveryShapeAndOrder) {
  const Philox random_shape = Philox::named(3, "shapes");
  for (uint64_t round = 0; round < 40; ++round) {
    const auto draw = [&](uint64_t low, uint64_t high, uint64_t step) {
      return static_cast<int64_t>(low + random_shape.below(high - low + 1, round, step));
    };
    const Case c{draw(32, 150, 0),   draw(16, 150, 1),   round % 5 == 0 ? draw(1000, 2100, 2) : draw(16, 200, 2),
                 draw(0, 1, 3) == 1, draw(0, 1, 4) == 1, draw(0, 1, 5) == 1,
                 draw(0, 1, 6) == 1};
    SCOPED_TRACE(testing::Message() << "(" << c.m << ", " << c.k << ") x (" << c.k << ", " << c.n << ") round "
                                    << round);
    const Tensor a = random(c.m, c.k, c.a_turned, 2 * round), b = random(c.k, c.n, c.b_turned, 2 * round + 1);
    const Tensor bias = c.bias ? random(1, c.n, false, 99).reshape({c.n}) : Tensor();
    std::vector<std::vector<float>> results;
    for (const int team : {1, 2, 3}) {
      cpu::set_threads(team);
      Tensor out = Tensor::empty({c.m, c.n}, c.wide ? DType::float32 : DType::bfloat16, arena_);
      cpu::amx_matmul(out, a, b, bias, nullptr);
      if (team == 1) expect_product(out, a, b, bias);
      results.push_back(out.to(DType::float32).to_vector<float>());
    }
    EXPECT_EQ(results[0], results[1]) << "one thread and two";
    EXPECT_EQ(results[0], results[2]) << "one thread and three";
  }
}

TEST_F(AmxMatmul, PacksAgainOnlyWhenTheWeightChanges) {
  const Tensor a = random(64, 96, false, 1);
  Tensor w = random(48, 96, false, 2);
  cpu::Packed packed;
  Tensor out = Tensor::empty({64, 48}, DType::bfloat16, arena_);
  cpu::amx_matmul(out, a, w.transpose(0, 1), {}, &packed);
  expect_product(out, a, w.transpose(0, 1), {});
  const Tensor before = w.clone();
  w.fill(0.5);
  cpu::amx_matmul(out, a, w.transpose(0, 1), {}, &packed);
  expect_product(out, a, before.transpose(0, 1), {});  // nobody said that it changed
  ++w.storage()->version;
  cpu::amx_matmul(out, a, w.transpose(0, 1), {}, &packed);
  expect_product(out, a, w.transpose(0, 1), {});
}

TEST_F(AmxMatmul, WritesOnlyItsRowsAndColumns) {
  const Tensor a = random(33, 32, false, 1), b = random(32, 17, false, 2);
  Tensor whole = Tensor::empty({40, 40}, DType::bfloat16, arena_);
  whole.fill(7);
  Tensor out = whole.narrow(0, 2, 33).narrow(1, 0, 17);
  cpu::amx_matmul(out, a, b, {}, nullptr);
  const std::vector<float> all = whole.to(DType::float32).to_vector<float>();
  for (int64_t i = 0; i < 40; ++i)
    for (int64_t j = 0; j < 40; ++j)
      if (i < 2 || i >= 35 || j >= 17) {
        ASSERT_EQ(all[static_cast<size_t>(i * 40 + j)], 7) << i << ", " << j;
      }
}

}  // namespace
}  // namespace tessera
