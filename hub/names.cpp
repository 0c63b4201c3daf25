// The table of names.
#include "hub/names.h"

#include <fmt/format.h>

#include <map>
#include <memory>
#include <string_view>
#include <utility>

#include "tensor/error.h"

namespace tessera {
namespace {

using Pieces = std::vector<std::string_view>;
using Table = std::map<std::string_view, Pieces>;

const Table& gpt2_outside() {
  static const Table names{{"tokens.weight", {"transformer.wte.weight"}},
                           {"positions.weight", {"transformer.wpe.weight"}},
                           {"norm.weight", {"transformer.ln_f.weight"}},
                           {"norm.bias", {"transformer.ln_f.bias"}},
                           {"head.weight", {"lm_head.weight"}}};
  return names;
}
const Table& gpt2_inside() {
  static const Table names{{"norm1", {"ln_1"}},           {"norm2", {"ln_2"}},
                           {"attn.qkv", {"attn.c_attn"}}, {"attn.proj", {"attn.c_proj"}},
                           {"mlp.up", {"mlp.c_fc"}},      {"mlp.down", {"mlp.c_proj"}}};
  return names;
}
const Table& llama_outside() {
  static const Table names{{"tokens.weight", {"model.embed_tokens.weight"}},
                           {"norm.weight", {"model.norm.weight"}},
                           {"head.weight", {"lm_head.weight"}}};
  return names;
}
const Table& llama_inside() {
  static const Table names{{"norm1", {"input_layernorm"}},
                           {"norm2", {"post_attention_layernorm"}},
                           {"attn.qkv", {"self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"}},
                           {"attn.proj", {"self_attn.o_proj"}},
                           {"attn.norm_q", {"self_attn.q_norm"}},
                           {"attn.norm_k", {"self_attn.k_norm"}},
                           {"mlp.gate_up", {"mlp.gate_proj", "mlp.up_proj"}},
                           {"mlp.down", {"mlp.down_proj"}}};
  return names;
}

// Of layers with experts; {} stands for an expert's number.
const Table& mixtral_experts() {
  static const Table names{
      {"mlp.router", {"block_sparse_moe.gate"}},
      {"mlp.experts.gate_up", {"block_sparse_moe.experts.{}.w1", "block_sparse_moe.experts.{}.w3"}},
      {"mlp.experts.down", {"block_sparse_moe.experts.{}.w2"}}};
  return names;
}
const Table& qwen3_experts() {
  static const Table names{{"mlp.router", {"mlp.gate"}},
                           {"mlp.experts.gate_up", {"mlp.experts.{}.gate_proj", "mlp.experts.{}.up_proj"}},
                           {"mlp.experts.down", {"mlp.experts.{}.down_proj"}}};
  return names;
}

// Their names for a part of a layer: "mlp.down", "mlp.experts.7.down".
std::vector<std::string> names_of(const std::string& part, const ModelConfig& c) {
  constexpr std::string_view kExperts = "mlp.experts.";
  const Table& inside = c.family == Family::gpt2 ? gpt2_inside() : llama_inside();
  if (const auto found = inside.find(part); found != inside.end()) return {found->second.begin(), found->second.end()};
  std::string kind = part, number;
  if (part.starts_with(kExperts)) {
    const size_t end = part.find('.', kExperts.size());
    number = part.substr(kExperts.size(), end - kExperts.size());
    kind = std::string(kExperts) + part.substr(end + 1);
  }
  std::vector<std::string> out;
  const Table& experts = c.qk_norm ? qwen3_experts() : mixtral_experts();
  const auto found = experts.find(kind);
  if (found == experts.end()) throw Error("the hub has no name for '" + part + "' of a layer");
  for (const std::string_view name : found->second) {
    std::string& one = out.emplace_back(name);
    if (const size_t at = one.find("{}"); at != std::string::npos) one.replace(at, 2, number);
  }
  return out;
}

}  // namespace

std::vector<int64_t> HubTensor::shape_of(const Piece& piece) const {
  if (shape.rank() == 1) return {piece.rows};
  return transposed ? std::vector<int64_t>{shape[1], piece.rows} : std::vector<int64_t>{piece.rows, shape[1]};
}

std::vector<HubTensor> hub_tensors(const ModelConfig& config) {
  const bool gpt2 = config.family == Family::gpt2;
  ModelConfig plain = config;
  plain.tie_copies = false;
  plain.lora = {};
  const std::unique_ptr<LanguageModel> model = make_model(plain);
  const int64_t key = config.all_heads().key * config.head_size();
  std::map<const Parameter*, std::pair<int64_t, std::string>> layers;  // the number, and the layer's own name
  for (int64_t i = 0; i < plain.layers; ++i)
    for (const Parameter* p : model->layer(i).parameters()) layers[p] = {i, model->layer(i).full_name()};
  std::vector<HubTensor> out;
  for (const Parameter* p : model->parameters()) {
    HubTensor tensor{.name = p->name, .shape = p->whole, .pieces = {}};
    const auto inside = layers.find(p);
    if (inside == layers.end()) {
      const Table& names = gpt2 ? gpt2_outside() : llama_outside();
      tensor.pieces.push_back({std::string(names.at(p->name)[0]), p->whole[0]});
      out.push_back(std::move(tensor));
      continue;
    }
    const auto& [layer, above] = inside->second;
    const size_t begin = above.size() + 1, kind = p->name.rfind('.');
    const std::string part = p->name.substr(begin, kind - begin);
    const std::vector<std::string> names = names_of(part, config);
    std::vector<int64_t> rows{p->whole[0]};
    if (names.size() == 2) rows = {p->whole[0] / 2, p->whole[0] / 2};
    if (names.size() == 3) rows = {p->whole[0] - 2 * key, key, key};
    for (size_t i = 0; i < names.size(); ++i)
      tensor.pieces.push_back(
          {fmt::format("{}.{}.{}{}", gpt2 ? "transformer.h" : "model.layers", layer, names[i], p->name.substr(kind)),
           rows[i]});
    tensor.transposed = gpt2 && p->whole.rank() == 2;
    out.push_back(std::move(tensor));
  }
  return out;
}

}  // namespace tessera
