// PEFT adapters: results and gradients match those of the library; written adapters are read back identically; merged
// weights give the same results; corrupt files are rejected with one line.
#include "hub/peft.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <span>
#include <string>
#include <tuple>
#include <vector>

#include "models/adapters/adapters.h"
#include "tests/hub/support.h"

namespace tessera {
namespace {

constexpr const char* kVariants[] = {"gpt2", "grouped"};

// The tensors of a fixture that belong to adapters.
std::vector<TensorBytes> adapter_tensors(const Safetensors& fixture) {
  std::vector<TensorBytes> out;
  for (const TensorBytes& t : fixture.tensors())
    if (t.name.starts_with("base_model.")) out.push_back(t);
  return out;
}

class PeftFolderTest : public HubTest {
 protected:
  // The fixture's base and adapters as directories, and the library's results.
  void make_folders(const std::string& variant) {
    for (const char* name : {"base", "adapters"}) emptied(name);
    model_ = std::make_unique<Safetensors>(open_fixture(variant));
    adapters_ = std::make_unique<Safetensors>(open_fixture("lora_" + variant));
    file("base/config.json", model_->metadata().at("config"));
    write_safetensors(path("base/model.safetensors"), fixture_weights(*model_));
    write_config(with(Json::parse(adapters_->metadata().at("adapter_config")), "base_model_name_or_path", "../base"));
    write_safetensors(path("adapters/adapter_model.safetensors"), adapter_tensors(*adapters_));
  }
  void write_config(const Json& config) const { write("adapters/adapter_config.json", config); }
  Json config() const { return json("adapters/adapter_config.json"); }
  // The adapters and their base.
  struct Both {
    PeftFolder folder;
    std::unique_ptr<HubFolder> base;
    Adapted adapted;
    ModelConfig config;
    const FullTensors& tensors() const { return adapted.tensors; }
  };
  Both both(const char* name = "adapters") const {
    PeftFolder folder(path(name));
    auto base = std::make_unique<HubFolder>(folder.base());
    Adapted adapted = folder.apply_to(base->config(), base->tensors());
    ModelConfig config = adapted.config;
    return {std::move(folder), std::move(base), std::move(adapted), std::move(config)};
  }
  void expect_refused(const std::string& message) const {
    expect_error(Status::input, {message}, [&] { both().tensors(); });
  }
  double expected_loss() const { return static_cast<double>(floats(adapters_->at("loss")).at(0)); }
  std::unique_ptr<Safetensors> model_, adapters_;
};

TEST_F(PeftFolderTest, AdaptersRoundTripAndMergedOutputMatchesPeft) {
  for (const char* variant : kVariants) {
    make_folders(variant);
    const Both b = both();
    const auto model = load_model(b.config, b.tensors());
    EXPECT_NEAR(compute_loss(*model, *model_), expected_loss(), 1e-5) << variant;
    const Tensor targets = make_rows(*model_, "targets");
    backward(model->loss(make_rows(*model_, "ids"), targets, 1.0 / static_cast<double>(targets.numel())).mean);
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
    const std::vector<TensorBytes> expected = adapter_tensors(*adapters_);
    ASSERT_EQ(found.tensors().size(), expected.size());
    for (const TensorBytes& t : expected) EXPECT_TRUE(std::ranges::equal(found.at(t.name).bytes, t.bytes)) << t.name;
    EXPECT_EQ(both("again").config.lora, b.config.lora);
    write_hub_folder(emptied("merged"), merged(b.config), {DType::float32, merged(b.config, b.tensors())});
    EXPECT_NEAR(compute_loss(*load_model(HubFolder(path("merged"))), *model_), expected_loss(), 1e-5) << variant;
  }
}

// Adapters of attention in a Mixtral; its experts have none.
TEST_F(PeftFolderTest, ReadsAttentionAdaptersOfMixtral) {
  ModelConfig dense{.family = Family::llama, .layers = 2, .heads = 2, .channels = 8, .context = 6, .vocab = 11};
  dense.kv_heads = 1;
  dense.lora = {.rank = 2, .alpha = 4, .targets = {"q_proj", "v_proj", "o_proj"}, .starts_idle = false};
  ModelConfig config = dense;
  config.experts = {.count = 4};
  const std::vector<PeftTensor> all = peft_tensors(config), expected = peft_tensors(dense);
  ASSERT_EQ(all.size(), expected.size());
  for (size_t i = 0; i < all.size(); ++i) EXPECT_EQ(all[i].theirs, expected[i].theirs);
  const auto model = random_model(config);
  const FullTensors source = make_tensors(*model);
  write_peft_folder(emptied("made"), config, DType::float32, source, "../base");
  const PeftFolder folder(path("made"));
  ModelConfig base = merged(config);
  const Adapted read = folder.apply_to(base, source);
  EXPECT_EQ(read.config.lora.targets, config.lora.targets);
  const auto again = load_model(read.config, read.tensors);
  const auto merged_model = load_model(base, merged(config, source));
  const Tensor ids = Tensor::of<int32_t>(std::vector<int32_t>{1, 2, 3, 4, 5, 6}, {1, 6}, make_arena());
  const NoGrad no_grad;
  const double loss = model->loss(ids, ids, 1).loss_sum;
  EXPECT_EQ(again->loss(ids, ids, 1).loss_sum, loss);
  EXPECT_NEAR(merged_model->loss(ids, ids, 1).loss_sum, loss, 1e-5 * loss);
  write("made/adapter_config.json", with(json("made/adapter_config.json"), "target_modules", {"q_proj", "w1"}));
  expect_error(Status::input, {"no adaptable layer 'w1'; expected one or more of q_proj, k_proj, v_proj, o_proj"},
               [&] { PeftFolder(path("made")).apply_to(base, source); });
}

// Other formats of the same adapters, as read by PEFT 0.21, give the same results.
TEST_F(PeftFolderTest, AcceptsAlternativeFormats) {
  make_folders("grouped");
  const Json good = config();
  const auto expect_same = [&](size_t notes) {
    const Both b = both();
    EXPECT_NEAR(compute_loss(*load_model(b.config, b.tensors()), *model_), expected_loss(), 1e-5);
    EXPECT_EQ(b.adapted.merged, "");
    EXPECT_EQ(b.folder.notes().size(), notes);
  };
  const std::string any = "q_proj|k_proj|v_proj|o_proj|gate_proj|up_proj|down_proj";
  const Json list{"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"};
  Json more = list;
  more.push_back("c_attn");  // a name of no layer
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
  const std::vector<TensorBytes> plain = adapter_tensors(*adapters_);
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

TEST_F(PeftFolderTest, ErrorsNameUnsupportedSettings) {
  make_folders("grouped");
  const Json good = config();
  const std::tuple<const char*, Json, const char*> wrong[] = {
      {"peft_type", "IA3", "peft_type': expected \"LORA\""},
      {"bias", "some", "bias': expected \"none\", all or lora_only"},
      {"use_dora", true, "no tensor 'base_model.model.model.layers.0.self_attn.q_proj.lora_magnitude_vector'"},
      {"lora_bias", true, "lora_bias: the base's 'model.layers.0.self_attn.q_proj' has no bias"},
      {"modules_to_save", {"lm_head"}, "no tensor 'base_model.model.lm_head.weight'"},
      {"trainable_token_indices", {1}, "no tensor 'base_model.model.model.embed_tokens.token_adapter.trainable"},
      {"trainable_token_indices", {"a"}, "trainable_token_indices': expected a list of tokens"},
      {"target_parameters", {"w"}, "target_parameters': expected nothing"},
      {"rank_pattern", {{"q_proj", 2}}, "q_proj.lora_A.weight' is"},
      {"rank_pattern", {{"q_proj", "2"}}, "rank_pattern': expected an object that maps modules to numbers"},
      {"alpha_pattern", 2, "alpha_pattern': expected an object that maps modules to numbers"},
      {"layers_pattern", "layers", "layers_pattern': expected layers_to_transform in addition"},
      {"r", 0, "r': expected a size"},
      {"r", 5, "tensor 'base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight'"},
      {"lora_alpha", "8", "lora_alpha': expected a number"},
      {"target_modules", {"q_proj", "norm"}, "has no adaptable layer 'norm'"},
      {"target_modules", {"q_proj", "lm_head"}, "no tensor 'base_model.model.lm_head.lora_A.weight'"},
      {"target_modules", {"nothing"}, "has no adaptable layer 'nothing'"},
      {"target_modules", "(q_proj", "target_modules: '(q_proj' is not a supported regular expression"},
      {"target_modules", ".*nothing", "target_modules: no layer of the base"},
      {"target_modules", {"q_proj"}, "the model has no tensor"},
      {"target_modules", Json(), "target_modules': expected a list of layers, a regular expression, or all-linear"},
      {"layers_to_transform", 0, "the model has no tensor 'base_model.model.model.layers.1."},
      {"exclude_modules", ".*layers\\.1\\..*", "the model has no tensor 'base_model.model.model.layers.1."},
      {"base_model_name_or_path", "nowhere",
       "expected the directory of a model, got 'nowhere'; specify it with --base FOLDER"}};
  for (const auto& [key, value, message] : wrong) {
    write_config(with(good, key, value));
    expect_refused(message);
  }
  // Initializations that change the base's weights: all of PEFT 0.21's and future ones.
  for (const char* value : {"pissa", "pissa_niter_16", "olora", "OLoRA", "corda", "loftq", "lora_ga", "of_2027"}) {
    write_config(with(good, "init_lora_weights", value));
    expect_refused("init_lora_weights': expected true, gaussian, eva or orthogonal (others change");
  }
  write_config(good);
  auto fewer = adapter_tensors(*adapters_);
  fewer.pop_back();
  write_safetensors(path("adapters/adapter_model.safetensors"), fewer);
  expect_refused("lora_");
  fs::remove(path("adapters/adapter_model.safetensors"));
  expect_refused("no adapter_model.safetensors");
}

// Adapters that differ between layers, and further data that PEFT 0.21 saves with adapters. Each test computes by hand
// the weights that PEFT uses.
class PeftLayersTest : public PeftFolderTest {
 protected:
  struct Values {
    std::vector<int64_t> shape;
    std::vector<float> all;
    float& at(int64_t row, int64_t column) { return all[static_cast<size_t>(row * shape[1] + column)]; }
  };
  using Tensors = std::map<std::string, Values>;

  void load(const std::string& variant) {
    make_folders(variant);
    weights_.clear(), saved_.clear();
    for (const TensorBytes& t : fixture_weights(*model_)) weights_[t.name] = {t.shape, floats(t)};
    for (const TensorBytes& t : adapter_tensors(*adapters_)) saved_[t.name] = {t.shape, floats(t)};
    config_ = config();
    config_["use_rslora"] = false;
    layers_ = variant == "gpt2" ? "transformer.h." : "model.layers.";
  }
  static Values made(const std::vector<int64_t>& shape, float first) {
    Values out{shape, std::vector<float>(static_cast<size_t>(Shape(shape).numel()))};
    for (size_t i = 0; i < out.all.size(); ++i) out.all[i] = first + 0.01f * static_cast<float>(i * 7 % 13);
    return out;
  }
  Values& saved(const std::string& name) { return saved_.at("base_model.model." + name); }
  // W + scale B A of a linear layer, however its weight is stored.
  void add(const std::string& module, double scale) {
    Values &w = weights_.at(module + ".weight"), &a = saved(module + ".lora_A.weight"),
           &b = saved(module + ".lora_B.weight");
    for (int64_t i = 0; i < b.shape[0]; ++i)
      for (int64_t j = 0; j < a.shape[1]; ++j)
        for (int64_t r = 0; r < a.shape[0]; ++r)
          (layers_[0] == 't' ? w.at(j, i) : w.at(i, j)) += static_cast<float>(scale) * b.at(i, r) * a.at(r, j);
  }
  std::set<std::string> modules() const {
    std::set<std::string> out;
    for (const auto& [name, values] : saved_)
      if (const size_t end = name.find(".lora_A"); end != name.npos) out.insert(name.substr(17, end - 17));
    return out;
  }
  void add_all(double scale) {
    for (const std::string& module : modules()) add(module, scale);
  }
  double scale() const { return config_.at("lora_alpha").get<double>() / config_.at("r").get<double>(); }
  static void write_tensors(const fs::path& file, const Tensors& tensors) {
    std::vector<TensorBytes> all;
    for (const auto& [name, t] : tensors)
      all.push_back({name, DType::float32, t.shape, std::as_bytes(std::span(t.all))});
    write_safetensors(file, all);
  }
  // The adapters give the results of a model with weights_, which differ from the previous ones.
  void expect_in_weights(const std::string& because) {
    SCOPED_TRACE(because);
    write_config(config_);
    write_tensors(path("adapters/adapter_model.safetensors"), saved_);
    Json expected = with(json("base/config.json"), "tie_word_embeddings", !weights_.contains("lm_head.weight"));
    expected["vocab_size"] =
        weights_.at(layers_[0] == 't' ? "transformer.wte.weight" : "model.embed_tokens.weight").shape[0];
    emptied("expected");
    write("expected/config.json", expected);
    write_tensors(path("expected/model.safetensors"), weights_);
    const Both b = both();
    EXPECT_NE(b.adapted.merged.find("adapter_config.json: " + because), std::string::npos) << b.adapted.merged;
    EXPECT_EQ(b.config.lora.rank, 0);
    const double loss = compute_loss(*load_model(HubFolder(path("expected"))), *model_);
    EXPECT_NEAR(compute_loss(*load_model(b.config, b.tensors()), *model_), loss, 1e-5);
    EXPECT_GT(std::abs(loss - expected_loss()), 1e-4);
    const std::string name = b.config.family == Family::gpt2 ? "blocks.0.attn.qkv.weight" : "tokens.weight";
    for (const HubTensor& t : hub_tensors(b.config))  // read from the middle of a row
      if (t.name == name) {
        EXPECT_EQ(floats(b.tensors(), name, t.shape, 31), floats(b.tensors(), name, t.shape, 1));
      }
  }
  Tensors weights_, saved_;
  Json config_;
  std::string layers_;
};

TEST_F(PeftLayersTest, MergesAdaptersOfSelectedLayers) {
  for (const std::string layer : {"0", "1"}) {
    for (const char* key : {"layers_to_transform", "exclude_modules"}) {
      load("grouped");
      const std::string other = layer == "0" ? "1" : "0";
      std::erase_if(saved_, [&](const auto& t) { return t.first.find("layers." + other) != std::string::npos; });
      const bool excludes = key[0] == 'e';
      config_[key] = excludes ? Json(".*\\." + other + "\\..*") : Json(std::stoi(layer));
      config_["target_modules"] = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"};
      if (!excludes) config_["layers_pattern"] = {"h", "layers"};
      add_all(scale());
      expect_in_weights(std::string(key) + ": 1 of 2 layers have q_proj");
    }
  }
  config_.erase("exclude_modules");
  config_["layers_to_transform"] = {0}, config_["layers_pattern"] = "h";
  write_config(config_);
  expect_refused("target_modules: no layer of the base");
}

TEST_F(PeftLayersTest, MergesRankAndAlphaPatterns) {
  for (const bool stabilised : {false, true}) {
    load("grouped");
    config_["use_rslora"] = stabilised;
    config_["rank_pattern"] = {{"0.self_attn.(q|k)_proj", 2}}, config_["alpha_pattern"] = {{"down_proj", 7}};
    for (const std::string& module : modules()) {
      const bool fewer = module.find("0.self_attn.q") != module.npos || module.find("0.self_attn.k") != module.npos;
      Values &a = saved(module + ".lora_A.weight"), &b = saved(module + ".lora_B.weight");
      if (fewer) a = made({2, a.shape[1]}, 0.1f), b = made({b.shape[0], 2}, -0.2f);
      const double rank = fewer ? 2 : 4, alpha = module.ends_with("down_proj") ? 7 : 3;
      add(module, alpha / (stabilised ? std::sqrt(rank) : rank));
    }
    expect_in_weights("rank_pattern");
  }
}

TEST_F(PeftLayersTest, MergesMagnitudesAndBiases) {
  for (const char* variant : kVariants) {
    load(variant);
    config_["use_dora"] = true;
    for (const std::string& module : modules()) {
      add(module, scale());
      Values &w = weights_.at(module + ".weight"), &b = saved(module + ".lora_B.weight");
      const Values norms = saved_["base_model.model." + module + ".lora_magnitude_vector"] = made({b.shape[0]}, 0.4f);
      const bool is_transposed = layers_[0] == 't';
      for (int64_t i = 0; i < b.shape[0]; ++i) {
        double square = 0;
        const auto each = [&](const auto& f) {
          for (int64_t j = 0; j < w.shape[is_transposed ? 0 : 1]; ++j) f(is_transposed ? w.at(j, i) : w.at(i, j));
        };
        each([&](float x) { square += static_cast<double>(x) * static_cast<double>(x); });
        each([&](float& x) { x *= norms.all[static_cast<size_t>(i)] / static_cast<float>(std::sqrt(square)); });
      }
    }
    expect_in_weights("use_dora");
  }
  load("gpt2");
  config_["lora_bias"] = true, config_["bias"] = "lora_only";
  for (const std::string& module : modules()) {
    Values& bias = weights_.at(module + ".bias");
    const Values of_b = saved_["base_model.model." + module + ".lora_B.bias"] = made(bias.shape, -0.3f);
    bias = saved_["base_model.model." + module + ".base_layer.bias"] = made(bias.shape, 0.2f);
    for (size_t i = 0; i < bias.all.size(); ++i) bias.all[i] += static_cast<float>(scale()) * of_b.all[i];
  }
  add_all(scale());
  expect_in_weights("lora_bias");
}

// The head of both models is tied to the embedding: training only the head or only the embedding unties them.
TEST_F(PeftLayersTest, MergesEmbeddingsAndHeads) {
  const std::string prefix = "base_model.model.", table = "model.embed_tokens", head = "lm_head";
  const auto begin = [&] { load("grouped"), add_all(scale()); };
  begin();
  saved_[prefix + table + ".weight"] = weights_[table + ".weight"];  // unchanged
  write_config(config_);
  write_tensors(path("adapters/adapter_model.safetensors"), saved_);
  EXPECT_EQ(both().adapted.merged, "");

  for (const int64_t rows : {48, 50}) {
    begin();
    for (const std::string& module : {table, head}) saved_[prefix + module + ".weight"] = made({rows, 24}, -0.05f);
    weights_[table + ".weight"] = made({rows, 24}, -0.05f);
    expect_in_weights("the base has different values in lm_head.weight");
  }
  for (const std::string& module : {table, head}) {
    begin();
    config_["modules_to_save"] = {module.substr(module.find('.') + 1)};
    weights_[head + ".weight"] = weights_[table + ".weight"];
    weights_[module + ".weight"] = saved_[prefix + module + ".weight"] = made({48, 24}, -0.05f);
    // If the vocabulary has grown, PEFT also writes these tensors, which it never reads.
    saved_[prefix + module + ".modules_to_save.weight"] = saved_[prefix + module + ".weight"];
    saved_[prefix + module + ".original_module.weight"] = made({48, 24}, 1);
    expect_in_weights("modules_to_save");
  }
  for (const bool ties : {false, true}) {
    begin();
    config_["target_modules"] = ".*(_proj|embed_tokens)", config_["ensure_weight_tying"] = ties;
    if (ties) {  // PEFT also writes the head's matrices, and adds the table's full name to the targets
      config_["target_modules"] = {"q_proj",  "k_proj",    "v_proj",       "o_proj", "gate_proj",
                                   "up_proj", "down_proj", "embed_tokens", table};
      saved_[prefix + head + ".lora_A.weight"] = made({4, 24}, 0.1f);
      saved_[prefix + head + ".lora_B.weight"] = made({48, 4}, -0.1f);
    }
    if (!ties) weights_[head + ".weight"] = weights_[table + ".weight"];
    Values &a = saved_[prefix + table + ".lora_embedding_A"] = made({4, 48}, -0.1f),
           &b = saved_[prefix + table + ".lora_embedding_B"] = made({24, 4}, 0.1f);
    for (int64_t i = 0; i < 48; ++i)
      for (int64_t j = 0; j < 24; ++j)
        for (int64_t r = 0; r < 4; ++r)
          weights_[table + ".weight"].at(i, j) += static_cast<float>(scale()) * b.at(j, r) * a.at(r, i);
    expect_in_weights("target_modules: model.embed_tokens");
  }
  begin();
  config_["target_modules"] = ".*_proj|lm_head";
  weights_[head + ".weight"] = weights_[table + ".weight"];
  saved_[prefix + head + ".lora_A.weight"] = made({4, 24}, -0.1f);
  saved_[prefix + head + ".lora_B.weight"] = made({48, 4}, 0.1f);
  add(head, scale());
  expect_in_weights("target_modules: lm_head");
  for (const Json& tokens : {Json{3, 1}, Json{{"embed_tokens", {3, 1}}}}) {
    begin();
    config_["trainable_token_indices"] = tokens;
    Values& rows = saved_[prefix + table + ".token_adapter.trainable_tokens_delta"] = made({2, 24}, 0.3f);
    for (int64_t j = 0; j < 24; ++j)
      for (const int64_t i : {0, 1}) weights_[table + ".weight"].at(i == 0 ? 3 : 1, j) = rows.at(i, j);
    expect_in_weights("trainable_token_indices");
  }
  config_["trainable_token_indices"] = {3, 48};
  write_config(config_);
  expect_refused("trainable_token_indices: expected tokens below 48, got 48");
  begin();
  config_["trainable_token_indices"] = {{"embed_tokens", {3}}, {"lm_head", {1}}};
  weights_[head + ".weight"] = weights_[table + ".weight"];
  for (const auto& [module, token] : {std::pair(table, 3), {head, 1}}) {
    Values& rows = saved_[prefix + module + ".token_adapter.trainable_tokens_delta"] = made({1, 24}, 0.3f);
    for (int64_t j = 0; j < 24; ++j) weights_[module + ".weight"].at(token, j) = rows.at(0, j);
  }
  expect_in_weights("trainable_token_indices");
}

}  // namespace
}  // namespace tessera
