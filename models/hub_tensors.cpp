// Names of the family table for every parameter of a model.
#include "models/hub_tensors.h"

#include <algorithm>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/error.h"
#include "models/adapters/adapters.h"
#include "models/families.h"

namespace tessera {
namespace {

// Hub names of a component of a layer: "mlp.down", "mlp.experts.7.down".
std::vector<std::string> layer_tensor_names(const std::string& module, const ModelConfig& c) {
  if (const TensorNames* found = find_row(c.family).find(module)) return {found->theirs.begin(), found->theirs.end()};
  constexpr std::string_view kExperts = "mlp.experts.";
  std::string kind = module, number;
  if (module.starts_with(kExperts)) {
    const size_t end = module.find('.', kExperts.size());
    number = module.substr(kExperts.size(), end - kExperts.size());
    kind = std::string(kExperts) + module.substr(end + 1);
  }
  std::vector<std::string> out;
  const FamilyRow& family = find_row(c.family);
  const std::vector<TensorNames>& experts = c.qk_norm ? family.normed_experts : family.experts;
  const auto found = std::ranges::find(experts, kind, &TensorNames::ours);
  if (found == experts.end()) throw Error("Hugging Face has no name for '" + module + "' of a layer");
  for (const std::string_view name : found->theirs) {
    std::string& one = out.emplace_back(name);
    if (const size_t at = one.find("{}"); at != std::string::npos) one.replace(at, 2, number);
  }
  return out;
}

}  // namespace

std::vector<int64_t> HubTensor::slice_shape(const Slice& slice) const {
  if (shape.ndim() == 1) return {slice.rows};
  return transposed ? std::vector<int64_t>{shape[1], slice.rows} : std::vector<int64_t>{slice.rows, shape[1]};
}

ModuleNames module_names(const ModelConfig& c) {
  const std::string layers(find_row(c.family).layers);
  if (c.family == Family::gpt2) return {"transformer.wte", layers, ".attn", ".mlp", "transformer.ln_f"};
  const bool mixtral = c.experts.count > 0 && !c.qk_norm;
  return {"model.embed_tokens", layers, ".self_attn", mixtral ? ".block_sparse_moe" : ".mlp", "model.norm"};
}

std::vector<HubTensor> hub_tensors(const ModelConfig& config) {
  const FamilyRow& family = find_row(config.family);
  ModelConfig plain = config;
  plain.tie_copies = false;
  plain.lora = {};
  const std::unique_ptr<LanguageModel> model = make_model(plain);
  std::map<const Parameter*, std::pair<int64_t, std::string>> layers;  // index, and name within the layer
  for (int64_t i = 0; i < plain.layers; ++i)
    for (const Parameter* p : model->layer(i).parameters()) layers[p] = {i, model->layer(i).full_name()};
  std::vector<HubTensor> out;
  for (const Parameter* p : model->parameters()) {
    HubTensor& tensor = out.emplace_back(HubTensor{.name = p->name, .shape = p->full_shape, .slices = {}});
    const auto inside = layers.find(p);
    if (inside == layers.end()) {
      const auto names = std::ranges::find(family.outside, p->name, &TensorNames::ours);
      tensor.slices.push_back({std::string(names->theirs.at(0)), p->full_shape[0]});
      continue;
    }
    const auto& [layer, above] = inside->second;
    const size_t begin = above.size() + 1, kind = p->name.rfind('.');
    const std::vector<std::string> names = layer_tensor_names(p->name.substr(begin, kind - begin), config);
    const std::vector<int64_t> rows = fused_rows(config, names.size(), p->full_shape[0]);
    for (size_t i = 0; i < names.size(); ++i)
      tensor.slices.push_back(
          {std::string(family.layers) + "." + std::to_string(layer) + "." + names[i] + p->name.substr(kind), rows[i]});
    tensor.transposed = family.transposed && p->full_shape.ndim() == 2;
  }
  return out;
}

}  // namespace tessera
