// Products on a GPU beside sums in float64, over random shapes, layouts and dtypes; and the table of algorithms.
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <fstream>
#include <thread>

#include "tensor/kernels.h"
#include "tensor/ops/matmul/cuda/algorithm_table.h"
#include "tensor/ops/matmul/cuda/product.h"
#include "tensor/ops/matmul/matmul.h"
#include "tests/support/gpu.h"
#include "tests/support/tensors.h"

namespace tessera {
namespace {

using test::numbers;
using test::same_bits;
using ProductsGpu = test::OnGpu;

class Draw {
 public:
  explicit Draw(uint64_t trial) : random_(Philox::named(trial, "products")) {}
  int64_t below(int64_t n) { return static_cast<int64_t>(random_.below(static_cast<uint64_t>(n), at_++)); }
  template <class T>
  T one_of(const std::vector<T>& list) {
    return list[static_cast<size_t>(below(std::ssize(list)))];
  }
  template <class T>
  T one_of(std::initializer_list<T> list) {
    return list.begin()[below(static_cast<int64_t>(list.size()))];
  }
  // (rows, cols), or (batch, rows, cols) where batch is not 0, lying in memory in one of five ways.
  Tensor matrix(int64_t batch, int64_t rows, int64_t cols, DType dtype, const ArenaPtr& arena) {
    const Shape lead = batch ? Shape{batch} : Shape{};
    const auto make = [&](int64_t r, int64_t c) {
      Shape s = lead;
      s.push_back(r);
      s.push_back(c);
      return normal(s, dtype, arena);
    };
    const int row = batch ? 1 : 0;
    switch (below(5)) {
      case 0:
        return make(rows, cols);
      case 1:
        return make(cols, rows).transpose(-2, -1);
      case 2:
        return make(rows + 3, cols + 5).narrow(row, 1, rows).narrow(row + 1, 2, cols);
      case 3:
        return make(cols + 4, rows + 1).narrow(row, 2, cols).narrow(row + 1, 1, rows).transpose(-2, -1);
      default: {  // neither dim runs on
        Shape s = lead;
        for (const int64_t d : {rows, cols, int64_t{2}}) s.push_back(d);
        return normal(s, dtype, arena).select(row + 2, 1);
      }
    }
  }
  Tensor normal(const Shape& shape, DType dtype, const ArenaPtr& arena) {
    std::vector<double> v(static_cast<size_t>(shape.numel()));
    for (double& x : v) x = random_.normal(at_++);
    return Tensor::of<double>(v, shape, arena).to(dtype);
  }

 private:
  Philox random_;
  uint64_t at_ = 0;
};

// The largest error of out = a b + bias as a share of what rounding may do to its sum of magnitudes.
double excess(const Tensor& out, const Tensor& a, const Tensor& b, const Tensor& bias, double unit) {
  const int64_t m = out.dim(-2), n = out.dim(-1), k = a.dim(-1), batch = out.numel() / std::max<int64_t>(m * n, 1);
  const std::vector<double> y = numbers(out), x = numbers(a), w = numbers(b);
  const std::vector<double> plus = bias.defined() ? numbers(bias) : std::vector<double>(static_cast<size_t>(n), 0.0);
  const double rounding = out.dtype() == DType::bfloat16 ? 0x1p-8 : out.dtype() == DType::float32 ? 0x1p-23 : 0x1p-52;
  double most = 0;
  for (int64_t at = 0; at < batch * m * n; ++at) {
    const int64_t row = at / n, column = at % n, index = at / (m * n);
    double sum = plus[static_cast<size_t>(column)], magnitude = std::abs(sum);
    for (int64_t i = 0; i < k; ++i) {
      const double term = x[static_cast<size_t>(row * k + i)] * w[static_cast<size_t>((index * k + i) * n + column)];
      sum += term;
      magnitude += std::abs(term);
    }
    const double error = std::abs(y[static_cast<size_t>(at)] - sum);
    EXPECT_TRUE(std::isfinite(error));
    most =
        std::max(most, error / (magnitude * unit * std::sqrt(static_cast<double>(k) + 1) + std::abs(sum) * rounding));
  }
  return most;
}
double unit_of(DType dtype) { return dtype == DType::float64 ? 0x1p-52 : 0x1p-23; }

TEST_F(ProductsGpu, AreThoseOfFloat64) {
  for (uint64_t trial = 0; trial < 150; ++trial) {
    Draw draw(trial);
    const auto dtype = draw.one_of({DType::float64, DType::float32, DType::bfloat16});
    const auto size = [&] { return draw.one_of<int64_t>({1, 2, 7, 8, 16, 33, 64, 96}); };
    const int64_t m = size(), n = size(), k = size(), batch = draw.below(2) * draw.one_of<int64_t>({1, 3});
    const Tensor a = draw.matrix(batch, m, k, dtype, arena), b = draw.matrix(batch, k, n, dtype, arena);
    const Tensor out = matmul(a, b);
    EXPECT_EQ(out.device(), Device::cuda);
    EXPECT_EQ(out.dtype(), dtype);
    EXPECT_LE(excess(out, a, b, {}, unit_of(dtype)), 1) << "trial " << trial << " " << a.describe() << b.describe();
    EXPECT_TRUE(same_bits(matmul(a, b), out)) << "trial " << trial;
  }
}

TEST_F(ProductsGpu, WriteOnlyTheirRowsAndColumns) {
  for (uint64_t trial = 0; trial < 30; ++trial) {
    Draw draw(1000 + trial);
    const auto dtype = draw.one_of({DType::float32, DType::bfloat16});
    const int64_t m = 1 + draw.below(40), n = 1 + draw.below(40), k = 1 + draw.below(40);
    const Tensor a = draw.matrix(0, m, k, dtype, arena), b = draw.matrix(0, k, n, dtype, arena);
    Tensor whole = Tensor::empty({m + 3, n + 8}, draw.one_of({DType::float32, dtype}), arena);
    whole.fill(7);
    Tensor out = whole.narrow(0, 1, m).narrow(1, 4, n);
    matmul_into(out, a, b);
    EXPECT_LE(excess(out, a, b, {}, unit_of(dtype)), 1) << "trial " << trial;
    out.fill(7);
    for (const double x : numbers(whole)) ASSERT_EQ(x, 7) << "trial " << trial;
  }
}

TEST_F(ProductsGpu, LinearLayersForwardAndBackward) {
  for (uint64_t trial = 0; trial < 40; ++trial) {
    Draw draw(2000 + trial);
    const auto dtype = draw.one_of(test::floating(arena));
    const int64_t rows = 1 + draw.below(30), in = 1 + draw.below(40), out = 1 + draw.below(40);
    const Tensor x = draw.normal({2, rows, in}, dtype, arena), w = draw.normal({out, in}, dtype, arena);
    const Tensor bias = draw.below(2) ? draw.normal({out}, dtype, arena) : Tensor{};
    const Tensor dy = draw.normal({2, rows, out}, dtype, arena);
    WeightPacks packs;
    const double unit = unit_of(dtype);
    EXPECT_LE(excess(linear(x, w, bias, &packs).flat_rows(), x.flat_rows(), w.transpose(0, 1), bias, unit), 1);
    EXPECT_LE(excess(linear_input_grad(dy, w, &packs).flat_rows(), dy.flat_rows(), w, {}, unit), 1);
    Tensor dw = Tensor::empty(w.shape(), draw.one_of({dtype, dtype == DType::float64 ? dtype : DType::float32}), arena);
    linear_weight_grad(dw, dy, x);
    EXPECT_LE(excess(dw, dy.flat_rows().transpose(0, 1), x.flat_rows(), {}, unit), 1);
    EXPECT_TRUE(packs.packs.empty());
  }
}

TEST_F(ProductsGpu, OfNothingAreTheBias) {
  if constexpr (kWithCuda) {
    const Tensor a = Tensor::zeros({3, 0}, DType::float32, arena), b = Tensor::zeros({0, 2}, DType::float32, arena);
    Tensor bias = Tensor::zeros({2}, DType::float32, arena), out = Tensor::zeros({3, 2}, DType::float32, arena);
    bias.fill(4);
    cuda::matmul(out, a, b, bias);
    EXPECT_EQ(numbers(out), std::vector<double>(6, 4.0));
    matmul_into(out, a, b);
    EXPECT_EQ(numbers(out), std::vector<double>(6, 0.0));
  }
}

TEST_F(ProductsGpu, RanksHaveTheSameBits) {
  Draw draw(1);
  const Tensor a = draw.normal({70, 200}, DType::bfloat16, make_arena()),
               b = draw.normal({200, 90}, a.dtype(), a.arena());
  const Tensor first = matmul(a.to(arena), b.to(arena));
  for (int rank = 0; rank < 3; ++rank)
    std::thread([&] {
      const ArenaPtr own = make_arena(Device::cuda);
      EXPECT_TRUE(same_bits(matmul(a.to(own), b.to(own)), first));
    }).join();
}

// The products have a size at which a GPU is faster with rounded factors: small products round none, allowed or not.
TEST_F(ProductsGpu, RoundTheirFactorsOnlyWhenTf32IsAllowed) {
  Draw draw(2);
  const Tensor a = draw.normal({128, 1024}, DType::float32, arena),
               b = draw.normal({1024, 1024}, DType::float32, arena);
  EXPECT_LE(excess(matmul(a, b), a, b, {}, 0x1p-23), 1);
  arena->local<cuda::Tf32>().allowed = true;
  const Tensor rounded = matmul(a, b);
  EXPECT_GT(excess(rounded, a, b, {}, 0x1p-23), 1);
  EXPECT_LE(excess(rounded, a, b, {}, 0x1p-10), 1);
  arena->local<cuda::Tf32>().allowed = false;
  EXPECT_LE(excess(matmul(a, b), a, b, {}, 0x1p-23), 1);
}

// A library that knows only rows that begin at multiples of 16 bytes, which the emulated one is told to be.
TEST_F(ProductsGpu, WithoutAnAlgorithmGoThroughPaddedCopies) {
  if constexpr (kWithCuda) {
    setenv("TESSERA_EMULATED_ALIGNMENT", "16", 1);
    const auto& log = arena->local<KernelLog>();
    for (uint64_t trial = 0; trial < 60; ++trial) {
      Draw draw(3000 + trial);
      const auto dtype = draw.one_of(test::floating(arena));
      const int64_t m = 1 + draw.below(40), n = 1 + draw.below(70), k = 1 + draw.below(40);
      const int64_t batch = draw.below(2) * draw.one_of<int64_t>({1, 3});
      const Tensor a = draw.matrix(batch, m, k, dtype, arena), b = draw.matrix(batch, k, n, dtype, arena);
      const Tensor bias = !batch && draw.below(2) ? draw.normal({n}, dtype, arena) : Tensor{};
      const int64_t before = log.padded_products;
      Tensor out = a.make(batch ? Shape{batch, m, n} : Shape{m, n});
      cuda::matmul(out, a, b, bias);
      EXPECT_LE(excess(out, a, b, bias, unit_of(dtype)), 1) << "trial " << trial << " " << a.describe();
      if (n * size_of(dtype) % 16 != 0) {
        EXPECT_EQ(log.padded_products, before + (test::emulated() ? 1 : 0)) << n;
      }
    }
    const Tensor odd = Draw(1).normal({8, 65}, DType::bfloat16, arena),
                 w = Draw(2).normal({65, 65}, odd.dtype(), arena);
    EXPECT_EQ(cuda::matmul_gelu(odd.make({8, 65}), odd.make({8, 65}), odd, w, {}), false);
    unsetenv("TESSERA_EMULATED_ALIGNMENT");
  }
}

TEST_F(ProductsGpu, RefuseOperandsElsewhere) {
  const Tensor here = Tensor::zeros({4, 4}, DType::float32, make_arena()), there = here.to(arena);
  EXPECT_THROW(matmul(there, here), Error);
  Tensor down = Tensor::zeros({4, 4}, DType::float32, arena).transpose(0, 1);
  EXPECT_THROW(matmul_into(down, there, there), Error);
}

class AlgorithmTables : public testing::Test {
 protected:
  void SetUp() override {
    if (!kWithCuda) GTEST_SKIP() << "a build without CUDA";
    directory_ = std::filesystem::path(testing::TempDir()) / ("algorithms_" + std::to_string(::getpid()));
    std::filesystem::remove_all(directory_);
  }
  void TearDown() override { std::filesystem::remove_all(directory_); }
  std::filesystem::path file() const { return directory_ / "A-GPU-1.algorithms"; }
  std::filesystem::path directory_;
};

TEST_F(AlgorithmTables, TheFirstChoiceStands) {
  if constexpr (kWithCuda) {
    cuda::AlgorithmTable first("A GPU/1"), second("A GPU/1"), alone("A GPU/1");
    first.keep_in(directory_);
    second.keep_in(directory_);
    const auto never = []() -> std::string { throw Error("chosen again"); };
    EXPECT_EQ(first.find_or("1 2", [] { return "x"; }), "x");
    EXPECT_EQ(second.find_or("1 2", never), "x");
    EXPECT_EQ(second.find_or("3", [] { return "y z"; }), "y z");
    EXPECT_EQ(first.find_or("3", never), "y z");
    EXPECT_EQ(alone.find_or("3", [] { return "w"; }), "w");
    EXPECT_EQ(alone.find_or_keep("3", "v"), "w");
    EXPECT_EQ(alone.find_or_keep("4", "v"), "v");
    EXPECT_EQ(alone.find_or("4", never), "v");
  }
}

TEST_F(AlgorithmTables, OneChoosesWhileOthersWait) {
  if constexpr (kWithCuda) {
    std::atomic<int> choices = 0;
    std::vector<std::thread> threads;
    for (int i = 0; i < 4; ++i)
      threads.emplace_back([&, i] {
        cuda::AlgorithmTable own("A GPU/1");
        own.keep_in(directory_);
        for (int key = 0; key < 20; ++key)
          EXPECT_EQ(own.find_or(std::to_string((key + 5 * i) % 20),
                                [&] {
                                  ++choices;
                                  return "chosen";
                                }),
                    "chosen");
      });
    for (std::thread& t : threads) t.join();
    EXPECT_EQ(choices, 20);
  }
}

TEST_F(AlgorithmTables, WhatIsNoTableIsRefused) {
  if constexpr (kWithCuda) {
    cuda::AlgorithmTable table("A GPU/1");
    table.keep_in(directory_);
    table.find_or("1", [] { return "x"; });
    for (const char* text : {"", "something else\n", "half of a li"}) {
      std::ofstream(file()) << text;
      EXPECT_THROW(table.find_or("2", [] { return "x"; }), InputError) << text;
    }
    std::filesystem::remove(file());
    EXPECT_EQ(table.find_or("2", [] { return "x"; }), "x");
    std::ofstream(file(), std::ios::app) << "no colon\n";
    try {
      table.find_or("3", [] { return "x"; });
      ADD_FAILURE() << "nothing was thrown";
    } catch (const InputError& e) {
      EXPECT_NE(std::string(e.what()).find("line 4: 'no colon'; expected a table"), std::string::npos) << e.what();
    }
  }
}

}  // namespace
}  // namespace tessera
