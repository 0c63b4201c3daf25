// CPU matmuls with few rows, AMX tiles and pair products against plain sums; skipped if the CPU lacks the instructions.

#ifdef __x86_64__
#include <array>
#include <cmath>
#include <cstdint>
#include <map>
#include <vector>

#include "tensor/cpu/x86/amx.h"

#endif
#include "tensor/ops/elementwise.h"
#include "tensor/ops/matmul/cpu/gemm.h"
#include "tests/support/one_thread.h"
#include "tests/support/tensors.h"

namespace tessera {
namespace {

using test::host_values;

using cpu::InstructionSet;

// Each test sets the number of threads itself.
class FewRows : public test::OneThread {
 protected:
  // (rows, cols) with padded rows.
  Tensor random(int64_t rows, int64_t cols, DType dtype, uint64_t seed) {
    const Philox random = Philox::named(seed, "few rows");
    const auto number = [&](size_t i) { return 2 * random.uniform(i) - 1; };
    return test::made({rows, cols + 3}, dtype, arena_, number).narrow(1, 1, cols);
  }

  ArenaPtr arena_ = make_arena();
};

void expect_product(const Tensor& out, const Tensor& a, const Tensor& w, const Tensor& bias) {
  const std::vector<double> y = host_values(out), x = host_values(a), v = host_values(w);
  const std::vector<double> added = bias.defined() ? host_values(bias) : std::vector<double>();
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

TEST_F(FewRows, AllPathsMatchFloat64AndEachOtherBitwise) {
  const Philox shapes = Philox::named(5, "shapes");
  for (uint64_t round = 0; round < 60; ++round) {
    const auto sample = [&](int64_t low, int64_t high, uint64_t step) {
      return low + static_cast<int64_t>(shapes.below(static_cast<uint64_t>(high - low + 1), round, step));
    };
    const int64_t m = sample(1, 8, 0), n = sample(1, 150, 1),
                  k = round % 4 == 0 ? sample(1, 20, 2) : sample(16, 300, 2);
    const DType dtype = sample(0, 1, 3) ? DType::bfloat16 : DType::float32;
    const DType wanted = sample(0, 1, 4) ? dtype : DType::float32;
    SCOPED_TRACE(testing::Message() << "(" << m << ", " << k << ") x (" << k << ", " << n << ") round " << round);
    const Tensor a = random(m, k, dtype, 3 * round), w = random(n, k, dtype, 3 * round + 1);
    const Tensor bias = sample(0, 1, 5) ? random(1, n, wanted, 3 * round + 2).contiguous().reshape({n}) : Tensor();
    ASSERT_TRUE(cpu::few_rows_supports(a, w.transpose(0, 1)));
    Tensor first = Tensor::empty({m, n}, wanted, arena_);
    cpu::set_threads(1);
    cpu::few_rows_matmul(first, a, w.transpose(0, 1), bias);
    expect_product(first, a, w, bias);
    for (const auto isa : {InstructionSet::avx512, InstructionSet::avx2, InstructionSet::baseline})
      for (const int team : {1, 3}) {
        if (isa < cpu::instruction_set()) continue;  // not supported by this CPU
        cpu::set_threads(team);
        Tensor wide = Tensor::zeros({m + 1, n + 5}, wanted, arena_);
        wide.fill(7);
        Tensor again = wide.narrow(0, 0, m).narrow(1, 2, n);
        cpu::few_rows_matmul(again, a, w.transpose(0, 1), bias, isa);
        EXPECT_EQ(host_values(again), host_values(first))
            << "instruction set " << static_cast<int>(isa) << ", " << team;
        again.fill(7);
        EXPECT_EQ(host_values(wide), std::vector<double>(static_cast<size_t>(wide.numel()), 7))
            << "written out of bounds";
      }
    const int64_t row = sample(0, m - 1, 6);
    Tensor alone = Tensor::empty({1, n}, wanted, arena_);
    cpu::few_rows_matmul(alone, a.narrow(0, row, 1), w.transpose(0, 1), bias);
    EXPECT_EQ(host_values(alone), host_values(first.narrow(0, row, 1))) << "a single row";
  }
}

// AMX matmul against a plain sum, for shapes with and without remainders, both layouts of each operand, and numbers of
// threads. Skipped on CPUs without AMX. SetUp() leaves the number of threads unchanged.

class AmxMatmul : public test::OneThread {
 protected:
  void SetUp() override {
    const Tensor full = Tensor::zeros({64, 64}, DType::bfloat16, arena_);
    if (!cpu::amx_supports(full, full)) GTEST_SKIP() << "no AMX tiles, or TESSERA_MAX_CPU_ISA excludes them";
  }

  // (rows, cols), column-major if `turned`.
  Tensor random(int64_t rows, int64_t cols, bool turned, uint64_t seed) {
    const Philox random = Philox::named(seed, "amx");
    const Tensor t = test::made(turned ? Shape{cols, rows} : Shape{rows, cols}, DType::bfloat16, arena_,
                                [&](size_t i) { return 2 * random.uniform(i) - 1; });
    return turned ? t.transpose(0, 1) : t;
  }

  ArenaPtr arena_ = make_arena();
};

TEST_F(AmxMatmul, MatchesReferenceForEveryShapeAndLayout) {
  const Philox random_shape = Philox::named(3, "shapes");
  for (uint64_t round = 0; round < 40; ++round) {
    const auto sample = [&](uint64_t low, uint64_t high, uint64_t step) {
      return static_cast<int64_t>(low + random_shape.below(high - low + 1, round, step));
    };
    const int64_t m = sample(32, 150, 0), n = sample(16, 150, 1),
                  k = round % 5 == 0 ? sample(1000, 2100, 2) : sample(16, 200, 2);
    SCOPED_TRACE(testing::Message() << "(" << m << ", " << k << ") x (" << k << ", " << n << ") round " << round);
    const Tensor a = random(m, k, sample(0, 1, 3) == 1, 2 * round),
                 b = random(k, n, sample(0, 1, 4) == 1, 2 * round + 1);
    const DType wanted = sample(0, 1, 5) == 1 ? DType::float32 : DType::bfloat16;
    const Tensor bias = sample(0, 1, 6) == 1 ? random(1, n, false, 99).reshape({n}) : Tensor();
    std::vector<double> one;
    for (const int team : {1, 2, 3}) {
      cpu::set_threads(team);
      Tensor out = Tensor::empty({m, n}, wanted, arena_);
      cpu::amx_matmul(out, a, b, bias, nullptr);
      if (team == 1) {
        expect_product(out, a, b.transpose(0, 1), bias);
        one = host_values(out);
      }
      EXPECT_EQ(host_values(out), one) << "one thread and " << team;
    }
  }
}

TEST_F(AmxMatmul, RepacksOnlyIfWeightChanges) {
  const Tensor a = random(64, 96, false, 1);
  Tensor w = random(48, 96, false, 2);
  cpu::Packed packed;
  const auto expect_product_with = [&](const Tensor& seen) {
    Tensor out = Tensor::empty({64, 48}, DType::bfloat16, arena_);
    cpu::amx_matmul(out, a, w.transpose(0, 1), {}, &packed);
    expect_product(out, a, seen, {});
  };
  expect_product_with(w);
  const Tensor before = w.clone();
  w.fill(0.5);
  expect_product_with(before);  // the version is unchanged
  ++w.storage()->version;
  expect_product_with(w);
}

TEST_F(AmxMatmul, WritesOnlyItsRowsAndColumns) {
  const Tensor a = random(33, 32, false, 1), b = random(32, 17, false, 2);
  Tensor full = Tensor::empty({40, 40}, DType::bfloat16, arena_);
  full.fill(7);
  Tensor out = full.narrow(0, 2, 33).narrow(1, 0, 17);
  cpu::amx_matmul(out, a, b, {}, nullptr);
  out.fill(7);
  const std::vector<double> all = host_values(full);
  for (size_t i = 0; i < all.size(); ++i) ASSERT_EQ(all[i], 7) << i / 40 << ", " << i % 40;
}

// oneDNN's packed layout has blocks of up to 64 columns, which would pad 8 columns to eight times their size.
TEST(PackedWeights, TakeAtMostTwiceTheBytesOfTheWeight) {
  const ArenaPtr arena = make_arena();
  const Philox random = Philox::named(1, "packed");
  const auto value = [&](size_t i) { return 2 * random.uniform(i) - 1; };
  for (const auto& [out, in] : {std::pair<int64_t, int64_t>{1024, 8}, {8, 1024}, {256, 192}, {65, 128}}) {
    const Tensor w = test::made({out, in}, DType::float32, arena, value);
    const Tensor x = test::made({64, in}, DType::float32, arena, value);
    const Tensor dy = test::made({64, out}, DType::float32, arena, value);
    PackedWeights packs;
    const std::vector<double> y = host_values(linear(x, w, {}, &packs)),
                              dx = host_values(linear_input_grad(dy, w, &packs));
    ASSERT_EQ(packs.packs.size(), 2U);
    int copies = 0;
    for (const PackedWeights::Packed& p : packs.packs)
      if (p.bytes.defined()) {
        ++copies;
        EXPECT_LE(p.bytes.nbytes(), 2 * w.nbytes()) << out << " x " << in;
      }
    if (out == 256) {
      EXPECT_EQ(copies, 2);
    }
    const std::vector<double> plain_y = host_values(linear(x, w, {})), plain_dx = host_values(linear_input_grad(dy, w));
    for (size_t i = 0; i < y.size(); ++i) ASSERT_NEAR(y[i], plain_y[i], 1e-4) << out << " x " << in;
    for (size_t i = 0; i < dx.size(); ++i) ASSERT_NEAR(dx[i], plain_dx[i], 1e-4) << out << " x " << in;
  }
}

#ifdef __x86_64__
// A block of pair products against a plain sum. Skipped on CPUs without the instructions.

using cpu::kTileBlock, cpu::kTileDepth, cpu::kTileElements, cpu::kTileRows;

// A has a row stride, or is packed as two consecutive tiles.
TEST(PairBlock, MatchesReference) {
  if (!cpu::has_pair_products()) GTEST_SKIP() << "this CPU has no AVX512_BF16";
  constexpr int64_t kTiles = 3, kInner = kTiles * kTileDepth;
  const Philox random = Philox::named(1, "pairs");
  const auto number = [&](int64_t i) { return bfloat16(2 * random.uniform(static_cast<uint64_t>(i)) - 1); };
  alignas(64) std::array<bfloat16, kTileBlock * kInner> rows, tiles;
  alignas(64) std::array<bfloat16, kInner * kTileBlock> columns;
  for (int64_t i = 0; i < kTileBlock; ++i)
    for (int64_t k = 0; k < kInner; ++k) {
      const bfloat16 x = number(i * kInner + k);
      rows[static_cast<size_t>(i * kInner + k)] = x;
      const int64_t tile = k / kTileDepth * 2 + i / kTileRows;
      tiles[static_cast<size_t>(tile * kTileElements + i % kTileRows * kTileDepth + k % kTileDepth)] = x;
      const int64_t panel = k / kTileDepth * 2 + i / kTileRows;
      columns[static_cast<size_t>(panel * kTileElements + k % kTileDepth / 2 * kTileDepth + i % kTileRows * 2 +
                                  k % 2)] = number(kTileBlock * kInner + k * kTileBlock + i);
    }
  const cpu::TileOperandA as_rows{rows.data(), kInner, kTileDepth, kTileRows * kInner},
      as_tiles{tiles.data(), kTileDepth, 2 * kTileElements, kTileElements};
  for (const cpu::TileOperandA& a : {as_rows, as_tiles})
    for (const bool accumulate : {false, true}) {
      std::array<float, kTileBlock*(kTileBlock + 3)> c{};
      c.fill(7);
      cpu::pair_block(a, columns.data(), kTiles, c.data(), kTileBlock + 3, accumulate);
      for (int64_t i = 0; i < kTileBlock; ++i)
        for (int64_t j = 0; j < kTileBlock + 3; ++j) {
          double sum = accumulate || j >= kTileBlock ? 7 : 0;
          for (int64_t k = 0; k < kInner && j < kTileBlock; ++k)
            sum += static_cast<double>(static_cast<float>(number(i * kInner + k))) *
                   static_cast<double>(static_cast<float>(number(kTileBlock * kInner + k * kTileBlock + j)));
          ASSERT_NEAR(static_cast<double>(c[static_cast<size_t>(i * (kTileBlock + 3) + j)]), sum, 1e-5)
              << i << ", " << j;
        }
    }
}
#endif

}  // namespace
}  // namespace tessera
