// GPU matmuls against float64 sums, for random shapes, layouts and dtypes; the algorithm table; and matmuls fused with
// GELU, its gradient or a bias gradient.
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <initializer_list>
#include <string>
#include <thread>
#include <vector>

#include "tensor/kernels.h"
#include "tensor/ops/activations.h"
#include "tensor/ops/matmul/cuda/algorithm_table.h"
#include "tensor/ops/matmul/cuda/gemm.h"
#include "tensor/ops/reduce.h"
#include "tests/support/errors.h"
#include "tests/support/gpu.h"
#include "tests/support/tensors.h"

namespace tessera {
namespace {

using namespace test;

using MatmulGpu = test::OnGpu;

class Sampler {
 public:
  explicit Sampler(uint64_t trial) : random_(Philox::named(trial, "products")) {}
  int64_t below(int64_t n) { return static_cast<int64_t>(random_.below(static_cast<uint64_t>(n), at_++)); }
  template <class T>
  T choose(const std::vector<T>& list) {
    return list[static_cast<size_t>(below(std::ssize(list)))];
  }
  // (rows, cols), or (batch, rows, cols) if batch is not 0, in one of five layouts.
  Tensor matrix(int64_t batch, int64_t rows, int64_t cols, DType dtype, const ArenaPtr& arena) {
    const auto make = [&](std::initializer_list<int64_t> dims) {
      Shape s = batch ? Shape{batch} : Shape{};
      for (const int64_t d : dims) s.push_back(d);
      return normal(s, dtype, arena);
    };
    const int row = batch ? 1 : 0;
    switch (below(5)) {
      case 0:
        return make({rows, cols});
      case 1:
        return make({cols, rows}).transpose(-2, -1);
      case 2:
        return make({rows + 3, cols + 5}).narrow(row, 1, rows).narrow(row + 1, 2, cols);
      case 3:
        return make({cols + 4, rows + 1}).narrow(row, 2, cols).narrow(row + 1, 1, rows).transpose(-2, -1);
      default:  // neither dim contiguous
        return make({rows, cols, 2}).select(row + 2, 1);
    }
  }
  Tensor normal(const Shape& shape, DType dtype, const ArenaPtr& arena) {
    return made(shape, dtype, arena, [&](size_t) { return random_.normal(at_++); });
  }

 private:
  Philox random_;
  uint64_t at_ = 0;
};

// `max_error`: the maximum error of out = a b + bias, relative to the rounding bound of the sum of magnitudes.
// `rounded_first`: the error of an algorithm that rounds the matmul before adding the bias, which none may do.
struct Excess {
  double max_error = 0, rounded_first = 0;
  friend bool operator<=(const Excess& e, double limit) { return e.max_error <= limit; }
  friend bool operator>(const Excess& e, double limit) { return e.max_error > limit; }
  friend std::ostream& operator<<(std::ostream& to, const Excess& e) {
    return to << e.max_error << " (" << e.rounded_first << " if rounded before the bias is added)";
  }
};
Excess excess(const Tensor& out, const Tensor& a, const Tensor& b, const Tensor& bias, double unit) {
  const int64_t m = out.dim(-2), n = out.dim(-1), k = a.dim(-1), batch = out.numel() / std::max<int64_t>(m * n, 1);
  const std::vector<double> y = host_values(out), x = host_values(a), w = host_values(b);
  const std::vector<double> plus =
      bias.defined() ? host_values(bias) : std::vector<double>(static_cast<size_t>(n), 0.0);
  const double rounding = out.dtype() == DType::bfloat16 ? 0x1p-8 : out.dtype() == DType::float32 ? 0x1p-23 : 0x1p-52;
  Excess found;
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
    const double once = magnitude * unit * std::sqrt(static_cast<double>(k) + 1) + std::abs(sum) * rounding;
    const double first = std::abs(sum - plus[static_cast<size_t>(column)]) * rounding;
    found = {std::max(found.max_error, error / once), std::max(found.rounded_first, error / (once + first))};
  }
  return found;
}
double unit_roundoff(DType dtype) { return dtype == DType::float64 ? 0x1p-52 : 0x1p-23; }

TEST_F(MatmulGpu, MatchesFloat64) {
  for (uint64_t trial = 0; trial < 150; ++trial) {
    Sampler sample(trial);
    const auto dtype = sample.choose<DType>({DType::float64, DType::float32, DType::bfloat16});
    const auto size = [&] { return sample.choose<int64_t>({1, 2, 7, 8, 16, 33, 64, 96}); };
    const int64_t m = size(), n = size(), k = size(), batch = sample.below(2) * sample.choose<int64_t>({1, 3});
    const Tensor a = sample.matrix(batch, m, k, dtype, arena), b = sample.matrix(batch, k, n, dtype, arena);
    const Tensor out = matmul(a, b);
    EXPECT_EQ(out.device(), Device::cuda);
    EXPECT_EQ(out.dtype(), dtype);
    EXPECT_LE(excess(out, a, b, {}, unit_roundoff(dtype)), 1)
        << "trial " << trial << " " << a.describe() << b.describe();
    EXPECT_TRUE(bitwise_equal(matmul(a, b), out)) << "trial " << trial;
  }
}

TEST_F(MatmulGpu, WritesOnlyItsRowsAndColumns) {
  for (uint64_t trial = 0; trial < 30; ++trial) {
    Sampler sample(1000 + trial);
    const auto dtype = sample.choose<DType>({DType::float32, DType::bfloat16});
    const int64_t m = 1 + sample.below(40), n = 1 + sample.below(40), k = 1 + sample.below(40);
    const Tensor a = sample.matrix(0, m, k, dtype, arena), b = sample.matrix(0, k, n, dtype, arena);
    Tensor full = Tensor::empty({m + 3, n + 8}, sample.choose<DType>({DType::float32, dtype}), arena);
    full.fill(7);
    Tensor out = full.narrow(0, 1, m).narrow(1, 4, n);
    matmul_into(out, a, b);
    EXPECT_LE(excess(out, a, b, {}, unit_roundoff(dtype)), 1) << "trial " << trial;
    out.fill(7);
    for (const double x : host_values(full)) ASSERT_EQ(x, 7) << "trial " << trial;
  }
}

TEST_F(MatmulGpu, LinearLayersMatchFloat64ForwardAndBackward) {
  for (uint64_t trial = 0; trial < 40; ++trial) {
    Sampler sample(2000 + trial);
    const auto dtype = sample.choose(test::floating(arena));
    const int64_t rows = 1 + sample.below(30), in = 1 + sample.below(40), out = 1 + sample.below(40);
    const Tensor x = sample.normal({2, rows, in}, dtype, arena), w = sample.normal({out, in}, dtype, arena);
    const Tensor bias = sample.below(2) ? sample.normal({out}, dtype, arena) : Tensor{};
    const Tensor dy = sample.normal({2, rows, out}, dtype, arena);
    SCOPED_TRACE("trial " + std::to_string(trial) + ", x " + x.describe() + ", w " + w.describe() +
                 (bias.defined() ? ", with a bias" : ""));
    PackedWeights packs;
    const double unit = unit_roundoff(dtype);
    EXPECT_LE(excess(linear(x, w, bias, &packs).flat_rows(), x.flat_rows(), w.transpose(0, 1), bias, unit), 1);
    EXPECT_LE(excess(linear_input_grad(dy, w, &packs).flat_rows(), dy.flat_rows(), w, {}, unit), 1);
    Tensor dw = Tensor::empty(w.shape(), sample.choose<DType>({dtype, accum_dtype(dtype)}), arena);
    linear_weight_grad(dw, dy, x);
    EXPECT_LE(excess(dw, dy.flat_rows().transpose(0, 1), x.flat_rows(), {}, unit), 1);
    EXPECT_TRUE(packs.packs.empty());
  }
}

TEST_F(MatmulGpu, EmptyInnerDimReturnsBias) {
  if constexpr (kWithCuda) {
    const Tensor a = Tensor::zeros({3, 0}, DType::float32, arena), b = Tensor::zeros({0, 2}, DType::float32, arena);
    Tensor bias = Tensor::zeros({2}, DType::float32, arena), out = Tensor::zeros({3, 2}, DType::float32, arena);
    bias.fill(4);
    cuda::matmul(out, a, b, bias);
    EXPECT_EQ(host_values(out), std::vector<double>(6, 4.0));
    matmul_into(out, a, b);
    EXPECT_EQ(host_values(out), std::vector<double>(6, 0.0));
  }
}

TEST_F(MatmulGpu, ResultsAreBitwiseIdenticalOnAllRanks) {
  Sampler sample(1);
  const Tensor a = sample.normal({70, 200}, DType::bfloat16, make_arena()),
               b = sample.normal({200, 90}, a.dtype(), a.arena());
  const Tensor first = matmul(a.to(arena), b.to(arena));
  for (int rank = 0; rank < 3; ++rank)
    std::thread([&] {
      const ArenaPtr own = make_arena(Device::cuda);
      EXPECT_TRUE(bitwise_equal(matmul(a.to(own), b.to(own)), first));
    }).join();
}

// At this size a GPU is faster with rounded operands; operands of small matmuls are never rounded, even if allowed.
TEST_F(MatmulGpu, RoundsOperandsOnlyIfTf32IsAllowed) {
  Sampler sample(2);
  const Tensor a = sample.normal({128, 1024}, DType::float32, arena),
               b = sample.normal({1024, 1024}, DType::float32, arena);
  EXPECT_LE(excess(matmul(a, b), a, b, {}, 0x1p-23), 1);
  arena->local<cuda::Tf32>().allowed = true;
  const Tensor rounded = matmul(a, b);
  EXPECT_GT(excess(rounded, a, b, {}, 0x1p-23), 1);
  EXPECT_LE(excess(rounded, a, b, {}, 0x1p-10), 1);
  arena->local<cuda::Tf32>().allowed = false;
  EXPECT_LE(excess(matmul(a, b), a, b, {}, 0x1p-23), 1);
}

// The emulated library is configured to support only rows aligned to 16 bytes.
TEST_F(MatmulGpu, PadsOperandsIfNoAlgorithmExists) {
  if constexpr (kWithCuda) {
    setenv("TESSERA_EMULATED_ALIGNMENT", "16", 1);
    const auto& log = arena->local<KernelLog>();
    for (uint64_t trial = 0; trial < 60; ++trial) {
      Sampler sample(3000 + trial);
      const auto dtype = sample.choose(test::floating(arena));
      const int64_t m = 1 + sample.below(40), n = 1 + sample.below(70), k = 1 + sample.below(40);
      const int64_t batch = sample.below(2) * sample.choose<int64_t>({1, 3});
      const Tensor a = sample.matrix(batch, m, k, dtype, arena), b = sample.matrix(batch, k, n, dtype, arena);
      const Tensor bias = !batch && sample.below(2) ? sample.normal({n}, dtype, arena) : Tensor{};
      const int64_t before = log.padded_products;
      Tensor out = a.make(batch ? Shape{batch, m, n} : Shape{m, n});
      cuda::matmul(out, a, b, bias);
      EXPECT_LE(excess(out, a, b, bias, unit_roundoff(dtype)), 1)
          << "trial " << trial << " " << a.describe() << b.describe() << (bias.defined() ? ", with a bias" : "");
      if (n * element_size(dtype) % 16 != 0) {
        EXPECT_EQ(log.padded_products, before + (test::emulated() ? 1 : 0)) << n;
      }
    }
    const Tensor odd = Sampler(1).normal({8, 65}, DType::bfloat16, arena),
                 w = Sampler(2).normal({65, 65}, odd.dtype(), arena);
    EXPECT_EQ(cuda::matmul_gelu(odd.make({8, 65}), odd.make({8, 65}), odd, w, {}), false);
    unsetenv("TESSERA_EMULATED_ALIGNMENT");
  }
}

TEST_F(MatmulGpu, RejectsOperandsOnDifferentDevices) {
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

TEST_F(AlgorithmTables, FirstChoiceIsFinal) {
  if constexpr (kWithCuda) {
    cuda::AlgorithmTable first("A GPU/1"), second("A GPU/1"), alone("A GPU/1");
    first.set_directory(directory_);
    second.set_directory(directory_);
    const auto never = []() -> std::string { throw Error("chosen again"); };
    EXPECT_EQ(first.find_or("1 2", [] { return "x"; }), "x");
    EXPECT_EQ(second.find_or("1 2", never), "x");
    EXPECT_EQ(second.find_or("3", [] { return "y z"; }), "y z");
    EXPECT_EQ(first.find_or("3", never), "y z");
    EXPECT_EQ(alone.find_or("3", [] { return "w"; }), "w");
    EXPECT_EQ(alone.find_or_insert("3", "v"), "w");
    EXPECT_EQ(alone.find_or_insert("4", "v"), "v");
    EXPECT_EQ(alone.find_or("4", never), "v");
  }
}

TEST_F(AlgorithmTables, OneCallerChoosesWhileOthersWait) {
  if constexpr (kWithCuda) {
    std::atomic<int> choices = 0;
    const auto choose = [&] {
      ++choices;
      return "chosen";
    };
    std::vector<std::thread> threads;
    for (int i = 0; i < 4; ++i)
      threads.emplace_back([&, i] {
        cuda::AlgorithmTable own("A GPU/1");
        own.set_directory(directory_);
        for (int key = 0; key < 20; ++key) EXPECT_EQ(own.find_or(std::to_string((key + 5 * i) % 20), choose), "chosen");
      });
    for (std::thread& t : threads) t.join();
    EXPECT_EQ(choices, 20);
  }
}

TEST_F(AlgorithmTables, RejectsInvalidFiles) {
  if constexpr (kWithCuda) {
    cuda::AlgorithmTable table("A GPU/1");
    table.set_directory(directory_);
    table.find_or("1", [] { return "x"; });
    for (const char* text : {"", "something else\n", "half of a li"}) {
      std::ofstream(file()) << text;
      EXPECT_THROW(table.find_or("2", [] { return "x"; }), InputError) << text;
    }
    std::filesystem::remove(file());
    EXPECT_EQ(table.find_or("2", [] { return "x"; }), "x");
    std::ofstream(file(), std::ios::app) << "no colon\n";
    expect_error(Status::input, {"line 4: 'no colon'; expected an algorithm table"},
                 [&] { table.find_or("3", [] { return "x"; }); });
  }
}

// Matmuls fused with GELU, its gradient or a bias gradient, compared with float64 and with the separate passes.

using LinearGeluGpu = test::OnGpu;

Tensor normal(uint64_t seed, const Shape& shape, DType dtype, const ArenaPtr& arena) {
  return test::normal(shape, dtype, seed, "linear gelu", arena);
}

// Exact reference: the same values in float64 on the host.
Tensor exactly(const Tensor& t) { return t.defined() ? t.on_host().to(DType::float64) : Tensor(); }

// Checks that each element differs from `exact` by at most `part` of its magnitude plus `rest` of the largest
// magnitude.
void expect_near(const Tensor& found, const Tensor& exact, double part, double rest, const std::string& what) {
  const std::vector<double> a = host_values(found), b = host_values(exact);
  ASSERT_EQ(a.size(), b.size()) << what;
  double largest = 0;
  for (const double x : b) largest = std::max(largest, std::abs(x));
  for (size_t i = 0; i < a.size(); ++i)
    ASSERT_LE(std::abs(a[i] - b[i]), part * std::abs(b[i]) + rest * largest) << what << ", element " << i;
}

struct Sizes {
  int64_t rows, in, out;
};
// The library cannot fuse the last size with its GELU: the row length of h is not a multiple of 8.
constexpr Sizes kSizes[] = {{5, 16, 24}, {64, 8, 8}, {33, 40, 64}, {7, 3, 16}, {9, 16, 13}};
constexpr double kRounding = 0x1p-8;

TEST_F(LinearGeluGpu, ForwardAndBackwardMatchFloat64) {
  for (const DType dtype : {DType::bfloat16, DType::float32})
    for (const auto [rows, in, out] : kSizes)
      for (const bool with_bias : {false, true}) {
        const double unit = dtype == DType::bfloat16 ? kRounding : 1e-6;
        const Tensor x = normal(1, {2, rows, in}, dtype, arena), up = normal(2, {out, in}, dtype, arena),
                     b = with_bias ? normal(3, {out}, dtype, arena) : Tensor();
        const Activated forward = linear_gelu(x, up, b), wanted = linear_gelu(exactly(x), exactly(up), exactly(b));
        EXPECT_EQ(forward.y.shape(), (Shape{2, rows, out}));
        expect_near(forward.h, wanted.h, unit, unit, "h");  // separate passes round the matmul before adding the bias
        expect_near(forward.y, wanted.y, 2 * unit, unit, "y");
        const Tensor dy = normal(4, {2, rows, in}, dtype, arena), w = normal(5, {in, out}, dtype, arena),
                     h = normal(6, {2, rows, out}, dtype, arena);
        Tensor dbias = h.make({out}, DType::float32), exact_bias = exactly(h).make({out}, DType::float64);
        const int64_t before = arena->local<KernelLog>().gelu_gradient.fused;
        const Tensor dh = linear_input_grad_gelu(dy, w, h, with_bias ? &dbias : nullptr),
                     exact = linear_input_grad_gelu(exactly(dy), exactly(w), exactly(h), &exact_bias);
        expect_near(dh, exact, 2 * unit, unit, "dh");
        EXPECT_EQ(dbias.defined(), !with_bias || arena->local<KernelLog>().gelu_gradient.fused == before);
        if (!with_bias || !dbias.defined()) continue;  // computed with the weight gradient
        Tensor sums = h.make({out}, DType::float32);
        sum_rows(sums, dh);  // sums of the rounded dh
        expect_near(dbias, sums, 1e-5, 1e-5, "dbias");
      }
}

TEST_F(LinearGeluGpu, WeightGradientIncludesBiasGradient) {
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
  EXPECT_TRUE(brought > 0 || !test::emulated());  // on a GPU timing decides
}

// The elements of t with strided columns, or at an unaligned address.
Tensor otherwise(const Tensor& t, bool strided) {
  Tensor view = strided && t.ndim() == 2 ? t.make({t.dim(1), t.dim(0) + 3}).narrow(1, 2, t.dim(0)).transpose(0, 1)
                                         : t.make({t.numel() + 1}).narrow(0, 1, t.numel()).reshape(t.shape());
  view.copy_from(t);
  return view;
}

TEST_F(LinearGeluGpu, ResultsAreBitwiseIndependentOfStridesAndAddresses) {
  for (const auto [rows, in, out] : kSizes) {
    const Tensor x = normal(1, {rows, in}, DType::bfloat16, arena), w = normal(2, {out, in}, x.dtype(), arena),
                 b = normal(3, {out}, x.dtype(), arena), dy = normal(4, {rows, out}, x.dtype(), arena),
                 h = normal(5, {rows, in}, x.dtype(), arena);
    const auto all = [&](const auto& lay) {
      const Activated forward = linear_gelu(lay(x), lay(w), lay(b));
      Tensor dw = lay(w.to(DType::float32)), product = lay(dw.make(dy.shape()));
      const Tensor sums = linear_weight_grad_and_sums(dw, lay(dy), lay(x)),
                   dh = linear_input_grad_gelu(lay(dy), lay(w), lay(h), nullptr);
      linear_into(product, lay(x).to(DType::float32), lay(w).to(DType::float32), {});
      std::vector<Tensor> made{forward.h, forward.y, dh, dw, product};
      if (sums.defined()) made.push_back(sums);
      return made;
    };
    const std::vector<Tensor> expected = all([](const Tensor& t) { return t.clone(); });
    // The float32 tensors here are also outputs, whose rows must be contiguous.
    for (const bool strided : {false, true})
      EXPECT_TRUE(bitwise_equal(
          all([&](const Tensor& t) { return otherwise(t, strided && t.dtype() != DType::float32); }), expected))
          << strided << " " << out;
  }
}

// Passes are always fused on the emulated GPU and never if disallowed; on a GPU timing decides.
TEST_F(LinearGeluGpu, FusesOnlyIfAllowed) {
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
    EXPECT_EQ(tries(DType::bfloat16, 16), first) << "the choice is final";
    arena->local<KernelChoice>().deterministic = true;
    EXPECT_FALSE(tries(DType::bfloat16, 16));
  }
}

}  // namespace
}  // namespace tessera
