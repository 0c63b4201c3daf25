// Models in and out of runs: checkpoint import, export and inspect, and train --init.
#include <nlohmann/json.hpp>

#include "data/safetensors.h"
#include "tests/app/docs_pages.h"
#include "tests/app/program.h"
#include "tests/support/draw.h"

namespace tessera {

namespace {
namespace fs = std::filesystem;

class ModelsTest : public test::ProgramTest {
 protected:
  Safetensors tensors(const std::string& checkpoint, const char* file = "model.safetensors") const {
    return Safetensors(path(checkpoint) / file);
  }
  double loss_of(const std::string& words) const {
    const test::Ran ran = run("evaluate " + words + " --data text.txt --threads-per-rank 1 --format json");
    EXPECT_EQ(ran.status, 0) << words << ran.err;
    return ran.status == 0 ? nlohmann::json::parse(ran.out).at("loss").get<double>() : 0;
  }
};

class ModelsInAndOutTest : public ModelsTest {
 protected:
  const std::string base_ =
      "train --data text.txt --model llama-nano --layers 2 --heads 2 --channels 16 --context 16 --tokenizer bytes "
      "--batch "
      "4 --steps 5 --warmup 2 --threads-per-rank 1 --out base ";
};

TEST_F(ModelsInAndOutTest, ImportAndExportGiveTheSameBytes) {
  for (const std::string dtype : {"fp32", "bf16"}) {
    ASSERT_EQ(run(base_ + "--qkv-bias --proj-bias --untied=false --dtype " + dtype).status, 0);
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

// Keys of others: a note where they mean nothing, or a refusal in time.
TEST_F(ModelsInAndOutTest, FoldersOfOthersAreReadWithOneNote) {
  ASSERT_EQ(run(base_ + "--dtype bf16").status, 0);
  ASSERT_EQ(run("checkpoint export base --out folder").status, 0);
  const nlohmann::json plain = nlohmann::json::parse(read_file(path("folder/config.json")));
  const auto with = [&](const nlohmann::json& keys) {
    nlohmann::json config = plain;
    config.update(keys);
    std::ofstream(path("folder/config.json")) << config;
  };
  const double loss = loss_of("folder"), short_loss = loss_of("folder --context 8");
  with({{"of_others", 1}, {"is_llama_config", true}});
  for (const std::string command : {"evaluate folder --data text.txt", "generate folder --tokens 2",
                                    "train --init folder --data text.txt --batch 4 --steps 1 --out next"}) {
    const std::string err = run(command).err, note = "are not read: is_llama_config, of_others\n";
    EXPECT_NE(err.find(note), err.npos) << command << err;
    EXPECT_EQ(err.find(note), err.rfind(note)) << command << err;
    const bool computes = command[0] != 't';
    EXPECT_EQ(err.find("folder: stored in bf16 and computed in bf16; --dtype fp32") != err.npos, computes) << err;
  }
  EXPECT_EQ(loss_of("folder"), loss);
  EXPECT_EQ(run("evaluate folder --data text.txt --dtype fp32").err.find("computed in bf16"), std::string::npos);
  with({{"model_type", "mistral"}, {"sliding_window", 4096}});
  EXPECT_EQ(loss_of("folder"), loss);
  with({{"model_type", "mistral"}, {"sliding_window", 8}});
  EXPECT_EQ(loss_of("folder --context 8"), short_loss);
  const double slides = loss_of("folder");
  EXPECT_NE(slides, loss);
  EXPECT_EQ(run("generate folder --tokens 2").status, 0);
  ASSERT_EQ(run("checkpoint export folder --out more").status, 0);
  EXPECT_EQ(nlohmann::json::parse(std::ifstream(path("more/config.json"))).at("sliding_window"), 8);
  EXPECT_EQ(loss_of("more"), slides);
  expect_failure("train --init folder --window 4 --data text.txt --out run", 2, "--window: the model has 8, found 4");
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

// train --init with adapters: the base keeps its bits, adapters are all that is trained and kept, and what they learnt
// goes out alone or inside the weights.

class LoraTest : public ModelsTest {
 protected:
  const std::string base_ =
      "train --data text.txt --model llama-nano --layers 2 --heads 2 --channels 16 --context 16 --tokenizer bytes "
      "--batch 4 --steps 5 --warmup 2 --threads-per-rank 1 --out base ";
  const std::string tuned_ =
      "train --init base --data text.txt --batch 4 --steps 6 --warmup 1 --lr 0.01 --threads-per-rank 1 --lora-rank 2 "
      "--lora-alpha 4 --format json --out tuned ";
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
    if (from != "whole --lora-rank 3") {  // beside the first base, whatever they went through
      ASSERT_EQ(run("checkpoint export next --out onward").status, 0);
      const auto config = nlohmann::json::parse(read_file(path("onward/adapter_config.json")));
      EXPECT_EQ(fs::path(config.at("base_model_name_or_path").get<std::string>()), path("base")) << from;
      fs::remove_all(path("onward"));
    }
    fs::remove_all(path("next"));
  }

  const double loss = loss_of("adapters");
  fs::rename(path("base"), path("moved"));
  EXPECT_EQ(loss_of("adapters --base moved"), loss);
  EXPECT_EQ(run("generate adapters --base moved --tokens 2").status, 0);
  EXPECT_EQ(run("checkpoint inspect adapters --base moved").status, 0);
  const auto ran = run("train --init adapters --base moved --data text.txt --batch 4 --steps 1 --lr 0 --out next ");
  EXPECT_EQ(ran.status, 0) << ran.err;
  expect_failure("evaluate adapters --data text.txt", 4, "--base FOLDER says where it is");
  expect_failure("evaluate whole --base moved --data text.txt", 2, "--base: goes with adapters");
  expect_failure("train --base moved --data text.txt --out run", 2, "--base: goes with --init ADAPTERS");
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

// train --quantize: a base in four bits, the same bytes under every plan, saved as it is, and numbers again on its way
// out.

class QuantizeTest : public ModelsTest {
 protected:
  const std::string base_ =
      "train --data text.txt --model llama-nano --layers 1 --context 16 --tokenizer bytes --batch 4 --steps 3 "
      "--warmup 2 --threads-per-rank 1 --no-eval --out base ";
  const std::string tuned_ =
      "train --init base --data text.txt --batch 4 --steps 4 --warmup 1 --lr 0.01 --threads-per-rank 1 --lora-rank 2 "
      "--quantize nf4 --no-eval --out tuned ";
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

// checkpoint quantize: a folder that every command reads to the bit, and mistakes in one line.

class GptqTest : public ModelsTest {
 protected:
  const std::string base_ =
      "train --data text.txt --model llama-nano --layers 1 --heads 2 --channels 32 --ffn 64 --context 16 --tokenizer "
      "bytes --batch 4 --steps 40 --lr 0.01 --warmup 2 --ranks 1 --threads-per-rank 1 --eval-every 0 --out base ";
  const std::string quantize_ =
      "checkpoint quantize base --calibrate text.txt --windows 32 --group 16 --threads-per-rank 1 ";
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
  // A whole row is one group: layers of 32 and of 64 inputs have one scale a row.
  for (const char* method : {"gptq", "rtn"}) {
    fs::remove_all(path("rows"));
    const test::Ran whole = run(quantize_ + "--group -1 --out rows --method " + method);
    ASSERT_EQ(whole.status, 0) << whole.err;
    EXPECT_NE(whole.out.find("its layers in 4 bits in rows, by "), std::string::npos) << whole.out;
    EXPECT_EQ(nlohmann::json::parse(read_file(path("rows/quantize_config.json"))).at("group_size"), -1);
    const Safetensors stored(path("rows/model.safetensors"), true);
    for (const TensorBytes& t : stored.tensors())
      EXPECT_TRUE(!t.name.ends_with(".scales") || t.shape[0] == 1) << t.name;
    EXPECT_NE(run("checkpoint inspect rows").out.find("in 4 bits in rows (GPTQ)"), std::string::npos);
    EXPECT_GT(loss_of("rows"), before);
  }
  ASSERT_EQ(run("train --init rows --lora-rank 2 --data text.txt --batch 4 --steps 1 --ranks 1 --threads-per-rank 1 "
                "--out by-rows")
                .status,
            0);
  EXPECT_NE(read_file(path("by-rows/config.toml")).find("quantize-group = -1\n"), std::string::npos);
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
                 "--group: expected a divisor of the 32 inputs of blocks.0.attn.qkv, found 128 (-1: all of a row)");
  for (const char* none : {"0", "-2"})  // the later word holds
    expect_failure(quantize_ + "--out other --group " + none, 2, "--group: expected");
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

// Training on examples, as a user does it.

class TuningTest : public ModelsTest {
 protected:
  TuningTest() {
    std::ofstream file(path("sums.jsonl"));
    for (int i = 0; i < 60; ++i)
      file << fmt::format(R"({{"prompt": "{} and {} are ", "completion": "{}"}})", i, i % 7, i + i % 7) << "\n";
  }
  const std::string small_ =
      "train --data sums.jsonl --layers 2 --heads 2 --channels 16 --context 32 --batch 8 --microbatches 2 --steps 12 "
      "--warmup 2 --threads-per-rank 1 --tie-copies ";
};

TEST_F(TuningTest, EveryPlanWritesTheCheckpointOfOneRank) {
  for (const std::string more : {"", "--pack "}) {
    const auto one = run(small_ + more + "--ranks 1 --out one");
    ASSERT_EQ(one.status, 0) << one.err;
    EXPECT_NE(one.err.find("54 examples"), std::string::npos) << one.err;
    EXPECT_EQ(run(small_ + more + "--pp 2 --dp 1 --out two").status, 0);
    EXPECT_EQ(weights("two/checkpoints/step-12"), weights("one/checkpoints/step-12")) << more;
    fs::remove_all(path("one")), fs::remove_all(path("two"));
  }
}

// Where the order of sums is another one the losses are the same but for rounding.
TEST_F(TuningTest, LossesAreThoseOfOneRank) {
  const auto last_loss = [&](const std::string& plan) {
    const auto ran = run(small_ + "--pack --out run " + plan);
    EXPECT_EQ(ran.status, 0) << plan << ran.err;
    const std::string all = read_file(path("run/metrics.jsonl"));
    fs::remove_all(path("run"));
    return std::stod(all.substr(all.rfind("\"loss\":") + 7));
  };
  const double one = last_loss("--ranks 1");
  for (const char* plan : {"--dp 2 --zero 3", "--dp 1 --tp 2 --sp", "--dp 1 --cp 2"})
    EXPECT_NEAR(last_loss(plan), one, 1e-4 * one) << plan;
}

TEST_F(TuningTest, ARunIsPickedUpInItsOrder) {
  ASSERT_EQ(run(small_ + "--pack --ranks 1 --out whole").status, 0);
  ASSERT_EQ(run(small_ + "--pack --ranks 1 --out part --steps 12 --save-every 5").status, 0);
  fs::remove_all(path("part/checkpoints/step-12"));
  ASSERT_EQ(run("train --resume --out part").status, 0);
  EXPECT_EQ(weights("part/checkpoints/step-12"), weights("whole/checkpoints/step-12"));
}

TEST_F(TuningTest, MistakesAreNamed) {
  std::ofstream(path("bad.jsonl")) << R"({"prompt": "a", "completion": "b"})"
                                   << "\n"
                                   << R"({"prompt": "a"})"
                                   << "\n";
  expect_failure("train --data bad.jsonl --out run", 4, "bad.jsonl:2: expected input_ids, messages, conversations");
  expect_failure("train --data bad.jsonl --skip-bad --out run", 4, "expected at least 2");
  expect_failure("train --data text.txt --pack --out run", 2, "--pack: goes with --data FILE.jsonl");
  expect_failure(small_ + "--context 8 --out run", 4, "no token to train on");
  expect_failure(small_ + "--dp-mode ps-async --ranks 2 --out run", 2, "--dp-mode");
  expect_failure(small_ + "--template alpha --out run", 2, "--template");
  EXPECT_FALSE(fs::exists(path("run")));
}

// The page on fine-tuning: its commands run in order, in a folder that has what the page names, and print what it shows
// but for numbers.

using test::Lines;

// Numbers may differ from machine to machine, what the model makes of a word too, and with them how wide columns are.
std::string without_numbers(const std::string& line) {
  const std::regex number("[0-9][0-9.e+-]*|two|three|four|five|six|seven|eight");
  return std::regex_replace(std::regex_replace(line, number, "#"), std::regex(" +"), " ");
}

TEST(FineTuningPage, SaysWhatIsPrinted) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "many times slower with sanitizers";
#endif
  if (!test::is_drawn(0, 3)) GTEST_SKIP() << "a minute; TESSERA_DRAW draws every third time";
  const fs::path source = TESSERA_SOURCE_DIR;
  const TemporaryDirectory folder(fs::temp_directory_path() / "tessera-page-");
  fs::create_directory_symlink(source / "examples", folder.path() / "examples");
  fs::create_symlink(source / "README.md", folder.path() / "README.md");
  fs::create_symlink(TESSERA_BINARY, folder.path() / "tessera");
  const Lines page = test::lines_of(read_file(source / "docs/fine_tuning.md"));
  size_t commands = 0;
  for (size_t i = 0; i + 2 < page.size(); ++i) {
    if (page[i] != "```console") continue;
    ASSERT_TRUE(page[i + 1].starts_with("$ ./tessera ")) << page[i + 1];
    const std::string command = page[i + 1].substr(2);
    const int status = std::system(
        fmt::format("cd '{}' && TESSERA_CACHE=cache {} > out.txt 2> err.txt", folder.path().string(), command).c_str());
    ASSERT_EQ(status, 0) << command << "\n" << read_file(folder.path() / "err.txt");
    ++commands;
    if (page[i + 3] != "```") continue;
    Lines shown;
    size_t at = i + 4;
    for (; page[at] != "```"; ++at) shown.push_back(without_numbers(page[at]));
    Lines found;
    for (const std::string& line : test::lines_of(read_file(folder.path() / "out.txt")))
      found.push_back(without_numbers(line));
    EXPECT_EQ(shown, test::left_out(shown, found)) << command;
    i = at;
  }
  EXPECT_GE(commands, 9u);
}

}  // namespace
}  // namespace tessera
