// Adapters on 4-bit weights train under every plan as on one rank: bits, traffic and memory. Injected faults of these
// weights are detected.

#include <algorithm>
#include <array>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string_view>
#include <vector>

#include "nn/quantize/packed.h"
#include "tests/support/errors.h"
#include "tests/verify/draw.h"

namespace tessera {
namespace {

using namespace test;

// The smallest model whose weights two tp ranks can shard at block boundaries.
TypedOptions small_qlora(std::string_view codec = "nf4", std::string_view options = {}) {
  return small_plan(fmt::format(
      "family=llama layers=2 channels=128 head_dim=64 ffn=128 lora_rank=2 lora_targets=all steps=3 batch=4 dtype=fp32 "
      "quantize={} {} {}",
      codec, codec == "gptq" ? "quantize_group=32" : "", options));
}

TEST(Quantized, EveryStrategyTrainsLikeOneRank) {
  for (const char* codec : {"nf4", "gptq"})
    expect_passes(small_qlora(codec, "ranks=2 microbatches=2"), {"zero=0", "zero=1", "zero=2", "zero=3"});
  expect_passes(small_qlora("nf4", "ranks=2"), {"dp_mode=dataparallel", "dp_mode=ps-sync"});
}

TEST(Quantized, ModelAxesTrainLikeOneRank) {
  for (const char* codec : {"nf4", "gptq"})
    expect_passes(small_qlora(codec, "dtype=fp64"), {"tp=2", "pp=2 microbatches=4 schedule=zb-h1"});
  expect_passes(small_qlora("nf4", "dtype=fp64"), {"tp=2 sp=true dp=2 zero=3", "cp=2 recompute=block",
                                                   "pp=2 tp=2 microbatches=2 zero=3", "family=gpt2 dtype=bf16 tp=2"});
}

TEST(Quantized, RandomPlansTrainLikeOneRank) {
  expect_random_pass(4, "quantized", [](Sampler& d) {
    TypedOptions o = small_qlora(d.of({"nf4", "gptq"}));
    sample(d, o, "dtype=fp64|fp32|bf16 family=gpt2|llama");
    o[d.between(0, 1) == 1 ? "pp" : "cp"] = d.between(1, 2);
    sample(d, o, "tp=1..2 dp=1..2");
    o["sp"] = o.plan.tp > 1 && d.between(0, 1) == 1;
    sample(d, o, "zero=0..3 microbatches=1..2 lora_dropout=0|0.2 recompute=none|activation|attention|block");
    return o;
  });
}

using QuantizedGpu = test::OnGpu;
TEST_F(QuantizedGpu, RanksTrainLikeOneRank) {
  for (const char* codec : {"nf4", "gptq"})
    expect_passes(small_qlora(codec, "device=cuda"),
                  {"dp=2 zero=3 dtype=bf16", "tp=2", "pp=2 tp=2 microbatches=2 zero=1"});
}

// The model has 0.516 bytes per quantized weight, and one mean per matrix.
TEST(Quantized, MemoryMatchesClosedForm) {
  const TrainConfig job = resolve(small_qlora());
  const std::unique_ptr<LanguageModel> model = make_model(verifiable(job).model);
  int64_t elements = 0, bytes = 0, matrices = 0, means = 0;
  for (const Parameter* p : model->parameters())
    if (p->packed) {
      elements += p->full_shape.numel();
      bytes += p->stored_here();
      means += std::ssize(p->packed->packing.fused_rows);
      ++matrices;
    }
  EXPECT_EQ(matrices, 4 * 2);
  EXPECT_EQ(means, 7 * 2);
  // Each of q, k, v, o, gate, up and down has a single group of at most 16384 elements.
  EXPECT_EQ(bytes, elements / 2 + elements / 64 + 4 * means + 4 * means);
  EXPECT_NEAR(static_cast<double>(bytes) / static_cast<double>(elements), (4 + 8 / 64.0 + 32 / (64.0 * 256)) / 8, 4e-4);
}

// Bytes of the first local matrix.
Packed& first_packed(Trainer& rank) {
  for (const Parameter* p : rank.state().model().parameters())
    if (p->packed) return *p->packed;
  throw Error("no matrix in four bits");
}

bool is_detected(const TypedOptions& o, const std::function<void(Packed&)>& inject) {
  const VerifyHooks hooks = {.made = [&](Trainer& rank) {
    if (rank.state().groups.world.rank() + 1 == rank.state().groups.world.size()) inject(first_packed(rank));
  }};
  return !verify(resolve(o), hooks).passed();
}

// Uses the neighbouring block's scale.
void replace_scale(Packed& p) {
  std::byte* const scales = p.bytes.raw() + p.bytes.numel();
  for (int64_t i = 1; i < 64; ++i)
    if (scales[-i] != scales[-i - 1]) return std::swap(scales[-i], scales[-i - 1]);
}

// A rank quantizes its tile separately: block scales are the same, but the mean is that of the tile instead of the
// matrix.
void quantize_separately(Packed& p) {
  Tensor dequantized = p.bytes.make({p.packing.elements() / 2}, DType::float32);
  dequantize(p.packing, p.runs, p.bytes, dequantized);
  Packing own = p.packing;
  own.rows /= 2;
  for (int64_t& rows : own.fused_rows) rows /= 2;
  const std::vector<std::byte> bytes = quantize(own, [&](int64_t begin, std::span<float> to) {
    std::copy_n(dequantized.data<float>() + begin, to.size(), to.begin());
  });
  ASSERT_EQ(std::ssize(bytes), p.bytes.numel());
  std::ranges::copy(bytes, p.bytes.raw());
}

TEST(Quantized, DetectsInjectedFaults) {
  const TypedOptions data = small_qlora("nf4", "dp=2"), tensor = small_qlora("nf4", "tp=2");
  for (const TypedOptions& o : {data, tensor}) {
    EXPECT_FALSE(is_detected(o, [](Packed&) {})) << make_command(o);
    EXPECT_TRUE(is_detected(o, replace_scale)) << make_command(o);
  }
  EXPECT_TRUE(is_detected(tensor, quantize_separately));
}

TEST(Quantized, RejectsShardsInsideQuantizationBlocks) {
  const TypedOptions o = small_qlora("nf4", "head_dim=32 tp=2");
  EXPECT_EQ(error_message([&] { verify(resolve(o)); }),
            "`tp`: 'blocks.0.attn.proj.weight' (128, 64) would be sharded at multiples of 32 elements, which the 64 "
            "quantized together do not divide; expected fewer ranks");
}

}  // namespace
}  // namespace tessera
