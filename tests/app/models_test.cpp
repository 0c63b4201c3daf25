// Import and export of models: checkpoint import, export and inspect, and train --init.

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <fstream>
#include <map>
#include <optional>
#include <string>

#include "data/safetensors.h"
#include "tests/app/program.h"

namespace tessera {

namespace {

class ModelsTest : public ProgramTest {
 protected:
  Safetensors tensors(const std::string& checkpoint, const char* file = "model.safetensors") const {
    return Safetensors(path(checkpoint) / file);
  }
  std::string generated(const std::string& from) const {
    return must("generate " + from + " --prompt Line --tokens 8 --seed 3 --threads-per-rank 1").out;
  }
  const std::string base_ = "train " + kSmall + "--model llama-nano --layers 2 --tokenizer bytes --steps 5 --out base ";
  const std::string next_ = " --data text.txt --batch 4 --steps 1 --lr 0 --min-lr 0 --threads-per-rank 1 --out next ";
};

class ImportExportTest : public ModelsTest {
 protected:
  // Creates a run "base" and its exported folder.
  void make_base(const std::string& more) const {
    anew(base_ + more);
    anew("checkpoint export base --out folder");
  }
};

TEST_F(ImportExportTest, ImportAndExportReproduceFilesBytewise) {
  for (const std::string dtype : {"fp32", "bf16"}) {
    make_base("--qkv-bias --proj-bias --untied=false --dtype " + dtype);
    anew("checkpoint import folder --out imported");
    anew("checkpoint export imported --out again");
    EXPECT_EQ(weights("imported/checkpoints/step-0"), weights("base/checkpoints/step-5"));
    for (const char* file : {"model.safetensors", "config.json", "tokenizer.json"})
      EXPECT_EQ(read_file(path("again") / file), read_file(path("folder") / file)) << file;
    EXPECT_EQ(generated("imported"), generated("base"));
    expect_has(run("checkpoint inspect folder").out, "self_attn.q_proj.weight | ");
  }
}

// Foreign keys are noted if they have no effect, otherwise rejected early.
TEST_F(ImportExportTest, PrintsOneNoteForIgnoredConfigurationKeys) {
  make_base("--dtype bf16");
  const auto with = [&, plain = to_json("folder/config.json")](const Json& keys) {
    Json config = plain;
    config.update(keys);
    write("folder/config.json", config.dump());
  };
  const double loss = compute_loss("folder"), short_loss = compute_loss("folder --context 8");
  with({{"of_others", 1}, {"is_llama_config", true}});
  for (const std::string command : {"evaluate folder --data text.txt", "generate folder --tokens 2",
                                    "train --init folder --data text.txt --batch 4 --steps 1 --out next"}) {
    const std::string err = run(command).err,
                      note = "ignored keys without effect on the computation: is_llama_config, of_others\n";
    expect_has(err, note);
    EXPECT_EQ(err.find(note), err.rfind(note)) << command << err;
    const bool computes = command[0] != 't';
    EXPECT_EQ(err.find("folder: stored and computed in bf16; use --dtype fp32") != err.npos, computes) << err;
  }
  EXPECT_EQ(compute_loss("folder"), loss);
  EXPECT_EQ(run("evaluate folder --data text.txt --dtype fp32").err.find("computed in bf16"), std::string::npos);
  with({{"model_type", "mistral"}, {"sliding_window", 4096}});
  EXPECT_EQ(compute_loss("folder"), loss);
  with({{"model_type", "mistral"}, {"sliding_window", 8}});
  EXPECT_EQ(compute_loss("folder --context 8"), short_loss);
  const double slides = compute_loss("folder");
  EXPECT_NE(slides, loss);
  must("generate folder --tokens 2");
  must("checkpoint export folder --out more");
  EXPECT_EQ(to_json("more/config.json").at("sliding_window"), 8);
  EXPECT_EQ(compute_loss("more"), slides);
  fails("train --init folder --window 4 --data text.txt --out run", 2,
        "--window: expected 8, the value of the model, got 4");
}

// The initial loss of a run is the final loss of the run it starts from, for every source of weights and every plan.
TEST_F(ImportExportTest, InitialLossMatchesFinalLossOfSourceRun) {
  make_base("--ranks 1");
  for (const std::string from : {"base", "base/checkpoints/step-5", "folder"})
    for (const char* plan :
         {"--ranks 1", "--dp 2 --zero 3", "--dp 1 --tp 2", "--dp 1 --pp 2", "--dp 2 --dp-mode ps-async"}) {
      anew("train --init " + from + next_ + plan);
      EXPECT_EQ(weights("next/checkpoints/step-1"), weights("base/checkpoints/step-5")) << from << plan;
    }
}

// In bf16 the master weights also start from the model. All windows of a text of one letter are equal, so the loss of
// the first batch equals the loss on the full text, before and after the step.
TEST_F(ImportExportTest, InitialBf16LossMatchesSourceModel) {
  make_base("--dtype bf16 --ranks 1");
  write("text.txt", std::string(3000, 'e'));
  const double loss = compute_loss("base");
  EXPECT_GT(std::abs(loss - std::log(256.0)), 0.5) << "the loss of a new model";
  for (const std::string from : {"base", "folder"})
    for (const auto& [plan, bound] : {std::pair{"--ranks 1", 1e-6},
                                      {"--dp 2 --zero 3", 1e-6},
                                      {"--dp 1 --pp 2", 1e-6},
                                      {"--dp 2 --dp-mode ps-async", 1e-6},
                                      {"--dp 1 --tp 2", 0.02}}) {
      const Ran r = anew("train --init " + from + next_ + plan + " --dtype bf16 --format json");
      std::map<std::string, double> found;
      for (const Json& record : parse_records(r.out))
        for (const char* key : {"loss", "val_loss"}) found[key] = record.value(key, found[key]);
      EXPECT_NEAR(found.at("loss"), loss, bound) << from << plan;
      EXPECT_NEAR(found.at("val_loss"), loss, bound) << from << plan;
    }
}

TEST_F(ImportExportTest, ResumesAfterDeletionOfInitialModel) {
  make_base("--ranks 1");
  must(
      "train --init folder --data text.txt --batch 4 --threads-per-rank 1 --ranks 1 --steps 4 --save-every 2 --keep 2 "
      "--out run");
  fs::remove_all(path("folder"));
  expect_same_checkpoint_after_resume("run/checkpoints/step-4", 2);
}

// A resharded run resumes under its layout and others, generates text, and can be resharded back to the original run.
TEST_F(ImportExportTest, ReshardedRunMatchesOriginalRun) {
  must(base_ + "--ranks 2 --save-every 3 --keep 2");
  const std::string end = weights("base/checkpoints/step-5");
  fs::rename(path("base/checkpoints/step-5"), path("end"));
  must("checkpoint reshard base --out parts --dp 2 --zero 3");
  EXPECT_TRUE(fs::exists(path("parts/checkpoints/step-3/model.rank-1-of-2.safetensors")));
  must("checkpoint reshard base --out cube --pp 2 --dp 2 --tp 2 --zero 1");
  EXPECT_TRUE(fs::exists(path("cube/checkpoints/step-3/optimizer.rank-7-of-8.safetensors")));
  for (const char* from : {"parts", "cube"}) {
    EXPECT_EQ(generated(from), generated("base"));
    anew(fmt::format("checkpoint reshard {} --out back", from));
    for (const char* file : {"model.safetensors", "optimizer.safetensors"}) {
      const Safetensors a(path("base/checkpoints/step-3") / file), b(path("back/checkpoints/step-3") / file);
      ASSERT_EQ(a.tensors().size(), b.tensors().size());
      for (const TensorBytes& t : a.tensors()) EXPECT_TRUE(std::ranges::equal(t.bytes, b.at(t.name).bytes)) << t.name;
    }
    must(fmt::format("train --resume --out {} --dp 2 --pp 1 --tp 1 --zero 3", from));
    EXPECT_EQ(weights(fmt::format("{}/checkpoints/step-5", from)), end) << from;
  }
  fs::remove_all(path("cube/checkpoints/step-5"));
  fs::remove(path("cube/checkpoints/step-3/model.rank-0-of-8.safetensors"));
  fails("train --resume --out cube", 4, "is in none of the files");
  fails("checkpoint reshard base --out other --tp 3", 2, "--tp: 3 does not divide the 2 heads");
  fails("checkpoint reshard base --out other --dp 2 --dp-mode ddp", 2, "unknown option");
  EXPECT_FALSE(fs::exists(path("other")));
}

// Replicas have separate states; the checkpoint in the middle and the validation after step 3 are between the outer
// steps of both fragments.
TEST_F(ImportExportTest, DilocoReplicasResumeFromReshardedCheckpoint) {
  must(base_ + "--dp 2 --dp-mode diloco --sync-every 4 --sync-fragments 2 --save-every 3 --eval-every 3 --keep 2");
  const std::string end = weights("base/checkpoints/step-5");
  fs::remove_all(path("base/checkpoints/step-5"));
  must("checkpoint reshard base --out parts --dp 2 --pp 2 --tp 2");
  EXPECT_TRUE(fs::exists(path("parts/checkpoints/step-3/optimizer.rank-7-of-8.safetensors")));
  must("train --resume --out parts --dp 2 --pp 1 --tp 1");
  EXPECT_EQ(weights("parts/checkpoints/step-5"), end);
  fails(
      "checkpoint reshard base --out other --dp 4", 2,
      "--dp: each data rank of --dp-mode diloco has a separate state; expected 2, the number of data ranks of the run, "
      "got 4");
}

TEST_F(ImportExportTest, RejectsInvalidOptions) {
  make_base("");
  fails("checkpoint", 2, "expected import, export, inspect, quantize or reshard");
  fails("checkpoint export base", 2, "--out: missing; expected a new directory");
  fails("checkpoint export base --out folder", 6, "already exists");
  fails("checkpoint import base --out imported", 4, "config.json is missing");
  fails("checkpoint inspect nowhere", 4, "nowhere: no such file");
  fails("train --init base --layers 3 --out run", 2, "--layers: expected 2, the value of the model, got 3");
  fails("train --init base --model gpt2 --out run", 2, "--model: cannot be combined with --init");
  must("checkpoint import folder --out imported");
  fails("train --resume --out imported", 2, "has no optimizer state; use --init imported");
  fs::resize_file(path("folder/model.safetensors"), 500);
  fails("checkpoint import folder --out other", 4, "model.safetensors");
  EXPECT_FALSE(fs::exists(path("other")) || fs::exists(path("run")));
}

// train --init with adapters: the base is unchanged, only adapters are trained and saved, and they are exported alone
// or merged.

class LoraTest : public ModelsTest {
 protected:
  // Checks that the checkpoint of run "tuned" equals that of `base` plus this number of adapters.
  void expect_only_adapters(const Safetensors& base, size_t adapters) const {
    const Safetensors model = tensors("tuned/checkpoints/step-6"),
                      state = tensors("tuned/checkpoints/step-6", "optimizer.safetensors");
    for (const TensorBytes& t : model.tensors())
      if (is_adapter(t.name))
        --adapters;
      else
        EXPECT_TRUE(std::ranges::equal(t.bytes, base.at(t.name).bytes)) << t.name;
    EXPECT_EQ(adapters, 0U);
    for (const TensorBytes& t : state.tensors()) EXPECT_TRUE(is_adapter(t.name)) << t.name;
  }
  static bool is_adapter(const std::string& name) { return name.find(".lora_") != std::string::npos; }
  const std::string tuned_ =
      "train --init base --data text.txt --batch 4 --steps 6 --warmup 1 --lr 0.01 --threads-per-rank 1 --lora-rank 2 "
      "--lora-alpha 4 --format json --out tuned ";
};

TEST_F(LoraTest, BaseWeightsStayBitwiseIdenticalUnderEveryPlan) {
  must(base_);
  const Safetensors base = tensors("base/checkpoints/step-5");
  std::optional<double> first;
  for (const char* plan : {"--ranks 1", "--dp 2 --zero 3", "--dp 2 --zero 1", "--dp 1 --tp 2 --sp",
                           "--dp 1 --pp 2 --microbatches 2 --schedule zb-h1", "--dp 1 --cp 2"}) {
    SCOPED_TRACE(plan);
    const double loss = anew(tuned_ + plan).last_record().at("loss");
    expect_only_adapters(base, 2 * 2 * 2);  // A and B of q and v, in two layers
    EXPECT_NEAR(loss, first.value_or(loss), 5e-4);
    first = loss;
  }
}

TEST_F(LoraTest, AdaptedRunsResumeAndExport) {
  must(base_);
  must(tuned_ + "--ranks 1 --save-every 3");
  expect_same_checkpoint_after_resume("tuned/checkpoints/step-6", 3);
  const std::string end = weights("tuned/checkpoints/step-6");

  must("checkpoint export tuned --out adapters");
  EXPECT_TRUE(fs::exists(path("adapters/adapter_config.json")));
  EXPECT_LT(fs::file_size(path("adapters/adapter_model.safetensors")),
            fs::file_size(path("base/checkpoints/step-5/model.safetensors")) / 5);
  must("checkpoint import adapters --out imported");
  EXPECT_TRUE(weights("imported/checkpoints/step-0") == end);
  must("checkpoint export tuned --out whole --merge");
  EXPECT_TRUE(fs::exists(path("whole/config.json")));
  expect_has(run("checkpoint inspect adapters").out, "q_proj.lora_A.weight");

  // Foreign adapters can be trained further; a merged model gets new adapters.
  for (const std::string from : {"adapters", "tuned", "whole --lora-rank 3"}) {
    anew("train --init " + from + next_);
    EXPECT_EQ(weights("next/checkpoints/step-1") == end, from != "whole --lora-rank 3") << from;
    if (from == "whole --lora-rank 3") continue;
    anew("checkpoint export next --out onward");  // the original base model, independent of the intermediate runs
    const std::string base = to_json("onward/adapter_config.json").at("base_model_name_or_path");
    EXPECT_EQ(fs::path(base), path("base")) << from;
  }

  const double loss = compute_loss("adapters");
  fs::rename(path("base"), path("moved"));
  EXPECT_EQ(compute_loss("adapters --base moved"), loss);
  must("generate adapters --base moved --tokens 2");
  must("checkpoint inspect adapters --base moved");
  anew("train --init adapters --base moved" + next_);
  fails("evaluate adapters --data text.txt", 4, "specify it with --base FOLDER");
  fails("evaluate whole --base moved --data text.txt", 2, "--base: requires adapters");
  fails("train --base moved --data text.txt --out run", 2, "--base: requires --init ADAPTERS");
}

// Adapters name the directory of their base model independent of the current directory, and reject any other model.
TEST_F(LoraTest, AdaptersReferenceTheirBaseModel) {
  must(base_);
  must(tuned_ + "--ranks 1");
  for (const char* name : {"other", "other/base"}) fs::create_directory(path(name));
  must("checkpoint export ../tuned --out ../adapters", "cd other;");
  must("checkpoint import ../adapters --out ../imported", "cd other;");
  must("train --init ../imported --out ../next" + next_.substr(0, next_.find(" --out")) + " --data ../text.txt",
       "cd other;");
  must("checkpoint export next --out onward");
  const auto hash = [&](const std::string& folder) {
    return Safetensors(path(folder) / "adapter_model.safetensors").metadata().at("base_xxh3");
  };
  for (const char* folder : {"adapters", "onward"}) {
    const Json config = to_json(std::string(folder) + "/adapter_config.json");
    EXPECT_EQ(config.at("base_model_name_or_path"), fs::canonical(path("base")).string());
    EXPECT_EQ(hash(folder), hash("adapters"));
  }
  for (const char* run : {"tuned", "imported", "next"})
    expect_has(read_file(path(run) / "config.toml"), "base-hash = \"" + hash("adapters") + "\"");

  must("train --resume --out tuned --steps 7 --init other/../base");
  fails("train --resume --out tuned --steps 8 --init other", 2, "--init: the run in tuned was started with ");
  fails("train --resume --out base --steps 8 --init other", 2, "started with none; expected the same value, got other");
  Json config = to_json("adapters/adapter_config.json");
  config["base_model_name_or_path"] = "base";
  write("adapters/adapter_config.json", config.dump());
  must("evaluate adapters --data text.txt");
  fs::create_directory(path("adapters/base"));
  fails("evaluate adapters --data text.txt", 4, "base_model_name_or_path: 'base' may be ");
  fs::remove(path("adapters/base"));

  fs::rename(path("base"), path("first"));
  must(base_ + "--seed 2");
  for (const char* args : {"checkpoint export tuned --out x", "checkpoint export onward --out x --merge",
                           "train --resume --out tuned --steps 9", "evaluate adapters --data text.txt",
                           "train --init adapters --data text.txt --out x", "checkpoint import adapters --out x"})
    fails(args, 4, "expected the base model with hash " + hash("adapters") + ", got ");
  must("checkpoint export tuned --out merged --merge");
  must("evaluate adapters --base first --data text.txt");
}

// Adapters that differ between modules are merged into the weights for inference.
TEST_F(LoraTest, MergesAdaptersOfSeveralTypes) {
  must(base_);
  must(tuned_ + "--ranks 1");
  must("checkpoint export tuned --out adapters");
  const double plain = compute_loss("adapters");
  Json config = to_json("adapters/adapter_config.json");
  config["alpha_pattern"] = {{"layers.0.self_attn.q_proj", 400}};
  write("adapters/adapter_config.json", config.dump());
  const double loss = compute_loss("adapters --ranks 1");
  EXPECT_GT(std::abs(loss - plain), 1e-4);
  for (const char* plan : {"--tp 2", "--pp 2", "--dp 2 --zero 3", "--cp 2"})
    EXPECT_NEAR(compute_loss(std::string("adapters ") + plan), loss, 1e-5) << plan;
  must("checkpoint import adapters --out imported");
  must("checkpoint export adapters --merge --out whole");
  must("checkpoint export imported --out again");
  for (const char* from : {"imported", "whole", "again"}) EXPECT_NEAR(compute_loss(from), loss, 1e-6) << from;
  expect_has(run("generate adapters --tokens 2").err, "alpha_pattern: the adapters are merged into the base weights");
  fails("train --init adapters --data text.txt --out x", 4, "alpha_pattern: these adapters cannot be trained further");
  fails("checkpoint export adapters --out x", 4,
        "alpha_pattern: adapters of this kind can only be exported with --merge");
  fails("evaluate adapters --data text.txt --quantize nf4", 2,
        "--quantize: expected none for a model with merged adapters");
}

// Experts stay frozen, and adapters of attention are exported as for a dense model.
TEST_F(LoraTest, ExpertsStayFrozen) {
  must(base_ + "--experts 4");
  const Safetensors base = tensors("base/checkpoints/step-5");
  for (const char* plan : {"--dp 2 --ep 2 --zero 3", "--dp 2 --ep 2", "--dp 1 --tp 2 --sp", "--ranks 1"}) {
    SCOPED_TRACE(plan);
    anew(tuned_ + "--lora-targets all " + plan);
    expect_only_adapters(base, 2 * 4 * 2);  // A and B of q, k, v and o, in two layers
  }
  const std::string end = weights("tuned/checkpoints/step-6");
  must("checkpoint export tuned --out adapters");
  must("checkpoint import adapters --out imported");
  EXPECT_TRUE(weights("imported/checkpoints/step-0") == end);
  must("checkpoint export tuned --out whole --merge");
  expect_has(run("checkpoint inspect whole").out, "block_sparse_moe.experts.3.w2.weight");
  fails("train --init base --lora-rank 2 --lora-targets q_proj,up_proj --out run", 2,
        "--lora-targets: expected one or more of q_proj, k_proj, v_proj, o_proj (experts have no adapters), got "
        "'up_proj'");
}

TEST_F(LoraTest, RejectsInvalidOptions) {
  must(base_);
  fails("train --data text.txt --lora-rank 2 --out run", 2, "--lora-rank: requires --init");
  fails("train --init base --lora-alpha 2 --out run", 2, "--lora-alpha: requires --lora-rank");
  fails("train --init base --lora-rank 2 --lora-targets q_proj,c_attn --out run", 2, "got 'c_attn'");
  fails("train --init base --lora-rank 2 --dp 2 --dp-mode ps-async --out run", 2,
        "--lora-rank: not supported with --dp-mode ps-async");
  fails("checkpoint export base --merge --out whole", 2, "--merge: requires adapters");
  must(tuned_);
  fails("train --init tuned --lora-rank 2 --out run", 2, "--lora-rank: expected only --lora-dropout");
  fails("train --resume --out tuned --lora-alpha 5", 2, "lora_scale");
  must("checkpoint export tuned --out adapters");
  fs::rename(path("base"), path("gone"));
  fails("checkpoint export adapters --merge --out whole", 4, "base_model_name_or_path");
  EXPECT_FALSE(fs::exists(path("whole")) || fs::exists(path("run")));
}

// train --quantize: a 4-bit base with the same bytes under every plan, saved without conversion and dequantized on
// export.

class QuantizeTest : public ModelsTest {
 protected:
  const std::string base_ =
      "train --data text.txt --model llama-nano --layers 1 --context 16 --tokenizer bytes --batch 4 --steps 3 --warmup "
      "2 --threads-per-rank 1 --no-eval --out base ";
  const std::string tuned_ =
      "train --init base --data text.txt --batch 4 --steps 4 --warmup 1 --lr 0.01 --threads-per-rank 1 --lora-rank 2 "
      "--quantize nf4 --no-eval --out tuned ";
};

TEST_F(QuantizeTest, QuantizedBaseIsIdenticalUnderEveryPlan) {
  must(base_);
  std::map<std::string, std::string> first;
  for (const char* plan : {"--ranks 1", "--dp 2 --zero 3", "--dp 1 --tp 2 --sp", "--dp 1 --cp 2"}) {
    anew(tuned_ + plan);
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
  }
}

TEST_F(QuantizeTest, QuantizedRunsResumeAndExport) {
  must(base_);
  must(tuned_ + "--ranks 1 --save-every 2");
  const std::string end = weights("tuned/checkpoints/step-4");
  fs::rename(path("base"), path("gone"));  // the run needs no other files
  expect_same_checkpoint_after_resume("tuned/checkpoints/step-4", 2);
  const double loss = compute_loss("tuned");
  EXPECT_NEAR(compute_loss("tuned --dp 1 --tp 2"), loss, 1e-5);
  must("generate tuned --tokens 5 --temperature 0");

  // The exported weights are the dequantized ones that the run computes with, with adapters merged.
  expect_has(must("checkpoint export tuned --out whole --merge").out, "4-bit weights were dequantized");
  EXPECT_NEAR(compute_loss("whole"), loss, 1e-5);

  // Adapters alone, with a base that is quantized again.
  fs::rename(path("gone"), path("base"));
  must("checkpoint export tuned --out adapters");
  EXPECT_NEAR(compute_loss("adapters --quantize nf4"), loss, 1e-6);
  EXPECT_NE(compute_loss("adapters"), loss);
  must("checkpoint reshard tuned --dp 1 --tp 2 --zero 3 --out parts");
  EXPECT_NEAR(compute_loss("parts"), loss, 1e-6);

  // A tuned model can be trained further without changes.
  const auto next =
      must("train --init tuned --data text.txt --batch 4 --steps 1 --lr 0 --min-lr 0 --no-eval --out next");
  EXPECT_TRUE(weights("next/checkpoints/step-1") == end);
}

TEST_F(QuantizeTest, RejectsInvalidOptions) {
  must(base_);
  fails("train --init base --data text.txt --quantize nf4 --out run", 2,
        "--quantize: nf4 requires --lora-rank, because 4-bit weights are frozen");
  fails("train --init base --data text.txt --lora-rank 2 --quantize-group 64 --out run", 2,
        "--quantize-group: requires --quantize gptq, got none");
  fails("train --init base --data text.txt --lora-rank 2 --quantize gptq --out run", 2,
        "--quantize: gptq requires a model quantized by tessera checkpoint quantize");
  fails("verify --model llama-nano --channels 64 --ffn 128 --lora-rank 2 --quantize nf4 --dp 1 --tp 2", 2,
        "--tp: 'blocks.0.attn.proj.weight' (64, 64) would be sharded at multiples of 32 elements");
  must(tuned_);
  fails("train --resume --out tuned --quantize none", 2, "quantize");
  fails("train --init tuned --data text.txt --quantize gptq --out run", 2,
        "--quantize: expected nf4, the value of the model, got gptq");
}

// checkpoint quantize: a folder that every command reads bitwise identically, and one-line errors.

class GptqTest : public ModelsTest {
 protected:
  const std::string base_ =
      "train --data text.txt --model llama-nano --layers 1 --heads 2 --channels 32 --ffn 64 --context 16 --tokenizer "
      "bytes --batch 4 --steps 40 --lr 0.01 --warmup 2 --ranks 1 --threads-per-rank 1 --eval-every 0 --out base ";
  const std::string quantize_ =
      "checkpoint quantize base --calibrate text.txt --windows 32 --group 16 --threads-per-rank 1 ";
};

TEST_F(GptqTest, EveryCommandReadsQuantizedModel) {
  must(base_);
  const Ran made = must(quantize_ + "--method gptq --bits 4 --out small");
  EXPECT_EQ(made.out, "base quantized to small: 4-bit layers in groups of 16, by GPTQ\n");
  expect_has(made.err, "blocks.0.mlp.down.weight (32, 64): ");
  must("checkpoint quantize base --method rtn --group 16 --out rounded");
  const double before = compute_loss("base"), rounded = compute_loss("rounded"), small = compute_loss("small");
  EXPECT_LT(small - before, rounded - before);
  EXPECT_LT(fs::file_size(path("small/model.safetensors")),
            fs::file_size(path("base/checkpoints/step-40/model.safetensors")));
  expect_has(run("checkpoint inspect small").out, "4-bit layers in groups of 16 (GPTQ)");

  // A run imported from it has the dequantized weights and computes the same results.
  must("checkpoint import small --out again");
  EXPECT_NEAR(compute_loss("again"), small, 1e-6);
  EXPECT_EQ(generated("small --temperature 0"), generated("again --temperature 0"));
  const std::string tune = " --lora-rank 2 --data text.txt --batch 4 --steps 1 --ranks 1 --threads-per-rank 1 --out ";
  must("train --init small" + tune + "tuned");
  // A group per row: layers with 32 and 64 inputs have one scale per row.
  for (const char* method : {"gptq", "rtn"}) {
    const Ran by_rows = anew(quantize_ + "--group -1 --out rows --method " + method);
    expect_has(by_rows.out, ": 4-bit layers in rows, by ");
    EXPECT_EQ(to_json("rows/quantize_config.json").at("group_size"), -1);
    const Safetensors stored(path("rows/model.safetensors"), true);
    for (const TensorBytes& t : stored.tensors())
      EXPECT_TRUE(!t.name.ends_with(".scales") || t.shape[0] == 1) << t.name;
    expect_has(run("checkpoint inspect rows").out, "4-bit layers in rows (GPTQ)");
    EXPECT_GT(compute_loss("rows"), before);
  }
  must("train --init rows" + tune + "by-rows");
  expect_has(read_file(path("by-rows/config.toml")), "quantize-group = -1\n");
  fails(quantize_ + "--out small", 6, "--out: ");
  fails("checkpoint quantize small --calibrate text.txt --out other", 2, "expected a model that is not quantized");
  fails("checkpoint quantize tuned --calibrate text.txt --out other", 2, "expected a model without adapters");
}

TEST_F(GptqTest, RejectsInvalidOptions) {
  must(base_);
  fails("checkpoint quantize base --out other", 2, "--calibrate: required by --method gptq");
  fails("checkpoint quantize base --calibrate nowhere.txt --out other", 4, "nowhere.txt");
  fails("checkpoint quantize base --calibrate text.txt", 2, "--out: missing; expected a new directory");
  fails("checkpoint quantize base --calibrate text.txt --out other", 2,
        "--group: expected a divisor of the 32 inputs of blocks.0.attn.qkv, got 128 (-1: full rows)");
  for (const char* none : {"0", "-2"})  // the later option takes precedence
    fails(quantize_ + "--out other --group " + none, 2, "--group: expected");
  fails(quantize_ + "--bits 3 --out other", 2, "--bits");
  fails(quantize_ + "--method awq --out other", 2, "--method");
  fails(quantize_ + "--windows 0 --out other", 2, "--windows");
  fails(quantize_ + "--train-on all --out other", 2, "--train-on: requires --calibrate FILE.jsonl");
  train("--model llama-nano --tokenizer bytes --steps 1 --warmup 0 --ranks 1 --eval-every 0 --out narrow");
  fails("checkpoint quantize narrow --calibrate text.txt --group 16 --out other", 2,
        "GPTQ files require multiples of 32");
  EXPECT_FALSE(fs::exists(path("other")));
}

// Training on examples.

class FineTuningTest : public ModelsTest {
 protected:
  FineTuningTest() {
    std::ofstream file(path("sums.jsonl"));
    for (int i = 0; i < 60; ++i)
      file << fmt::format(R"({{"prompt": "{} and {} are ", "completion": "{}"}})", i, i % 7, i + i % 7) << "\n";
  }
  const std::string small_ =
      "train " + kSmall +
      "--data sums.jsonl --layers 2 --context 32 --batch 8 --microbatches 2 --lr 0.001 --tie-copies ";
};

TEST_F(FineTuningTest, CheckpointsMatchOneRankUnderEveryPlan) {
  for (const std::string more : {"", "--pack "}) {
    expect_has(anew(small_ + more + "--ranks 1 --out one").err, "54 examples");
    anew(small_ + more + "--pp 2 --dp 1 --out two");
    EXPECT_EQ(weights("two/checkpoints/step-12"), weights("one/checkpoints/step-12")) << more;
  }
}

// If the reduction order differs, losses are equal up to rounding.
TEST_F(FineTuningTest, LossesMatchOneRank) {
  const auto last_loss = [&](const std::string& plan) {
    return anew(small_ + "--pack --format json --out run " + plan).last_record().at("loss").get<double>();
  };
  const double one = last_loss("--ranks 1");
  for (const char* plan : {"--dp 2 --zero 3", "--dp 1 --tp 2 --sp", "--dp 1 --cp 2"})
    EXPECT_NEAR(last_loss(plan), one, 1e-4 * one) << plan;
}

TEST_F(FineTuningTest, ResumesWithSameExampleOrder) {
  must(small_ + "--pack --ranks 1 --out whole");
  must(small_ + "--pack --ranks 1 --out part --save-every 5");
  expect_same_checkpoint_after_resume("part/checkpoints/step-12", 10);
  EXPECT_EQ(weights("part/checkpoints/step-12"), weights("whole/checkpoints/step-12"));
}

TEST_F(FineTuningTest, RejectsInvalidOptions) {
  write("bad.jsonl", "{\"prompt\": \"a\", \"completion\": \"b\"}\n{\"prompt\": \"a\"}\n");
  fails("train --data bad.jsonl --out run", 4, "bad.jsonl:2: expected input_ids, messages, conversations");
  fails("train --data bad.jsonl --skip-bad --out run", 4, "expected at least 2");
  fails("train --data text.txt --pack --out run", 2, "--pack: requires --data FILE.jsonl");
  fails(small_ + "--context 8 --out run", 4, "no token to train on");
  fails(small_ + "--dp-mode ps-async --ranks 2 --out run", 2, "--dp-mode");
  fails(small_ + "--template alpha --out run", 2, "--template");
  EXPECT_FALSE(fs::exists(path("run")));
}

}  // namespace
}  // namespace tessera
