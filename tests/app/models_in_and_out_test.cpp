// Models in and out of runs: checkpoint import, export and inspect, and train --init.
#include <algorithm>
#include <fstream>

#include "data/safetensors.h"
#include "tests/app/program.h"

namespace tessera {
namespace {
namespace fs = std::filesystem;

class ModelsInAndOutTest : public test::ProgramTest {
 protected:
  const std::string base_ =
      "train --data text.txt --model llama-nano --layers 2 --heads 2 --channels 16 --context 16 --tokenizer bytes "
      "--batch "
      "4 --steps 5 --warmup 2 --threads-per-rank 1 --out base ";
};

TEST_F(ModelsInAndOutTest, ImportAndExportGiveTheSameBytes) {
  for (const std::string dtype : {"fp32", "bf16"}) {
    ASSERT_EQ(run(base_ + "--qkv-bias --untied=false --dtype " + dtype).status, 0);
    ASSERT_EQ(run("checkpoint export base --out folder").status, 0);
    ASSERT_EQ(run("checkpoint import folder --out imported").status, 0);
    ASSERT_EQ(run("checkpoint export imported --out again").status, 0);
    EXPECT_EQ(weights("imported/checkpoints/step-0"), weights("base/checkpoints/step-5"));
    for (const char* file : {"model.safetensors", "config.json", "tokenizer.json"})
      EXPECT_EQ(read_file(path("again") / file), read_file(path("folder") / file)) << file;
    const std::string said = "generate {} --prompt Line --tokens 8 --seed 3";
    EXPECT_EQ(run(fmt::format(fmt::runtime(said), "imported")).out, run(fmt::format(fmt::runtime(said), "base")).out);
    EXPECT_NE(run("checkpoint inspect folder").out.find("self_attn.q_proj.weight | "), std::string::npos);
    for (const char* made : {"base", "folder", "imported", "again"}) fs::remove_all(path(made));
  }
}

// The loss at the beginning of a run is the one that the run before ended with, whatever the weights came from and
// under every plan.
TEST_F(ModelsInAndOutTest, ARunBeginsWithWhatAnotherEndedWith) {
  ASSERT_EQ(run(base_ + "--ranks 1").status, 0);
  ASSERT_EQ(run("checkpoint export base --out folder").status, 0);
  const std::string more = " --data text.txt --batch 4 --steps 1 --lr 0 --min-lr 0 --threads-per-rank 1 --out next ";
  for (const std::string from : {"base", "base/checkpoints/step-5", "folder"})
    for (const char* plan :
         {"--ranks 1", "--dp 2 --zero 3", "--dp 1 --tp 2", "--dp 1 --pp 2", "--dp 2 --dp-mode ps-async"}) {
      const auto ran = run("train --init " + from + more + plan);
      ASSERT_EQ(ran.status, 0) << from << plan << ran.err;
      EXPECT_EQ(weights("next/checkpoints/step-1"), weights("base/checkpoints/step-5")) << from << plan;
      fs::remove_all(path("next"));
    }
}

TEST_F(ModelsInAndOutTest, ARunIsPickedUpWithoutWhatItBeganWith) {
  ASSERT_EQ(run(base_ + "--ranks 1").status, 0);
  ASSERT_EQ(run("checkpoint export base --out folder").status, 0);
  const std::string more = "train --init folder --data text.txt --batch 4 --threads-per-rank 1 --ranks 1 ";
  ASSERT_EQ(run(more + "--steps 4 --save-every 2 --keep 2 --out whole").status, 0);
  ASSERT_EQ(run(more + "--steps 4 --save-every 2 --keep 2 --out parted").status, 0);
  fs::remove_all(path("parted/checkpoints/step-4"));
  fs::remove_all(path("folder"));
  const auto ran = run("train --resume --out parted");
  ASSERT_EQ(ran.status, 0) << ran.err;
  EXPECT_EQ(weights("parted/checkpoints/step-4"), weights("whole/checkpoints/step-4"));
}

// A run in parts goes on under its layout and under others, writes text, and becomes the run again that it was made of.
TEST_F(ModelsInAndOutTest, ARunInPartsIsTheSameRun) {
  ASSERT_EQ(run(base_ + "--ranks 2 --save-every 3 --keep 2").status, 0);
  const std::string end = weights("base/checkpoints/step-5");
  fs::rename(path("base/checkpoints/step-5"), path("end"));
  ASSERT_EQ(run("checkpoint reshard base --out parts --dp 2 --zero 3").status, 0);
  EXPECT_TRUE(fs::exists(path("parts/checkpoints/step-3/model.rank-1-of-2.safetensors")));
  ASSERT_EQ(run("checkpoint reshard base --out cube --pp 2 --dp 2 --tp 2 --zero 1").status, 0);
  EXPECT_TRUE(fs::exists(path("cube/checkpoints/step-3/optimizer.rank-7-of-8.safetensors")));
  for (const char* from : {"parts", "cube"}) {
    const std::string said = "generate {} --prompt Line --tokens 8 --seed 3";
    EXPECT_EQ(run(fmt::format(fmt::runtime(said), from)).out, run(fmt::format(fmt::runtime(said), "base")).out);
    ASSERT_EQ(run(fmt::format("checkpoint reshard {} --out back", from)).status, 0);
    for (const char* file : {"model.safetensors", "optimizer.safetensors"}) {
      const Safetensors a(path("base/checkpoints/step-3") / file), b(path("back/checkpoints/step-3") / file);
      ASSERT_EQ(a.tensors().size(), b.tensors().size());
      for (const TensorBytes& t : a.tensors()) EXPECT_TRUE(std::ranges::equal(t.bytes, b.at(t.name).bytes)) << t.name;
    }
    fs::remove_all(path("back"));
    ASSERT_EQ(run(fmt::format("train --resume --out {} --dp 2 --pp 1 --tp 1 --zero 3", from)).status, 0);
    EXPECT_EQ(weights(fmt::format("{}/checkpoints/step-5", from)), end) << from;
  }
  fs::remove_all(path("cube/checkpoints/step-5"));
  fs::remove(path("cube/checkpoints/step-3/model.rank-0-of-8.safetensors"));
  expect_failure("train --resume --out cube", 4, "is in no part here");
  expect_failure("checkpoint reshard base --out other --tp 3", 2, "--tp: 3 does not divide the 2 heads");
  expect_failure("checkpoint reshard base --out other --dp 2 --dp-mode ddp", 2, "unknown option");
  EXPECT_FALSE(fs::exists(path("other")));
}

// Each of them has a state of its own; the checkpoint in the middle is between the outer steps of both fragments, and
// so is the validation after step 3.
TEST_F(ModelsInAndOutTest, RanksThatTrainAloneGoOnFromParts) {
  ASSERT_EQ(
      run(base_ + "--dp 2 --dp-mode diloco --sync-every 4 --sync-fragments 2 --save-every 3 --eval-every 3 --keep 2")
          .status,
      0);
  const std::string end = weights("base/checkpoints/step-5");
  fs::remove_all(path("base/checkpoints/step-5"));
  ASSERT_EQ(run("checkpoint reshard base --out parts --dp 2 --pp 2 --tp 2").status, 0);
  EXPECT_TRUE(fs::exists(path("parts/checkpoints/step-3/optimizer.rank-7-of-8.safetensors")));
  ASSERT_EQ(run("train --resume --out parts --dp 2 --pp 1 --tp 1").status, 0);
  EXPECT_EQ(weights("parts/checkpoints/step-5"), end);
  expect_failure(
      "checkpoint reshard base --out other --dp 4", 2,
      "--dp: each data rank of --dp-mode diloco keeps a state of its own; expected 2, as many as the run has, "
      "found 4");
}

TEST_F(ModelsInAndOutTest, MistakesAreNamed) {
  ASSERT_EQ(run(base_).status, 0);
  ASSERT_EQ(run("checkpoint export base --out folder").status, 0);
  expect_failure("checkpoint", 2, "expected import, export, inspect, quantize or reshard");
  expect_failure("checkpoint export base", 2, "--out: expected a name");
  expect_failure("checkpoint export base --out folder", 6, "exists already");
  expect_failure("checkpoint import base --out imported", 4, "no config.json");
  expect_failure("checkpoint inspect nowhere", 4, "nowhere: no such file");
  expect_failure("train --init base --layers 3 --out run", 2, "--layers: the model has 2, found 3");
  expect_failure("train --init base --model gpt2 --out run", 2, "--model: --init names the model already");
  expect_failure("train --init nowhere --out run", 4, "nowhere");
  ASSERT_EQ(run("checkpoint import folder --out imported").status, 0);
  expect_failure("train --resume --out imported", 2, "holds only weights; expected --init imported");
  fs::resize_file(path("folder/model.safetensors"), 500);
  expect_failure("checkpoint import folder --out other", 4, "model.safetensors");
  EXPECT_FALSE(fs::exists(path("other")));
  EXPECT_FALSE(fs::exists(path("run")));
}

}  // namespace
}  // namespace tessera
