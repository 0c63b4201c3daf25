// A block by the processor's pair products against a plain sum. Skipped where the processor has none.
#include <gtest/gtest.h>

#include "tensor/cpu/amx.h"
#include "tensor/random.h"

namespace tessera {
namespace {

using cpu::kTileBlock, cpu::kTileDepth, cpu::kTileElements, cpu::kTileRows;

// A's rows lie as they are, `lda` apart, or as two tiles one after the other.
TEST(PairBlock, IsTheProduct) {
  if (!cpu::has_pair_products()) GTEST_SKIP() << "this processor has no AVX512_BF16";
  constexpr int64_t kTiles = 3, kInner = kTiles * kTileDepth;
  const Philox numbers = Philox::named(1, "pairs");
  const auto number = [&](int64_t i) { return bfloat16(2 * numbers.uniform(static_cast<uint64_t>(i)) - 1); };
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

}  // namespace
}  // namespace tessera
