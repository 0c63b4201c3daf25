// Hugging Face directories: results match those of the transformers library with the same weights; written directories
// are read back identically; corrupt ones are rejected with one line.

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "hub/llmc.h"
#include "models/sample.h"
#include "tests/hub/support.h"

namespace tessera {
namespace {

constexpr std::array kVariants{"gpt2",   "exact",  "mistral", "slides", "plain",  "grouped", "untied",
                               "linear", "llama3", "yarn",    "biases", "biased", "normed",  "theta"};

class HubFolderTest : public HubTest {
 protected:
  void write_config(const Json& config) const { write("config.json", config); }
  // The fixture's model as a directory with one file, or with several shards.
  void make_folder(const Safetensors& fixture, size_t shards = 1) const {
    for (const auto& e : fs::directory_iterator(path(""))) fs::remove_all(e.path());
    write_config(Json::parse(fixture.metadata().at("config")));
    std::vector<std::vector<TensorBytes>> parts(shards);
    Json map;
    for (size_t next = 0; const TensorBytes& t : fixture_weights(fixture)) {
      parts[next % shards].push_back(t);
      map[t.name] = fmt::format("model-{}.safetensors", next++ % shards);
    }
    if (shards == 1) return write_safetensors(path("model.safetensors"), parts[0]);
    for (size_t i = 0; i < shards; ++i) write_safetensors(path(fmt::format("model-{}.safetensors", i)), parts[i]);
    write("model.safetensors.index.json", {{"metadata", Json::object()}, {"weight_map", map}});
  }
};

TEST_F(HubFolderTest, LossMatchesTransformers) {
  const Json written = Json::parse(read_file(TESSERA_SOURCE_DIR "/tests/models/fixtures/greedy.json"));
  for (const char* name : kVariants)
    for (const size_t shards : {1, 3}) {
      const Safetensors fixture = open_fixture(name);
      make_folder(fixture, shards);
      const HubFolder folder(path(""));
      EXPECT_EQ(folder.dtype(), DType::float32);
      const auto model = load_model(folder);
      EXPECT_NEAR(compute_loss(*model, fixture), floats(fixture.at("loss")).at(0), 1e-5) << name;
      constexpr size_t kPrompt = 5;  // the prompt's length in make.py
      std::vector<int32_t> prompt(kPrompt), greedy;
      std::memcpy(prompt.data(), fixture.at("ids").bytes.data(), kPrompt * sizeof(int32_t));
      sample(*model, prompt, std::ssize(written.at(name)), {.temperature = 0}, [&](int32_t token) {
        greedy.push_back(token);
        return true;
      });
      EXPECT_EQ(greedy, written.at(name).get<std::vector<int32_t>>()) << name;
    }
}

// After one step of SGD, each weight is w - lr g with the gradients of PyTorch.
TEST_F(HubFolderTest, RoundTripsAndMatchesPyTorchAfterOneSgdStep) {
  constexpr float kRate = 0.1F;
  for (const char* name : kVariants) {
    const Safetensors fixture = open_fixture(name);
    make_folder(fixture);
    const HubFolder folder(path(""));
    write_hub_folder(emptied("again"), folder.config(), {DType::float32, folder.tensors()});
    const auto model = load_model(folder);
    const Tensor ids = make_rows(fixture, "ids"), targets = make_rows(fixture, "targets");
    backward(model->loss(ids, targets, 1.0 / static_cast<double>(targets.numel())).mean);
    model->zero_missing_gradients();
    make_optimizer(OptimizerKind::sgd, model->units(), {.momentum = 0})->step(kRate, 1);
    write_hub_folder(emptied("stepped"), folder.config(), {DType::float32, make_tensors(*model)});
    const Safetensors written(path("again/model.safetensors")), stepped(path("stepped/model.safetensors"));
    for (const TensorBytes& t : fixture_weights(fixture)) {
      SCOPED_TRACE(name + (" " + t.name));
      ASSERT_TRUE(written.contains(t.name));
      EXPECT_EQ(written.at(t.name).shape, t.shape);
      if (t.is_half)
        EXPECT_EQ(floats(written.at(t.name)), floats(t));
      else
        EXPECT_TRUE(std::ranges::equal(written.at(t.name).bytes, t.bytes));
      const std::vector<float> before = floats(t), after = floats(stepped.at(t.name)),
                               gradient = floats(fixture.at("grad." + t.name));
      ASSERT_EQ(after.size(), before.size());
      for (size_t i = 0; i < before.size(); ++i) ASSERT_NEAR(after[i], before[i] - kRate * gradient[i], 1e-5) << i;
    }
    EXPECT_EQ(written.tensors().size(), fixture_weights(fixture).size());
    const HubFolder again(path("again"));
    EXPECT_EQ(hub_config(again.config(), DType::float32), hub_config(folder.config(), DType::float32)) << name;
  }
}

TEST(HubConvert, ConvertsEveryFloat16) {
  for (uint32_t bits = 0; bits < 0x10000; ++bits) {
    const auto half = static_cast<uint16_t>(bits);
    const TensorBytes from{"x", DType::bfloat16, {1}, std::as_bytes(std::span(&half, 1)), true};
    float found = 0;
    convert(from, 0, DType::float32, std::as_writable_bytes(std::span(&found, 1)));
    const int exponent = static_cast<int>(bits >> 10 & 31);
    const double fraction = static_cast<double>(bits & 1023) / 1024,
                 size = exponent == 0 ? std::ldexp(fraction, -14) : std::ldexp(1 + fraction, exponent - 15);
    if (exponent == 31) {
      EXPECT_TRUE(fraction == 0 ? std::isinf(found) : std::isnan(found)) << bits;
    } else {
      ASSERT_EQ(found, (bits & 0x8000) != 0 ? -size : size) << bits;
    }
    EXPECT_TRUE(std::isnan(found) || std::signbit(found) == ((bits & 0x8000) != 0)) << bits;
  }
}

// Keys of published models without effect on the computation: the loss is unchanged.
TEST_F(HubFolderTest, IgnoredKeysDoNotAffectLoss) {
  const std::pair<const char*, Json> cases[] = {
      {"gpt2", {{"_num_labels", 1}}},                                                        // distilgpt2
      {"gpt2", {{"n_special", 0}, {"predict_special_tokens", true}}},                        // gpt2-medium
      {"gpt2", {{"output_past", true}}},                                                     // gpt2-xl
      {"plain", {{"is_llama_config", true}, {"rope_interleaved", false}}},                   // SmolLM2
      {"biased", {{"use_mrope", false}, {"max_window_layers", 28}, {"sliding_window", 1}}},  // Qwen2.5
      {"grouped", {{"model_type", "qwen2"}, {"use_mrope", false}}},                          // without its biases
      {"mistral", {{"sliding_window", 4096}}},
      {"grouped", {{"model_type", "mistral"}, {"sliding_window", 4096}, {"attention_dropout", 0.5}}}};
  for (const auto& [variant, keys] : cases) {
    SCOPED_TRACE(keys.dump());
    const Safetensors fixture = open_fixture(variant);
    make_folder(fixture);
    Json config = json("config.json");
    config.update(keys);
    write_config(config);
    const HubFolder folder(path(""));
    EXPECT_NEAR(compute_loss(*load_model(folder), fixture), floats(fixture.at("loss")).at(0), 1e-5);
  }
}

// Tensor names and dtypes as written by other programs: the loss equals that of the plain directory.
TEST_F(HubFolderTest, ReadsPrefixedNamesBareModelsAndMaskBuffers) {
  const std::vector<std::byte> mask(16);
  const auto renamed = [&](const char* variant, int notes, const std::function<std::string(const std::string&)>& name) {
    const Safetensors fixture = open_fixture(variant);
    make_folder(fixture);
    std::vector<TensorBytes> tensors = fixture_weights(fixture);
    for (TensorBytes& t : tensors) t.name = name(t.name);
    const std::string masks[] = {"..h.0.attn.bias", "..rotary_emb.inv_freq"};  // derived by the family
    tensors.push_back({masks[fixture.contains("transformer.wte.weight") ? 0 : 1], DType::uint8, {4, 4}, mask});
    write_safetensors(path("model.safetensors"), tensors);
    std::string bytes = read_file(path("model.safetensors"));
    bytes.replace(bytes.find("\"U8\""), 4, "\"BOOL\"");
    bytes.erase(bytes.find("\"..") + 1, 2);  // the header keeps its length
    file("model.safetensors", bytes);
    const HubFolder folder(path(""));
    EXPECT_NEAR(compute_loss(*load_model(folder), fixture), floats(fixture.at("loss")).at(0), 1e-5) << variant;
    EXPECT_EQ(std::ranges::count_if(folder.notes(), [](const auto& n) { return n.find("training") != n.npos; }), notes);
  };
  const auto without = [](std::string_view prefix) {
    return [prefix](const std::string& name) { return name.starts_with(prefix) ? name.substr(prefix.size()) : name; };
  };
  renamed("gpt2", 0, without("transformer."));
  renamed("untied", 0, without("model."));
  renamed("untied", 1, [](const std::string& name) { return "module._orig_mod." + name; });
  renamed("grouped", 1, [](std::string name) {
    const size_t layer = name.find("layers.1.");
    return layer == name.npos ? name : name.insert(layer + 9, "_checkpoint_wrapped_module.");
  });
}

// Files that are mistaken for weights are identified in the error.
TEST_F(HubFolderTest, ErrorsNameFilesMistakenForWeights) {
  make_folder(open_fixture("untied"));
  const auto with = [&](const std::string& bytes, const char* message) {
    file("model.safetensors", bytes);
    expect_refused(message);
  };
  with("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 120\n", "a Git LFS pointer");
  with("<!DOCTYPE html><html><head></head></html>", "a web page");
  with("", "an empty file");
  with("PK\x03\x04 torch.save() makes this", "a zip archive");
  fs::remove(path("model.safetensors"));
  file("pytorch_model.bin", "PK");
  expect_refused(
      "pytorch_model.bin is a PyTorch pickle, which is not supported: from_pretrained(FOLDER).save_pretrained(NEW)");
  file("model.safetensors.index.json", "version https://git-lfs.github.com/spec/v1\n");
  expect_refused("index.json is a Git LFS pointer");
}

TEST_F(HubFolderTest, ErrorsNameUnsupportedModelFormats) {
  const std::pair<const char*, const char*> all[] = {
      {"a.gguf", "a GGUF model (llama.cpp), which is not supported: from_pretrained(FOLDER, gguf_file=NAME)"},
      {"model.onnx", "an ONNX model"},
      {"weights.npz", "NumPy arrays"},
      {"a.pt", "a PyTorch pickle"},
      {"tf_model.h5", "a Keras or TensorFlow model"},
      {"rank0.engine", "a TensorRT engine"},
      {"zero_to_fp32.py", "a DeepSpeed checkpoint, which is not supported: python zero_to_fp32.py FOLDER NEW"},
      {"__0_0.distcp",
       "a distributed PyTorch checkpoint (DCP, FSDP), which is not supported: accelerate merge-weights"},
      {"latest_checkpointed_iteration.txt", "a Megatron-LM checkpoint"},
      {"model-00001.safetensors", "tensors without a configuration"}};
  for (const auto& [name, message] : all) {
    emptied("other");
    file(std::string("other/") + name, "x");
    file("other/training_args.bin", "x");  // less specific
    const bool says_more = std::string_view(message).find("checkpoint") != std::string_view::npos;
    for (const std::string from : {"other", "other/"}) {
      if (!says_more) fs::remove(path("other/training_args.bin"));
      EXPECT_TRUE(foreign_in(path(from)).starts_with(fmt::format("; {} is {}", name, message)))
          << foreign_in(path(from));
    }
    EXPECT_TRUE(foreign_in(path("other") / name).starts_with(fmt::format("; {} is {}", name, message)));
  }
  EXPECT_EQ(foreign_in(emptied("nothing")), "");
  EXPECT_EQ(foreign_in(path("missing")), "");
}

TEST_F(HubFolderTest, RejectsCorruptOrUnknownContents) {
  const Safetensors fixture = open_fixture("untied");
  make_folder(fixture, 2);
  const Json config = json("config.json");
  const auto refused = [&](const char* key, const Json& value, const std::string& message) {
    write_config(with(config, key, value));
    expect_refused(message);
  };
  refused("model_type", "mamba",
          "'model_type': expected gpt2, llama, mistral, qwen2, qwen3, mixtral or qwen3_moe, got \"mamba\"");
  refused("hidden_size", -3, "'hidden_size': expected a size, got -3");
  refused("hidden_size", int64_t{1} << 39, "expected (48, 549755813888)");
  refused("vocab_size", int64_t{1} << 40, "expected (1099511627776, 24)");
  Json huge = config;
  huge["hidden_size"] = huge["intermediate_size"] = int64_t{1} << 40;
  write_config(huge);
  expect_refused("does not fit in any memory");
  refused("num_key_value_heads", 3, "'num_key_value_heads': expected a divisor of the number of attention heads");
  refused("attention_bias", true, "tensor 'model.layers.0.self_attn.q_proj.bias' is missing");
  refused("mlp_bias", true, "tensor 'model.layers.0.mlp.gate_proj.bias' is missing");
  refused("hidden_act", "relu", "'hidden_act': expected \"silu\"");
  refused("quantization_config", Json::object(),
          "quantization_config: the key 'quant_method': expected \"gptq\", got null");
  refused("rope_parameters", Json{{"rope_type", "longrope"}}, "default, linear, llama3 or yarn, got \"longrope\"");
  refused("vocab_size", 49, "is (48, 24); expected (49, 24)");
  refused("tie_word_embeddings", true, "differs from the embedding");
  refused("num_hidden_layers", 1, "does not belong to this model");
  refused("num_hidden_layers", 3, "model.layers.2.input_layernorm.weight' is missing");
  write_config(config);
  HubFolder{path("")};
  const Json index = json("model.safetensors.index.json");
  for (const char* name : {"../model-0.safetensors", "/etc/passwd", "a/model-0.safetensors", "model.bin", ""}) {
    Json changed = index;
    changed["weight_map"]["model.norm.weight"] = name;
    write("model.safetensors.index.json", changed);
    expect_refused("expected a .safetensors file in the same directory");
  }
  Json other = index;
  Json& home = other["weight_map"]["model.norm.weight"];
  home = home == "model-0.safetensors" ? "model-1.safetensors" : "model-0.safetensors";
  write("model.safetensors.index.json", other);
  HubFolder{path("")};  // the files themselves define which one contains a tensor
  write("model.safetensors.index.json", index);
  fs::copy(path("model-0.safetensors"), path("copy"));
  fs::remove(path("model-0.safetensors"));
  expect_refused("the shard model-0.safetensors is missing");
  fs::remove(path("model.safetensors.index.json"));
  expect_refused("no model.safetensors and no model.safetensors.index.json");
}

// --- llm.c models: the tensors of a directory in llm.c's order give the same model ---

class LlmcModelTest : public HubTest {
 protected:
  // As written by train_gpt2.py: each kind for all layers, the embedding padded with zeros to a multiple of 128 rows.
  std::string written(LanguageModel& model, int version) const {
    const ModelConfig& c = model.config;
    const int64_t rows = version == 1 ? c.vocab : 128;
    std::vector<int32_t> header;
    for (const int64_t size : {int64_t{20240326}, int64_t{version}, c.context, c.vocab, c.layers, c.heads, c.channels,
                               version == 1 ? 0 : rows})
      header.push_back(static_cast<int32_t>(size));
    header.resize(256);
    std::string out(reinterpret_cast<const char*>(header.data()), 1024);
    const auto add = [&](const std::string& name) {
      const auto parameters = model.parameters();
      const auto found = std::ranges::find(parameters, name, &Parameter::name);
      ASSERT_NE(found, parameters.end()) << name;
      const Tensor value = (*found)->var.value().to(version == 5 ? DType::bfloat16 : DType::float32);
      out.append(reinterpret_cast<const char*>(value.raw()), static_cast<size_t>(value.nbytes()));
    };
    add("tokens.weight");
    out.append(static_cast<size_t>((rows - c.vocab) * c.channels * (version == 5 ? 2 : 4)), '\0');
    add("positions.weight");
    for (const char* part : {"norm1", "attn.qkv", "attn.proj", "norm2", "mlp.up", "mlp.down"})
      for (const char* kind : {"weight", "bias"})
        for (int64_t i = 0; i < c.layers; ++i) add(fmt::format("blocks.{}.{}.{}", i, part, kind));
    add("norm.weight"), add("norm.bias");
    return out;
  }
};

TEST_F(LlmcModelTest, ReadsTensorsDescribedByHeader) {
  const ModelConfig config{.layers = 3, .heads = 2, .channels = 8, .context = 5, .vocab = 90};
  const auto model = random_model(config), again = random_model(config, 4);
  for (const int version : {1, 3, 5}) {
    SCOPED_TRACE(version);
    const auto file = this->file("model.bin", written(*model, version));
    EXPECT_TRUE(is_llmc_model(file));
    const LlmcModel read(file);
    EXPECT_EQ(read.dtype(), version == 5 ? DType::bfloat16 : DType::float32);
    read_values(again->units(), read.tensors());
    for (size_t i = 0; i < model->parameters().size(); ++i) {
      const Tensor ours = model->parameters()[i]->var.value(), theirs = again->parameters()[i]->var.value();
      EXPECT_EQ(theirs.to_vector<float>(),
                (version == 5 ? ours.to(DType::bfloat16).to(DType::float32) : ours).to_vector<float>());
    }
  }
  const std::string complete = written(*model, 3);
  const auto refused = [&](const std::string& bytes, const std::string& message) {
    expect_error(Status::input, {"model.bin: ", message}, [&] { LlmcModel(file("model.bin", bytes)); });
  };
  refused(complete.substr(0, 1000), "1000 bytes; expected a header of 1024");
  refused(complete + "x",
          fmt::format("{} bytes; expected {} according to its header", complete.size() + 1, complete.size()));
  const auto with = [&](size_t at, int32_t value) {
    std::string bytes = complete;
    bytes.replace(4 * at, 4, reinterpret_cast<const char*>(&value), 4);
    return bytes;
  };
  refused(with(1, 2), "of version 2; expected 1, 3 or 5");
  refused(with(4, -1), "a size of -1");
  refused(with(5, 3), "3 heads, 8 channels, 128 embedding rows (padded vocabulary) for a vocabulary of 90");
  refused(with(7, 64), "64 embedding rows (padded vocabulary) for a vocabulary of 90");
}

}  // namespace
}  // namespace tessera
