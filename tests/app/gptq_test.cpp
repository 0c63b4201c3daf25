// checkpoint quantize: a folder that every command reads to the bit, and mistakes in one line.
#include <nlohmann/json.hpp>

#include "data/safetensors.h"
#include "tests/app/program.h"

namespace tessera {
namespace {
namespace fs = std::filesystem;

class GptqTest : public test::ProgramTest {
 protected:
  const std::string base_ =
      "train --data text.txt --model llama-nano --layers 1 --heads 2 --channels 32 --ffn 64 --context 16 --tokenizer "
      "bytes --batch 4 --steps 40 --lr 0.01 --warmup 2 --ranks 1 --threads-per-rank 1 --eval-every 0 --out base ";
  const std::string quantize_ =
      "checkpoint quantize base --calibrate text.txt --windows 32 --group 16 --threads-per-rank 1 ";
  double loss_of(const std::string& from) const {
    const test::Ran ran = run("evaluate " + from + " --data text.txt --threads-per-rank 1 --format json");
    EXPECT_EQ(ran.status, 0) << ran.err;
    return nlohmann::json::parse(ran.out).at("loss").get<double>();
  }
};

TEST_F(GptqTest, MakesAFolderThatEveryCommandReads) {
  ASSERT_EQ(run(base_).status, 0);
  const test::Ran made = run(quantize_ + "--method gptq --bits 4 --out small");
  ASSERT_EQ(made.status, 0) << made.err;
  EXPECT_EQ(made.out, "base is in small, its layers in 4 bits in groups of 16, by GPTQ\n");
  EXPECT_NE(made.err.find("blocks.0.mlp.down.weight (32, 64): "), std::string::npos) << made.err;
  ASSERT_EQ(run("checkpoint quantize base --method rtn --group 16 --out rounded").status, 0);
  const double before = loss_of("base"), rounded = loss_of("rounded"), small = loss_of("small");
  EXPECT_LT(small - before, rounded - before);
  EXPECT_LT(fs::file_size(path("small/model.safetensors")),
            fs::file_size(path("base/checkpoints/step-40/model.safetensors")));
  EXPECT_NE(run("checkpoint inspect small").out.find("in 4 bits in groups of 16 (GPTQ)"), std::string::npos);

  // A run made of it has the numbers that the codes stand for, and computes the same.
  ASSERT_EQ(run("checkpoint import small --out again").status, 0);
  EXPECT_NEAR(loss_of("again"), small, 1e-6);
  const std::string said = "generate {} --prompt Line --tokens 8 --temperature 0 --threads-per-rank 1";
  EXPECT_EQ(run(fmt::format(fmt::runtime(said), "small")).out, run(fmt::format(fmt::runtime(said), "again")).out);
  const test::Ran tuned =
      run("train --init small --lora-rank 2 --data text.txt --batch 4 --steps 1 --ranks 1 --threads-per-rank 1 --out "
          "tuned");
  EXPECT_EQ(tuned.status, 0) << tuned.err;
  expect_failure(quantize_ + "--out small", 6, "--out: ");
  expect_failure("checkpoint quantize small --calibrate text.txt --out other", 2, "it is quantised already");
  expect_failure("checkpoint quantize tuned --calibrate text.txt --out other", 2, "it has adapters");
}

TEST_F(GptqTest, MistakesAreNamed) {
  ASSERT_EQ(run(base_).status, 0);
  expect_failure("checkpoint quantize base --out other", 2, "--calibrate: expected a text");
  expect_failure("checkpoint quantize base --calibrate nowhere.txt --out other", 4, "nowhere.txt");
  expect_failure("checkpoint quantize base --calibrate text.txt", 2, "--out: expected a name");
  expect_failure("checkpoint quantize base --calibrate text.txt --out other", 2,
                 "--group: expected a divisor of the 32 inputs of blocks.0.attn.qkv, found 128");
  expect_failure(quantize_ + "--bits 3 --out other", 2, "--bits");
  expect_failure(quantize_ + "--method awq --out other", 2, "--method");
  expect_failure(quantize_ + "--windows 0 --out other", 2, "--windows");
  expect_failure(quantize_ + "--train-on all --out other", 2, "--train-on: goes with --calibrate FILE.jsonl");
  ASSERT_EQ(run("train --data text.txt --model llama-nano --layers 1 --heads 2 --channels 16 --context 16 --tokenizer "
                "bytes --batch 4 --steps 1 --ranks 1 --threads-per-rank 1 --eval-every 0 --out narrow")
                .status,
            0);
  expect_failure("checkpoint quantize narrow --calibrate text.txt --group 16 --out other", 2,
                 "expected multiples of 32, which is what GPTQ's files can hold");
  EXPECT_FALSE(fs::exists(path("other")));
}

}  // namespace
}  // namespace tessera
