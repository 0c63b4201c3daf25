// GPTQ files: bits against hand-computed values and those written by AutoGPTQ, exact round trips of directories, and
// rejection of corrupt files and other formats.
#include "tensor/ops/quantize/gptq.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <initializer_list>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <tuple>
#include <vector>

#include "tests/hub/support.h"
#include "tests/support/texts.h"

namespace tessera {
namespace {

// The codes and scales that AutoGPTQ 0.3.1 packed (QuantLinear.pack of qlinear_cuda, 64 inputs, 32 outputs).
Int4Matrix arange(int64_t rows, int64_t columns, int64_t group) {
  Int4Matrix m(rows, columns, group);
  for (int64_t o = 0; o < rows; ++o) {
    for (int64_t i = 0; i < columns; ++i) m.set_code(o, i, static_cast<int>((5 * o + 3 * i + o * i / 7) % 16));
    for (int64_t g = 0; g < m.groups(); ++g) m.scale(o, g) = to_half(static_cast<float>(1 + o + 2 * g) / 64);
  }
  return m;
}

TEST(GptqFormat, PackedBitsMatchAutoGptq) {
  const GptqTensors t = pack_gptq(arange(32, 64, 32), 0, 32);
  ASSERT_EQ(t.qweight.size(), 8u * 32);
  // Row 0, inputs 0 to 7: 0 3 6 9 12 15 18 21, with 16 subtracted from the last two.
  for (const auto& [i, o, bits] : std::initializer_list<std::tuple<size_t, size_t, uint32_t>>{
           {0, 0, 0x52fc9630U}, {0, 1, 0xb741eb85U}, {0, 3, 0x730c952fU}, {7, 28, 0x5e7092b4U}, {7, 31, 0xf708192bU}})
    EXPECT_EQ(static_cast<uint32_t>(t.qweight[i * 32 + o]), bits) << i << " " << o;
  uint64_t sum = 0;
  for (size_t i = 0; i < t.qweight.size(); ++i) sum += static_cast<uint32_t>(t.qweight[i]) * uint64_t{i + 1};
  EXPECT_EQ(sum, 73937970900033U);
  ASSERT_EQ(t.qzeros.size(), 2u * 4);
  for (const int32_t z : t.qzeros) EXPECT_EQ(z, 0x77777777);
  ASSERT_EQ(t.scales.size(), 2u * 32);
  EXPECT_EQ(wide(t.scales[32 + 5]), 8.0F / 64);  // (group 1, row 5)
  EXPECT_EQ(t.g_idx[31], 0);
  EXPECT_EQ(t.g_idx[32], 1);
  const std::vector<TensorBytes> listed = listed_gptq(t, "l", arange(32, 64, 32), 32);
  EXPECT_EQ(listed[1].name, "l.qweight");
  EXPECT_EQ(listed[1].shape, (std::vector<int64_t>{8, 32}));
  EXPECT_TRUE(listed[3].is_half);
  EXPECT_THROW((void)pack_gptq(arange(12, 64, 32), 0, 12), Error);
}

TEST(GptqFormat, RoundTrips) {
  for (const auto& [rows, columns, group] : {std::array<int64_t, 3>{32, 64, 32}, {8, 24, 16}, {16, 8, 8}}) {
    const Int4Matrix m = arange(rows, columns, group);
    const GptqTensors t = pack_gptq(m, 0, rows);
    const std::vector<TensorBytes> listed = listed_gptq(t, "l", m, rows);
    for (const bool ordered : {true, false}) {
      const GptqLayer layer({&listed[1], &listed[2], &listed[3], ordered ? &listed[0] : nullptr}, rows, columns,
                            {.group = group}, "here");
      const Int4Matrix again = layer.unpack();
      EXPECT_EQ(again.codes, m.codes);
      EXPECT_EQ(0, std::memcmp(again.scales.data(), m.scales.data(), m.scales.size() * sizeof(Half)));
      std::vector<float> all(static_cast<size_t>(rows * columns)), part(static_cast<size_t>(2 * columns - 3));
      m.decode(0, all);
      layer.decode(columns + 1, part);
      EXPECT_TRUE(std::equal(part.begin(), part.end(), all.begin() + columns + 1));
    }
  }
}

class GptqFolderTest : public HubTest {
 protected:
  // A model of random weights, with each layer rounded to nearest.
  HubWeights random_weights(const ModelConfig& config, int64_t group) {
    model_ = random_model(config);
    HubWeights out{.tensors = make_tensors(*model_), .gptq = {.group = group}};
    for (int64_t i = 0; i < config.layers; ++i)
      for (Linear* l : model_->layer(i).all<Linear>())
        out.codes.emplace(l->parameter(l->weight).name,
                          round_to_nearest(l->weight.value(), GptqConfig{.group = group}.group_size(l->weight.dim(1))));
    return out;
  }
  // Rewrites the file's tensors after `change`.
  void rewrite(const std::function<void(std::map<std::string, TensorBytes>&)>& change) const {
    const std::string original = read_file(path("model.safetensors"));
    const Safetensors file(std::as_bytes(std::span(original)), "kept", true);
    std::map<std::string, TensorBytes> tensors;
    for (const TensorBytes& t : file.tensors()) tensors[t.name] = t;
    change(tensors);
    std::vector<TensorBytes> listed;
    for (auto& [name, t] : tensors) {
      t.name = name;
      listed.push_back(t);
    }
    write_safetensors(path("model.safetensors"), listed);
  }

  std::unique_ptr<LanguageModel> model_;
};

const ModelConfig kLlama = [] {
  ModelConfig c{.family = Family::llama, .layers = 2, .heads = 4, .channels = 32, .context = 16, .vocab = 11};
  c.kv_heads = 2, c.ffn = 64, c.qkv_bias = true;
  return c;
}();
const ModelConfig kGpt2{.layers = 1, .heads = 2, .channels = 32, .context = 16, .vocab = 11};

TEST_F(GptqFolderTest, RoundTripsExactly) {
  for (const ModelConfig& config : {kLlama, kGpt2})
    for (const int64_t group : {16, -1}) {
      const HubWeights weights = random_weights(config, group);
      write_hub_folder(path(""), config, weights);
      const Safetensors file(path("model.safetensors"), true);
      EXPECT_EQ(file.contains("model.layers.1.self_attn.k_proj.qweight"), config.family == Family::llama);
      EXPECT_EQ(file.contains("transformer.h.0.attn.c_attn.qweight"), config.family == Family::gpt2);
      EXPECT_FALSE(file.contains("model.layers.1.self_attn.k_proj.weight"));
      EXPECT_EQ(json("config.json").at("quantization_config"), json("quantize_config.json"));
      for (const bool in_config : {true, false}) {  // older directories have only quantize_config.json
        Json said = json("config.json");
        if (!in_config) said.erase("quantization_config");
        write("config.json", said);
        const HubFolder folder(path(""));
        ASSERT_TRUE(folder.gptq());
        EXPECT_EQ(folder.gptq()->group, group);
        EXPECT_EQ(folder.dtype(), DType::float32);
        for (const Parameter* p : model_->parameters()) {
          std::vector<float> expected = p->var.value().to_vector<float>();
          const auto codes = weights.codes.find(p->name);
          if (codes != weights.codes.end()) codes->second.decode(0, expected);
          const int64_t half = p->full_shape.numel() / 2 - 3;  // not at the start of a row
          EXPECT_EQ(floats(folder.tensors(), p->name, p->full_shape, half), expected) << p->name;
          const auto again = folder.codes(p->name);
          ASSERT_EQ(again.has_value(), codes != weights.codes.end()) << p->name;
          EXPECT_TRUE(!again || again->codes == codes->second.codes) << p->name;
        }
      }
    }
}

// The keys of GPTQModel 7, AutoGPTQ 0.7 and transformers 5 for the same codes.
TEST_F(GptqFolderTest, AcceptsKeysOfEveryLibrary) {
  write_hub_folder(path(""), kLlama, random_weights(kLlama, 16));
  const auto sum = [&] {
    const HubFolder folder(path(""));
    EXPECT_TRUE(folder.gptq() && folder.has_codes("blocks.0.attn.qkv.weight"));
    EXPECT_TRUE(folder.notes().empty()) << folder.notes()[0];
    double out = 0;
    for (const Parameter* p : model_->parameters())
      for (const float v : floats(folder.tensors(), p->name, p->full_shape)) out += std::abs(static_cast<double>(v));
    return out;
  };
  const double expected = sum();
  Json config = json("config.json");
  fs::remove(path("quantize_config.json"));
  const Json said = Json::parse(R"([{"bits": 4, "group_size": 16, "quant_method": "gptq"},
      {"quant_method": "gptq", "bits": 4, "group_size": 16, "desc_act": false, "sym": true, "lm_head": false,
       "damp_percent": 0.01, "checkpoint_format": "gptq", "method": "gptq", "format": "gptq", "pack_dtype": "int32",
       "dynamic": {"-:.*\\.lm_head": {}}, "rotation": null, "meta": {"quantizer": ["gptqmodel:7.7.0"],
       "uri": "https://github.com/modelcloud/gptqmodel", "damp_percent": 0.05, "mse": 0.0}},
      {"quant_method": "gptq", "bits": 4, "group_size": 16, "desc_act": true, "sym": false, "static_groups": true,
       "true_sequential": true, "model_name_or_path": null, "model_file_base_name": "model", "is_marlin_format": false,
       "damp_percent": 0.1},
      {"quant_method": "gptq", "bits": 4, "group_size": 16, "backend": "auto", "batch_size": 1, "dataset": "c4",
       "exllama_config": {"version": 1}, "max_input_length": null, "modules_in_block_to_quantize": null,
       "act_group_aware": true, "tokenizer": null}])");
  for (const Json& one : said) {
    write("config.json", with(config, "quantization_config", one));
    EXPECT_EQ(sum(), expected) << one;
  }
  config["quantization_config"] = with(said[3], "of_2027", 1);
  write("config.json", config);
  const HubFolder folder(path(""));
  ASSERT_EQ(folder.notes().size(), 1u);
  EXPECT_TRUE(
      folder.notes()[0].ends_with("quantization_config: ignored keys without effect on the computation: of_2027"));
}

// Groups in another column order, differing zero points, version 2, scales in bfloat16: w = scale (code - zero), as
// computed by AutoGPTQ 0.7 (qlinear_cuda_old.py, forward) and GPTQModel (which adds 1 to the zero points of version 1).
TEST_F(GptqFolderTest, DequantizesGroupOrdersAndZeroPoints) {
  const ModelConfig config = kGpt2;
  const HubWeights weights = random_weights(config, 16);
  write_hub_folder(path(""), config, weights);
  const std::string layer = "transformer.h.0.attn.c_attn", name = "blocks.0.attn.qkv.weight";
  const Int4Matrix& m = weights.codes.at(name);
  std::vector<int32_t> order(32), zeros;
  for (int32_t c = 0; c < 32; ++c) order[static_cast<size_t>(c)] = (c * 7 + 1) % 32 / 16;
  for (const bool second : {false, true})
    for (const bool wide_scales : {false, true}) {
      Json said = json("config.json");
      said["quantization_config"].erase("format");
      said["quantization_config"]["checkpoint_format"] = second ? "gptq_v2" : "gptq";
      said["quantization_config"]["desc_act"] = true;
      write("config.json", said);
      const auto zero = [](int64_t g, int64_t row) { return static_cast<int>(1 + (3 * row + 5 * g) % 15); };
      zeros.assign(static_cast<size_t>(2 * m.rows / 8), 0);
      std::vector<std::vector<int32_t>> original;
      std::vector<float> scales(static_cast<size_t>(2 * m.rows));
      for (int64_t g = 0; g < 2; ++g)
        for (int64_t row = 0; row < m.rows; ++row) {
          const auto stored = static_cast<uint32_t>(zero(g, row) - (second ? 0 : 1));
          auto& word = zeros[static_cast<size_t>(g * (m.rows / 8) + row / 8)];
          word = static_cast<int32_t>(static_cast<uint32_t>(word) | stored << (4 * (row % 8)));
          scales[static_cast<size_t>(g * m.rows + row)] = wide(m.scale(row, g));
        }
      rewrite([&](std::map<std::string, TensorBytes>& t) {
        t.at(layer + ".g_idx").bytes = std::as_bytes(std::span(order));
        t.at(layer + ".qzeros").bytes = std::as_bytes(std::span(zeros));
        if (wide_scales) t[layer + ".scales"] = {"", DType::float32, {2, m.rows}, std::as_bytes(std::span(scales))};
        for (auto& [other, tensor] : t)  // zero points of the other layers, which are symmetric
          if (second && other.ends_with(".qzeros") && !other.starts_with(layer)) {
            original.emplace_back(tensor.bytes.size() / 4, static_cast<int32_t>(0x88888888U));
            tensor.bytes = std::as_bytes(std::span(original.back()));
          }
      });
      const HubFolder folder(path(""));
      EXPECT_FALSE(folder.has_codes(name));
      EXPECT_TRUE(folder.has_codes("blocks.0.mlp.up.weight"));
      ASSERT_EQ(folder.notes().size(), 1u);
      expect_has(folder.notes()[0], "1 of 4 4-bit layers");
      const std::vector<float> found = floats(folder.tensors(), name, Shape({m.rows, m.columns}), 77);
      for (int64_t row = 0; row < m.rows; ++row)
        for (int64_t c = 0; c < m.columns; ++c) {
          const int32_t g = order[static_cast<size_t>(c)];
          ASSERT_EQ(found[static_cast<size_t>(row * m.columns + c)],
                    wide(m.scale(row, g)) * static_cast<float>(m.code(row, c) - zero(g, row)))
              << row << " " << c;
        }
      write_hub_folder(path(""), config, weights);
    }
  Json said = json("config.json");
  said["quantization_config"]["desc_act"] = true;
  write("config.json", said);
  rewrite([&](auto& t) { t.erase(layer + ".g_idx"); });
  expect_refused("c_attn.g_idx' is missing");
}

TEST_F(GptqFolderTest, RejectsCorruptFilesAndUnsupportedFormats) {
  write_hub_folder(path(""), kLlama, random_weights(kLlama, 16));
  const Json config = json("config.json");
  const auto with = [&](const char* key, const Json& value, const std::string& message) {
    Json changed = config;
    changed["quantization_config"][key] = value;
    write("config.json", changed);
    expect_refused("quantization_config: the key '" + message);
    write("config.json", config);
  };
  with("bits", 8, "bits': expected 4, got 8");
  with("bits", "4", "bits': expected 4, got \"4\"");
  with("checkpoint_format", "marlin", "checkpoint_format': expected \"gptq\" or \"gptq_v2\", got \"marlin\"");
  with("format", "gptq_v2", "format': expected that of checkpoint_format, got \"gptq_v2\"");
  with("quant_method", "awq", "quant_method': expected \"gptq\", got \"awq\"");
  with("method", "qqq", "method': expected \"gptq\", got \"qqq\"");
  with("is_marlin_format", true, "is_marlin_format': expected false");
  with("pack_dtype", "int16", "pack_dtype': expected \"int32\"");
  with("rotation", "hadamard", "rotation': expected nothing");
  with("group_size", 0, "group_size': expected a size, got 0");
  with("dynamic", {{"+:mlp", {{"bits", 8}}}}, "dynamic': expected layers of the same bits and groups");
  with("dynamic", {{"+:mlp", 4}}, "dynamic': expected layers of the same bits and groups");
  Json changed = config;
  changed["quantization_config"]["group_size"] = 32;
  write("config.json", changed);
  expect_refused("q_proj.qzeros': expected int32 (1, 4), got int32 (2, 4)");
  write("config.json", config);

  const std::string original = read_file(path("model.safetensors")), layer = "model.layers.0.mlp.up_proj";
  const auto refused = [&](const std::function<void(std::map<std::string, TensorBytes>&)>& change,
                           const std::string& message) {
    rewrite(change);
    expect_refused(message);
    file("model.safetensors", original);
  };
  std::vector<std::byte> bytes;  // replaces a tensor's bytes
  const auto poke = [&](const std::string& part, size_t at, std::initializer_list<int> values) {
    return [&, part, at, values = std::vector<int>(values)](std::map<std::string, TensorBytes>& tensors) {
      TensorBytes& t = tensors.at(layer + part);
      bytes.assign(t.bytes.begin(), t.bytes.end());
      for (size_t i = 0; i < values.size(); ++i) bytes[at + i] = static_cast<std::byte>(values[i]);
      t.bytes = bytes;
    };
  };
  refused(poke(".g_idx", 4, {2}), "g_idx': expected the group of column 1, below 2, got 2");
  refused(poke(".g_idx", 0, {0xff, 0xff, 0xff, 0xff}), "expected the group of column 0, below 2, got -1");
  refused(poke(".qzeros", 8, {0x77, 0xf7}), "expected a zero point in [1, 15], as version 1 can store, got 16");
  refused(poke(".scales", 2, {0x00, 0x7c}), "scales': expected finite values, got inf");
  refused([&](auto& t) { t.erase(layer + ".scales"); }, "up_proj.scales' is missing");
  const auto shape = [&](const char* part, int64_t rows, int64_t columns) {
    return [&, part, rows, columns](auto& t) { t.at(layer + part).shape = {rows, columns}; };
  };
  refused(shape(".scales", 1, 128), "expected float16 (2, 64), got float16 (1, 128)");
  refused(shape(".qweight", 64, 4), "qweight': expected int32 (4, 64), got int32 (64, 4)");
  refused([&](auto& t) { t[layer + ".qweights"] = t.at(layer + ".qweight"); }, "qweights' is int32; expected floating");
  // An all-zero bias added by AutoGPTQ is ignored; a nonzero one is rejected.
  const std::vector<uint16_t> none(64, 0), some(64, 0x3c00);
  const auto biased = [&](const std::vector<uint16_t>& values) {
    return [&](auto& t) { t[layer + ".bias"] = {"", DType::bfloat16, {64}, std::as_bytes(std::span(values)), true}; };
  };
  refused(biased(some), "up_proj.bias' does not belong to this model");
  rewrite(biased(none));
  EXPECT_NO_THROW(HubFolder(path("")));
  fs::remove(path("quantize_config.json"));
  changed.erase("quantization_config");
  write("config.json", changed);
  expect_refused("is int32; expected floating-point values");
}

}  // namespace
}  // namespace tessera
