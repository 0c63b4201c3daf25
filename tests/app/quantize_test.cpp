// train --quantize: a base in four bits, the same bytes under every plan, saved as it is, and numbers again on its way
// out.
#include <algorithm>
#include <nlohmann/json.hpp>

#include "data/files.h"
#include "data/safetensors.h"
#include "tests/app/program.h"

namespace tessera {
namespace {
namespace fs = std::filesystem;

class QuantizeTest : public test::ProgramTest {
 protected:
  const std::string base_ =
      "train --data text.txt --model llama-nano --layers 1 --context 16 --tokenizer bytes --batch 4 --steps 3 "
      "--warmup 2 --threads-per-rank 1 --no-eval --out base ";
  const std::string tuned_ =
      "train --init base --data text.txt --batch 4 --steps 4 --warmup 1 --lr 0.01 --threads-per-rank 1 --lora-rank 2 "
      "--quantize nf4 --no-eval --out tuned ";
  Safetensors tensors(const std::string& checkpoint) const {
    return Safetensors(path(checkpoint) / "model.safetensors");
  }
  double loss_of(const std::string& words) {
    const auto ran = run("evaluate " + words + " --data text.txt --threads-per-rank 1 --format json");
    EXPECT_EQ(ran.status, 0) << words << ran.err;
    return ran.status == 0 ? nlohmann::json::parse(ran.out).at("loss").get<double>() : 0;
  }
};

TEST_F(QuantizeTest, TheBaseHasTheSameBytesUnderEveryPlan) {
  ASSERT_EQ(run(base_).status, 0);
  std::map<std::string, std::string> first;
  for (const char* plan : {"--ranks 1", "--dp 2 --zero 3", "--dp 1 --tp 2 --sp", "--dp 1 --cp 2"}) {
    const auto ran = run(tuned_ + plan);
    ASSERT_EQ(ran.status, 0) << plan << ran.err;
    const Safetensors model = tensors("tuned/checkpoints/step-4");
    int64_t bytes = 0;
    for (const TensorBytes& t : model.tensors()) {
      if (t.dtype != DType::uint8) continue;
      const std::string found(reinterpret_cast<const char*>(t.bytes.data()), t.bytes.size());
      bytes += std::ssize(found);
      EXPECT_TRUE(first.emplace(t.name, found).first->second == found) << plan << t.name;
    }
    EXPECT_EQ(first.size(), 4u);
    EXPECT_NEAR(static_cast<double>(bytes), 0.516 * (256 * 128 + 128 * 128 + 3 * 384 * 128), 200);
    fs::remove_all(path("tuned"));
  }
}

TEST_F(QuantizeTest, ItGoesOnAndGoesOut) {
  ASSERT_EQ(run(base_).status, 0);
  ASSERT_EQ(run(tuned_ + "--ranks 1 --save-every 2").status, 0);
  const std::string end = weights("tuned/checkpoints/step-4");
  fs::remove_all(path("tuned/checkpoints/step-4"));
  fs::rename(path("base"), path("gone"));  // the run has all that it needs
  const auto resumed = run("train --resume --out tuned");
  ASSERT_EQ(resumed.status, 0) << resumed.err;
  EXPECT_TRUE(weights("tuned/checkpoints/step-4") == end);
  const double loss = loss_of("tuned");
  EXPECT_NEAR(loss_of("tuned --dp 1 --tp 2"), loss, 1e-5);
  EXPECT_EQ(run("generate tuned --tokens 5 --temperature 0").status, 0);

  // Numbers again: what the layers computed with, and the adapters in them.
  const auto merged = run("checkpoint export tuned --out whole --merge");
  ASSERT_EQ(merged.status, 0) << merged.err;
  EXPECT_NE(merged.out.find("4 bits"), std::string::npos) << merged.out;
  EXPECT_NEAR(loss_of("whole"), loss, 1e-5);

  // Adapters alone, beside a base that is quantised again.
  fs::rename(path("gone"), path("base"));
  ASSERT_EQ(run("checkpoint export tuned --out adapters").status, 0);
  EXPECT_NEAR(loss_of("adapters --quantize nf4"), loss, 1e-6);
  EXPECT_NE(loss_of("adapters"), loss);
  ASSERT_EQ(run("checkpoint reshard tuned --dp 1 --tp 2 --zero 3 --out parts").status, 0);
  EXPECT_NEAR(loss_of("parts"), loss, 1e-6);

  // A tuned model goes on as it is.
  const auto next =
      run("train --init tuned --data text.txt --batch 4 --steps 1 --lr 0 --min-lr 0 --no-eval --out next");
  ASSERT_EQ(next.status, 0) << next.err;
  EXPECT_TRUE(weights("next/checkpoints/step-1") == end);
}

TEST_F(QuantizeTest, MistakesAreNamed) {
  ASSERT_EQ(run(base_).status, 0);
  expect_failure("train --init base --data text.txt --quantize nf4 --out run", 2, "--quantize: expected --lora-rank");
  expect_failure("train --init base --data text.txt --lora-rank 2 --quantize-group 64 --out run", 2,
                 "--quantize-group: goes with --quantize gptq, found none");
  expect_failure("train --init base --data text.txt --lora-rank 2 --quantize gptq --out run", 2,
                 "--quantize: gptq is for codes that tessera checkpoint quantize made");
  expect_failure("verify --model llama-nano --channels 64 --ffn 128 --lora-rank 2 --quantize nf4 --dp 1 --tp 2", 2,
                 "--tp: 'blocks.0.attn.proj.weight' (64, 64) would be cut at multiples of 32 elements");
  ASSERT_EQ(run(tuned_).status, 0);
  expect_failure("train --resume --out tuned --quantize none", 2, "quantize");
  expect_failure("train --init tuned --data text.txt --quantize gptq --out run", 2,
                 "--quantize: the model has nf4, found gptq");
}

}  // namespace
}  // namespace tessera
