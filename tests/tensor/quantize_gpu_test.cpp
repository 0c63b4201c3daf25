// Four bits on a GPU: the CPU's numbers, bit for bit, of whole matrices and of tiles, over random sizes.

#include "tensor/ops/quantize/quantize.h"
#include "tests/support/draw.h"
#include "tests/support/gpu.h"
#include "tests/support/tensors.h"

namespace tessera {
namespace {

using test::Draw;
using QuantizeGpu = test::OnGpu;

// Rows of each piece, and columns; a tile of rows of every piece (dim 0), or of columns (dim 1), cut at bounds of
// blocks.
std::vector<ElementRun> tile_of(const Packing& p, int dim, int64_t parts, int64_t part) {
  std::vector<ElementRun> runs;
  int64_t here = 0, first_row = 0;
  const auto push = [&](int64_t whole, int64_t count) { runs.push_back({here, whole, count}), here += count; };
  if (dim == 1) {
    const int64_t width = p.columns / parts;
    for (int64_t r = 0; r < p.rows; ++r) push(r * p.columns + part * width, width);
    return runs;
  }
  for (const int64_t rows : p.pieces) {
    push((first_row + rows / parts * part) * p.columns, rows / parts * p.columns);
    first_row += rows;
  }
  return runs;
}

void expect_the_bits_of_the_cpu(const Packing& p, const std::vector<ElementRun>& runs, const Tensor& bytes,
                                const ArenaPtr& gpu) {
  int64_t elements = 0;
  for (const ElementRun& run : runs) elements += run.count;
  for (const DType dtype : test::floating(gpu)) {
    Tensor expected = Tensor::empty({elements}, dtype, bytes.arena()), found = Tensor::empty({elements}, dtype, gpu);
    dequantize(p, runs, bytes, expected);
    dequantize(p, runs, bytes.to(gpu), found);
    EXPECT_TRUE(test::same_bits(found, expected)) << name_of(dtype);
  }
}

TEST_F(QuantizeGpu, NumbersHaveTheBitsOfTheCpu) {
  for (uint64_t trial = 0; trial < 40; ++trial) {
    Draw d("quantized on a gpu", trial);
    Packing p{.codec = d.of({Codec::nf4, Codec::gptq})};
    const bool is_cut = d.between(0, 3) > 0;
    const int64_t pieces = d.between(1, 4), parts = is_cut ? d.between(2, 3) : 1;
    p.group = d.of({2, 6, 32, 128});
    const int64_t unit = p.codec == Codec::nf4 ? 64 : 2 * p.group;
    p.columns = is_cut || pieces > 1 || p.codec == Codec::gptq ? unit * parts * d.between(1, 5) : d.between(1, 700);
    for (int64_t i = 0; i < pieces; ++i) p.pieces.push_back(parts * d.between(1, 40));
    for (const int64_t rows : p.pieces) p.rows += rows;
    const Philox random = Philox::named(trial, "weights");
    const std::vector<std::byte> whole = quantize(p, [&](int64_t begin, std::span<float> to) {
      for (size_t i = 0; i < to.size(); ++i)
        to[i] = static_cast<float>(random.normal(static_cast<uint64_t>(begin) + i));
    });
    const std::vector<ElementRun> runs = is_cut ? tile_of(p, static_cast<int>(d.between(0, 1)), parts, parts - 1)
                                                : std::vector<ElementRun>{{0, 0, p.elements()}};
    SCOPED_TRACE(std::to_string(p.rows) + " x " + std::to_string(p.columns) + ", " + std::to_string(runs.size()) +
                 " runs");
    ASSERT_EQ(splits_block(p, runs), 0);
    int64_t elements = 0;
    for (const ElementRun& run : runs) elements += run.count;
    const Tensor bytes = Tensor::empty({p.bytes(elements)}, DType::uint8, make_arena());
    for_each_byte_run(p, runs, [&](int64_t here, int64_t from, int64_t count) {
      std::copy_n(whole.begin() + from, count, bytes.raw() + here);
    });
    expect_the_bits_of_the_cpu(p, runs, bytes, arena);
  }
}

TEST_F(QuantizeGpu, MorePiecesThanAKernelTakesAreNamed) {
  const Packing p{.codec = Codec::nf4, .rows = 5, .columns = 64, .pieces = {1, 1, 1, 1, 1}};
  const std::vector<ElementRun> runs{{0, 0, p.elements()}};
  const Tensor bytes = Tensor::zeros({p.bytes()}, DType::uint8, arena);
  Tensor out = Tensor::empty({p.elements()}, DType::float32, arena);
  EXPECT_THROW(dequantize(p, runs, bytes, out), Error);
}

}  // namespace
}  // namespace tessera
