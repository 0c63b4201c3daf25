// train --init with adapters: the base keeps its bits, adapters are all that is trained and kept, and what they learnt
// goes out alone or inside the weights.
#include <algorithm>
#include <nlohmann/json.hpp>

#include "data/files.h"
#include "data/safetensors.h"
#include "tests/app/program.h"

namespace tessera {
namespace {
namespace fs = std::filesystem;

class LoraTest : public test::ProgramTest {
 protected:
  const std::string base_ =
      "train --data text.txt --model llama-nano --layers 2 --heads 2 --channels 16 --context 16 --tokenizer bytes "
      "--batch 4 --steps 5 --warmup 2 --threads-per-rank 1 --out base ";
  const std::string tuned_ =
      "train --init base --data text.txt --batch 4 --steps 6 --warmup 1 --lr 0.01 --threads-per-rank 1 --lora-rank 2 "
      "--lora-alpha 4 --format json --out tuned ";
  Safetensors tensors(const std::string& checkpoint, const char* file = "model.safetensors") const {
    return Safetensors(path(checkpoint) / file);
  }
};

std::string last_line_of(const std::string& text) {
  const std::string lines = text.substr(0, text.find_last_not_of('\n') + 1);
  return lines.substr(lines.rfind('\n') + 1);
}

bool is_adapter(const std::string& name) { return name.find(".lora_") != std::string::npos; }

TEST_F(LoraTest, TheBaseKeepsItsBitsUnderEveryPlan) {
  ASSERT_EQ(run(base_).status, 0);
  const Safetensors base = tensors("base/checkpoints/step-5");
  std::string first;
  for (const char* plan : {"--ranks 1", "--dp 2 --zero 3", "--dp 2 --zero 1", "--dp 1 --tp 2 --sp",
                           "--dp 1 --pp 2 --microbatches 2 --schedule zb-h1", "--dp 1 --cp 2"}) {
    const auto ran = run(tuned_ + plan);
    ASSERT_EQ(ran.status, 0) << plan << ran.err;
    const Safetensors model = tensors("tuned/checkpoints/step-6"),
                      state = tensors("tuned/checkpoints/step-6", "optimizer.safetensors");
    size_t adapters = 0;
    for (const TensorBytes& t : model.tensors()) {
      adapters += is_adapter(t.name) ? 1 : 0;
      EXPECT_TRUE(is_adapter(t.name) || std::ranges::equal(t.bytes, base.at(t.name).bytes)) << plan << t.name;
    }
    EXPECT_EQ(adapters, 2u * 2 * 2);  // A and B of q and v, in two layers
    for (const TensorBytes& t : state.tensors()) EXPECT_TRUE(is_adapter(t.name)) << t.name;
    const std::string summary = nlohmann::json::parse(last_line_of(ran.out)).at("loss").dump().substr(0, 5);
    if (first.empty()) first = summary;
    EXPECT_EQ(summary, first) << plan;
    fs::remove_all(path("tuned"));
  }
}

TEST_F(LoraTest, ItGoesOnAndGoesOut) {
  ASSERT_EQ(run(base_).status, 0);
  ASSERT_EQ(run(tuned_ + "--ranks 1 --save-every 3").status, 0);
  const std::string end = weights("tuned/checkpoints/step-6");
  fs::remove_all(path("tuned/checkpoints/step-6"));
  ASSERT_EQ(run("train --resume --out tuned").status, 0);
  EXPECT_TRUE(weights("tuned/checkpoints/step-6") == end);

  ASSERT_EQ(run("checkpoint export tuned --out adapters").status, 0);
  EXPECT_TRUE(fs::exists(path("adapters/adapter_config.json")));
  EXPECT_LT(fs::file_size(path("adapters/adapter_model.safetensors")),
            fs::file_size(path("base/checkpoints/step-5/model.safetensors")) / 5);
  ASSERT_EQ(run("checkpoint import adapters --out imported").status, 0);
  EXPECT_TRUE(weights("imported/checkpoints/step-0") == end);
  ASSERT_EQ(run("checkpoint export tuned --out whole --merge").status, 0);
  EXPECT_TRUE(fs::exists(path("whole/config.json")));
  EXPECT_NE(run("checkpoint inspect adapters").out.find("q_proj.lora_A.weight"), std::string::npos);

  // Adapters that somebody else trained go on; those of a merged model are new ones.
  for (const std::string from : {"adapters", "tuned", "whole --lora-rank 3"}) {
    const auto ran = run("train --init " + from + " --data text.txt --batch 4 --steps 1 --lr 0 --min-lr 0 --out next ");
    ASSERT_EQ(ran.status, 0) << from << ran.err;
    EXPECT_EQ(weights("next/checkpoints/step-1") == end, from != "whole --lora-rank 3") << from;
    fs::remove_all(path("next"));
  }
}

// A model with experts: they stay, and adapters of attention go out as those of a dense model.
TEST_F(LoraTest, ExpertsStayFrozen) {
  ASSERT_EQ(run(base_ + "--experts 4").status, 0);
  const Safetensors base = tensors("base/checkpoints/step-5");
  for (const char* plan : {"--dp 2 --ep 2 --zero 3", "--dp 2 --ep 2", "--dp 1 --tp 2 --sp", "--ranks 1"}) {
    fs::remove_all(path("tuned"));
    const auto ran = run(tuned_ + "--lora-targets all " + plan);
    ASSERT_EQ(ran.status, 0) << plan << ran.err;
    const Safetensors model = tensors("tuned/checkpoints/step-6");
    size_t adapters = 0;
    for (const TensorBytes& t : model.tensors()) {
      adapters += is_adapter(t.name) ? 1 : 0;
      EXPECT_TRUE(is_adapter(t.name) || std::ranges::equal(t.bytes, base.at(t.name).bytes)) << plan << t.name;
    }
    EXPECT_EQ(adapters, 2u * 4 * 2);  // A and B of q, k, v and o, in two layers
  }
  const std::string end = weights("tuned/checkpoints/step-6");
  ASSERT_EQ(run("checkpoint export tuned --out adapters").status, 0);
  ASSERT_EQ(run("checkpoint import adapters --out imported").status, 0);
  EXPECT_TRUE(weights("imported/checkpoints/step-0") == end);
  ASSERT_EQ(run("checkpoint export tuned --out whole --merge").status, 0);
  EXPECT_NE(run("checkpoint inspect whole").out.find("block_sparse_moe.experts.3.w2.weight"), std::string::npos);
  expect_failure("train --init base --lora-rank 2 --lora-targets q_proj,up_proj --out run", 2,
                 "--lora-targets: expected some of q_proj, k_proj, v_proj, o_proj (experts have no adapters), found "
                 "'up_proj'");
}

TEST_F(LoraTest, MistakesAreNamed) {
  ASSERT_EQ(run(base_).status, 0);
  expect_failure("train --data text.txt --lora-rank 2 --out run", 2, "--lora-rank: expected --init");
  expect_failure("train --init base --lora-alpha 2 --out run", 2, "--lora-alpha: goes with --lora-rank");
  expect_failure("train --init base --lora-rank 2 --lora-targets q_proj,c_attn --out run", 2, "found 'c_attn'");
  expect_failure("train --init base --lora-rank 2 --dp 2 --dp-mode ps-async --out run", 2, "found --dp-mode ps-async");
  expect_failure("checkpoint export base --merge --out whole", 2, "--merge: expected a model with adapters");
  ASSERT_EQ(run(tuned_).status, 0);
  expect_failure("train --init tuned --lora-rank 2 --out run", 2, "--lora-rank: the model of --init has adapters");
  expect_failure("train --resume --out tuned --lora-alpha 5", 2, "lora_scale");
  ASSERT_EQ(run("checkpoint export tuned --out adapters").status, 0);
  fs::rename(path("base"), path("gone"));
  expect_failure("checkpoint export adapters --merge --out whole", 4, "base_model_name_or_path");
  EXPECT_FALSE(fs::exists(path("whole")));
  EXPECT_FALSE(fs::exists(path("run")));
}

}  // namespace
}  // namespace tessera
