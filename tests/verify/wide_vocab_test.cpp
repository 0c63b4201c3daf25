// A vocabulary so wide that the head is scored in two blocks of rows: still every plan has the bits of one rank, also
// where the logits stand whole (DataParallel), and the bound of its peak holds.

#include "tests/verify/draw.h"

namespace tessera {
namespace {

using test::expect_passes;

// Two sequences of 64 tokens in a micro-batch.
TrainOptions wide_plan(const char* dtype = "fp32") {
  TrainOptions o = test::small_plan();
  say(o, "channels=8 context=64 vocab=70000");
  if (std::string(dtype) != "fp64") o["vocab"] = 140000;
  if (std::string(dtype) == "bf16") o["vocab"] = 280000;
  o["dtype"] = dtype;
  say(o, "ranks=2 microbatches=2 batch=8 steps=2 timeout=120");
  return o;
}

TEST(WideVocab, TheseHaveTwoBlocks) {
  for (const char* dtype : {"fp32", "bf16", "fp64"}) {
    const ArenaPtr arena = make_arena();
    const TrainOptions o = wide_plan(dtype);
    const DType type = job_of(o).optim.dtype;
    const RowBlocks blocks = row_blocks(Tensor::empty({128, o.sizes.channels}, type, arena),
                                        Tensor::empty({o.sizes.vocab, o.sizes.channels}, type, arena));
    EXPECT_EQ(blocks.block, 64) << dtype;
  }
}

TEST(WideVocab, EachStrategyTrainsLikeOneRank) {
  for (const char* dtype : {"fp32", "bf16", "fp64"}) expect_passes(wide_plan(dtype));
  TrainOptions o = wide_plan();
  for (const int64_t zero : {1, 2, 3}) o["zero"] = zero, expect_passes(o);
  o["zero"] = 0;
  for (const char* mode : {"dataparallel", "ps-sync"}) {
    o["dp_mode"] = mode;
    expect_passes(o);
  }
  o = wide_plan("bf16");
  o["grad_dtype"] = "bf16";
  expect_passes(o);
  o["dp_mode"] = "dataparallel";
  expect_passes(o);
}

// Whole and split backward passes; all forward passes before the first backward one; two stages on each rank.
TEST(WideVocab, PipelinesTrainLikeOneRank) {
  for (const char* schedule : {"1f1b", "gpipe", "zb-h1", "zb-v"}) {
    TrainOptions o = wide_plan();
    say(o, "pp=2 layers=4 microbatches=4");
    o["schedule"] = schedule;
    expect_passes(o);
  }
}

}  // namespace
}  // namespace tessera
