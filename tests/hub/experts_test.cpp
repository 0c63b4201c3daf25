// Models with experts under the names and keys of the transformers library.
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "hub/config.h"

namespace tessera {
namespace {

using Json = nlohmann::json;

// Every layer of Mixtral and Qwen3-MoE has experts, each with tensors of its own.
TEST(HubExperts, HaveTheNamesAndKeysOfTransformers) {
  ModelConfig mixtral{.family = Family::llama, .layers = 2, .heads = 2, .channels = 16, .context = 32, .vocab = 40};
  mixtral.kv_heads = 1, mixtral.head_dim = 8, mixtral.ffn = 24, mixtral.tied = false;
  mixtral.experts.count = 3;
  ModelConfig qwen3 = mixtral;
  qwen3.qk_norm = true, qwen3.experts.per_token = 3, qwen3.experts.softmax = RouterSoftmax::all;
  for (const ModelConfig& c : {mixtral, qwen3}) {
    const std::string text = hub_config(c, DType::float32);
    const ModelConfig again = parse_hub_config(text, "config.json");
    EXPECT_EQ(again.experts, c.experts);
    EXPECT_EQ(again.hidden(), c.hidden());
    EXPECT_EQ(again.qk_norm, c.qk_norm);
    std::vector<std::string> names;
    for (const HubTensor& t : hub_tensors(c))
      for (const HubTensor::Piece& p : t.pieces) names.push_back(p.name + " " + std::to_string(p.rows));
    const auto has = [&](const std::string& name) { return std::ranges::find(names, name) != names.end(); };
    EXPECT_TRUE(has(c.qk_norm ? "model.layers.1.mlp.gate.weight 3" : "model.layers.1.block_sparse_moe.gate.weight 3"));
    EXPECT_TRUE(has(c.qk_norm ? "model.layers.0.mlp.experts.2.gate_proj.weight 24"
                              : "model.layers.0.block_sparse_moe.experts.2.w1.weight 24"));
    EXPECT_TRUE(has(c.qk_norm ? "model.layers.0.mlp.experts.2.up_proj.weight 24"
                              : "model.layers.0.block_sparse_moe.experts.2.w3.weight 24"));
    EXPECT_TRUE(has(c.qk_norm ? "model.layers.1.mlp.experts.0.down_proj.weight 16"
                              : "model.layers.1.block_sparse_moe.experts.0.w2.weight 16"));
    const auto refused = [&](const char* key, const Json& value) {
      Json json = Json::parse(text);
      json[key] = value;
      EXPECT_THROW(parse_hub_config(json.dump(), "config.json"), InputError) << key;
    };
    refused("num_experts_per_tok", 4);
    refused(c.qk_norm ? "num_experts" : "num_local_experts", 0);
    refused(c.qk_norm ? "decoder_sparse_step" : "router_jitter_noise", 2);
    ModelConfig other = c;
    other.experts.shared = 1;
    EXPECT_THROW(hub_config(other, DType::float32), Error);
    other = c;
    other.family = Family::gpt2;
    EXPECT_THROW(hub_config(other, DType::float32), Error);
  }
}

}  // namespace
}  // namespace tessera
