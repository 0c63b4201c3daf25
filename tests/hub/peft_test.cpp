// Adapters in the form of the PEFT library: what it computed with them, Tessera computes with its folder, gradients and
// all; what is written is read back the same; merged weights compute the same; what is damaged is refused in one line.
#include "hub/peft.h"

#include "models/adapters/adapters.h"
#include "tests/hub/support.h"

namespace tessera {
namespace {

constexpr const char* kVariants[] = {"gpt2", "grouped"};

// The tensors of a fixture that are adapters.
std::vector<TensorBytes> adapters_of(const Safetensors& fixture) {
  std::vector<TensorBytes> out;
  for (const TensorBytes& t : fixture.tensors())
    if (t.name.starts_with("base_model.")) out.push_back(t);
  return out;
}

class PeftFolderTest : public HubTest {
 protected:
  // The fixture's base and its adapters as folders, and what the library computed.
  void make_folders(const std::string& variant) {
    for (const char* name : {"base", "adapters"}) emptied(name);
    model_ = std::make_unique<Safetensors>(fixture_of(variant));
    adapters_ = std::make_unique<Safetensors>(fixture_of("lora_" + variant));
    file("base/config.json", model_->metadata().at("config"));
    write_safetensors(path("base/model.safetensors"), weights_of(*model_));
    write_config(with(Json::parse(adapters_->metadata().at("adapter_config")), "base_model_name_or_path", "../base"));
    write_safetensors(path("adapters/adapter_model.safetensors"), adapters_of(*adapters_));
  }
  void write_config(const Json& config) const { write("adapters/adapter_config.json", config); }
  Json config() const { return json("adapters/adapter_config.json"); }
  // The adapters beside their base.
  struct Both {
    PeftFolder folder;
    HubFolder base;
    ModelConfig config;
    WholeTensors tensors() const { return folder.tensors(config, base.tensors()); }
  };
  Both both(const char* name = "adapters") const {
    PeftFolder folder(path(name));
    HubFolder base(folder.base());
    ModelConfig config = folder.config(base.config());
    return {std::move(folder), std::move(base), std::move(config)};
  }
  void expect_refused(const std::string& words) const {
    expect_error(Status::input, {words}, [&] { both().tensors(); });
  }
  double expected_loss() const { return static_cast<double>(floats(adapters_->at("loss")).at(0)); }
  std::unique_ptr<Safetensors> model_, adapters_;
};

TEST_F(PeftFolderTest, ComputesWhatPeftComputedIsWrittenAsItWasReadAndMergedComputesTheSame) {
  for (const char* variant : kVariants) {
    make_folders(variant);
    const Both b = both();
    const auto model = model_of(b.config, b.tensors());
    EXPECT_NEAR(loss_of(*model, *model_), expected_loss(), 1e-5) << variant;
    const Tensor targets = rows_of(*model_, "targets");
    backward(model->loss(rows_of(*model_, "ids"), targets, 1.0 / static_cast<double>(targets.numel())).mean);
    size_t compared = 0;
    for (const PeftTensor& t : peft_tensors(b.config))
      for (const Parameter* p : model->parameters()) {
        if (p->name != t.ours) continue;
        expect_near(p->var.grad().to_vector<float>(), floats(adapters_->at("grad." + t.theirs)), t.theirs);
        ++compared;
      }
    EXPECT_EQ(compared, peft_tensors(b.config).size());
    EXPECT_EQ(2 * compared + 1, adapters_->tensors().size()) << variant;
    write_peft_folder(emptied("again"), b.config, DType::float32, b.tensors(), "../base");
    const Safetensors found(path("again/adapter_model.safetensors"));
    const std::vector<TensorBytes> expected = adapters_of(*adapters_);
    ASSERT_EQ(found.tensors().size(), expected.size());
    for (const TensorBytes& t : expected) EXPECT_TRUE(std::ranges::equal(found.at(t.name).bytes, t.bytes)) << t.name;
    EXPECT_EQ(both("again").config.lora, b.config.lora);
    write_hub_folder(emptied("merged"), merged(b.config), {DType::float32, merged(b.config, b.tensors())});
    EXPECT_NEAR(loss_of(*model_of(HubFolder(path("merged"))), *model_), expected_loss(), 1e-5) << variant;
  }
}

// Adapters of attention in a Mixtral; its experts have none.
TEST_F(PeftFolderTest, AdaptersBesideExpertsHaveTheNamesOfThoseOfALlama) {
  ModelConfig dense{.family = Family::llama, .layers = 2, .heads = 2, .channels = 8, .context = 6, .vocab = 11};
  dense.kv_heads = 1;
  dense.lora = {.rank = 2, .alpha = 4, .targets = {"q_proj", "v_proj", "o_proj"}, .starts_idle = false};
  ModelConfig config = dense;
  config.experts = {.count = 4};
  const std::vector<PeftTensor> all = peft_tensors(config), expected = peft_tensors(dense);
  ASSERT_EQ(all.size(), expected.size());
  for (size_t i = 0; i < all.size(); ++i) EXPECT_EQ(all[i].theirs, expected[i].theirs);
  const auto model = drawn_model(config);
  const WholeTensors source = tensors_of(*model);
  write_peft_folder(emptied("made"), config, DType::float32, source, "../base");
  const PeftFolder folder(path("made"));
  ModelConfig base = merged(config);
  const ModelConfig read = folder.config(base);
  EXPECT_EQ(read.lora.targets, config.lora.targets);
  const auto again = model_of(read, folder.tensors(read, source));
  const auto whole = model_of(base, merged(config, source));
  const Tensor ids = Tensor::of<int32_t>(std::vector<int32_t>{1, 2, 3, 4, 5, 6}, {1, 6}, make_arena());
  const NoGrad no_grad;
  const double loss = model->loss(ids, ids, 1).loss_sum;
  EXPECT_EQ(again->loss(ids, ids, 1).loss_sum, loss);
  EXPECT_NEAR(whole->loss(ids, ids, 1).loss_sum, loss, 1e-5 * loss);
  write("made/adapter_config.json", with(json("made/adapter_config.json"), "target_modules", {"q_proj", "w1"}));
  expect_error(Status::input, {"no layer 'w1' that adapts; expected some of q_proj, k_proj, v_proj, o_proj"},
               [&] { PeftFolder(path("made")).config(base); });
}

// Other spellings of the same adapters, as PEFT 0.21 reads them, compute the same.
TEST_F(PeftFolderTest, OtherSpellingsComputeTheSame) {
  make_folders("grouped");
  const Json good = config();
  const auto expect_same = [&](size_t notes) {
    const Both b = both();
    EXPECT_NEAR(loss_of(*model_of(b.config, b.tensors()), *model_), expected_loss(), 1e-5);
    EXPECT_EQ(b.folder.notes().size(), notes);
  };
  const std::string any = "q_proj|k_proj|v_proj|o_proj|gate_proj|up_proj|down_proj";
  const Json list{"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"};
  Json more = list;
  more.push_back("c_attn");  // of no layer here
  const std::tuple<const char*, Json, size_t> same[] = {
      {"target_modules", ".*\\.(" + any + ")", 0},
      {"target_modules", "^(model)(?!.*(lm_head|output|emb|wte|shared)).*\\.(?:" + any + ")$", 0},
      {"target_modules", list, 0},
      {"target_modules", "all-linear", 0},
      {"target_modules", more, 0},
      {"exclude_modules", "lm_head", 0},
      {"exclude_modules", {"lm_head", "layers.7"}, 0},
      {"layers_to_transform", {0, 1}, 0},
      {"rank_pattern", {{".*", good.at("r")}}, 0},
      {"init_lora_weights", "gaussian", 0},
      {"init_lora_weights", "eva", 0},
      {"runtime_config", {{"ephemeral_gpu_offload", false}}, 0},
      {"a_key_of_2027", 1, 1},
      {"lora_dropout", 0.5, 0},
      {"fan_in_fan_out", true, 0}};
  for (const auto& [key, value, notes] : same) {
    SCOPED_TRACE(std::string(key) + " " + value.dump());
    write_config(with(good, key, value));
    expect_same(notes);
  }
  write_config(good);
  const std::vector<TensorBytes> plain = adapters_of(*adapters_);
  const std::function<std::string(const std::string&)> left[] = {
      [](const std::string& name) { return "module." + name; },
      [](const std::string& name) { return "base_model.model." + name; },
      [](std::string name) { return name.insert(name.find("layers."), "_orig_mod."); },
      [](std::string name) { return name.insert(name.rfind(".weight"), ".default"); }};
  for (const auto& change : left) {
    auto renamed = plain;
    for (TensorBytes& t : renamed) t.name = change(t.name);
    SCOPED_TRACE(renamed[0].name);
    write_safetensors(path("adapters/adapter_model.safetensors"), renamed);
    expect_same(1);
  }
  fs::rename(path("base"), path("elsewhere"));
  const PeftFolder folder(path("adapters"));
  EXPECT_THROW((void)folder.base(), InputError);
  EXPECT_EQ(folder.base(path("elsewhere").string()), path("elsewhere"));
}

TEST_F(PeftFolderTest, WhatIsOtherwiseIsRefusedByName) {
  make_folders("grouped");
  const Json good = config();
  const std::tuple<const char*, Json, const char*> wrong[] = {
      {"peft_type", "IA3", "peft_type': expected \"LORA\""},
      {"bias", "all", "bias': expected \"none\""},
      {"use_dora", true, "use_dora': expected nothing, found true"},
      {"lora_bias", true, "lora_bias': expected nothing"},
      {"modules_to_save", {"lm_head"}, "modules_to_save': expected nothing"},
      {"trainable_token_indices", {1}, "trainable_token_indices': expected nothing"},
      {"rank_pattern", {{"q_proj", 2}}, "rank_pattern': expected"},
      {"alpha_pattern", {{"q_proj", 2}}, "alpha_pattern': expected"},
      {"r", 0, "r': expected a size"},
      {"r", 5, "tensor 'base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight'"},
      {"lora_alpha", "8", "lora_alpha': expected a number"},
      {"target_modules", {"q_proj", "lm_head"}, "has no layer 'lm_head'"},
      {"target_modules", {"nothing"}, "has no layer 'nothing'"},
      {"target_modules", "(q_proj", "target_modules: '(q_proj' is no regular expression"},
      {"target_modules", ".*nothing", "target_modules: no layer of the base"},
      {"target_modules", {"q_proj"}, "expected those of"},
      {"target_modules", Json(), "target_modules': expected a list of layers, a regular expression, or all-linear"},
      {"layers_to_transform", 0, "layers_to_transform: 1 of 2 layers have q_proj; expected all of them or none"},
      {"exclude_modules", ".*layers\\.1\\..*", "target_modules: 1 of 2 layers have q_proj"},
      {"base_model_name_or_path", "nowhere", "expected the folder of a model, found 'nowhere'; --base FOLDER"}};
  for (const auto& [key, value, words] : wrong) {
    write_config(with(good, key, value));
    expect_refused(words);
  }
  // First values that change the weights of the base: all of PEFT 0.21's and those to come.
  for (const char* value : {"pissa", "pissa_niter_16", "olora", "OLoRA", "corda", "loftq", "lora_ga", "of_2027"}) {
    write_config(with(good, "init_lora_weights", value));
    expect_refused("init_lora_weights': expected true, gaussian, eva or orthogonal (others change");
  }
  write_config(good);
  auto fewer = adapters_of(*adapters_);
  fewer.pop_back();
  write_safetensors(path("adapters/adapter_model.safetensors"), fewer);
  expect_refused("lora_");
  fs::remove(path("adapters/adapter_model.safetensors"));
  expect_refused("no adapter_model.safetensors");
}

}  // namespace
}  // namespace tessera
