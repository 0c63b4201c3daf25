// The targets of each family, and adapters in their places.
#include "models/lora.h"

#include <algorithm>
#include <string>

#include "tensor/error.h"

namespace tessera {
namespace {

std::string names_of(const ModelConfig& config) {
  std::string out;
  for (const LoraTarget& t : lora_targets(config)) out += (out.empty() ? "" : ", ") + std::string(t.name);
  return out + (config.experts.count > 0 ? " (experts have no adapters)" : "");
}

bool is_wanted(const LoraConfig& lora, const LoraTarget& target) {
  return std::ranges::any_of(lora.targets, [&](const std::string& name) { return name == target.name; });
}

// In the order of layers and targets: f(layer, target, its linear layer).
template <class F>
void for_each_target(LanguageModel& model, const F& f) {
  for (int64_t i = 0; i < model.config.layers; ++i) {
    const std::string above = model.layer(i).full_name() + ".";
    const std::vector<Linear*> linears = model.layer(i).all<Linear>();
    for (const LoraTarget& target : lora_targets(model.config))
      for (Linear* l : linears)
        if (l->full_name() == above + std::string(target.linear)) f(i, target, *l);
  }
}

}  // namespace

const std::vector<LoraTarget>& lora_targets(const ModelConfig& config) {
  static const std::vector<LoraTarget> gpt2{
      {"c_attn", "attn.qkv"}, {"attn.c_proj", "attn.proj"}, {"c_fc", "mlp.up"}, {"mlp.c_proj", "mlp.down"}};
  static const std::vector<LoraTarget> llama{{"q_proj", "attn.qkv", 0},       {"k_proj", "attn.qkv", 1},
                                             {"v_proj", "attn.qkv", 2},       {"o_proj", "attn.proj"},
                                             {"gate_proj", "mlp.gate_up", 0}, {"up_proj", "mlp.gate_up", 1},
                                             {"down_proj", "mlp.down"}};
  static const std::vector<LoraTarget> gpt2_attention(gpt2.begin(), gpt2.begin() + 2),
      llama_attention(llama.begin(), llama.begin() + 4);
  if (config.experts.count > 0) return config.family == Family::gpt2 ? gpt2_attention : llama_attention;
  return config.family == Family::gpt2 ? gpt2 : llama;
}

std::vector<int64_t> fused_rows(LanguageModel& model, Linear& l) {
  const ModelConfig& c = model.config;
  const int64_t rows = l.parameter(l.weight).whole[0];
  if (c.family == Family::gpt2) return {rows};
  const int64_t d = c.head_size(), key = c.all_heads().key * d;
  for (int64_t i = 0; i < c.layers; ++i) {
    for (const Attention* attention : model.layer(i).all<Attention>())
      if (&attention->qkv == &l) return {c.attended(), key, key};
    for (const GatedMlp* mlp : model.layer(i).all<GatedMlp>())
      if (&mlp->gate_up == &l) return {c.hidden(), c.hidden()};
  }
  return {rows};
}

void attach_lora(LanguageModel& model) {
  const ModelConfig& c = model.config;
  if (c.lora.rank == 0) return;
  ModelConfig dense = c;
  dense.experts = {};
  std::vector<std::string> names;
  for (const LoraTarget& t : lora_targets(c)) names.emplace_back(t.name);
  for (const std::string& name : c.lora.targets) {
    if (std::ranges::find(names, name) != names.end()) continue;
    const bool of_experts =
        std::ranges::find(lora_targets(dense), name, &LoraTarget::name) != lora_targets(dense).end();
    throw FieldError("lora_targets", "expected some of " + names_of(c) + ", found '" + name + "'" +
                                         (of_experts ? "" : did_you_mean(name, names)));
  }
  if (c.lora.targets.empty()) throw FieldError("lora_targets", "expected some of " + names_of(c));
  model.freeze();
  for_each_target(model, [&](int64_t, const LoraTarget& target, Linear& l) {
    if (!is_wanted(c.lora, target)) return;
    const std::vector<int64_t> parts = fused_rows(model, l);
    int64_t first = 0;
    for (int i = 0; i < target.part; ++i) first += parts[static_cast<size_t>(i)];
    l.adapt(
        std::string(target.name), first, parts.at(static_cast<size_t>(target.part)),
        {.rank = c.lora.rank, .scale = c.lora.scale(), .dropout = c.lora.dropout, .starts_idle = c.lora.starts_idle});
  });
}

std::vector<AttachedLora> adapters_of(LanguageModel& model) {
  std::vector<AttachedLora> out;
  for_each_target(model, [&](int64_t layer, const LoraTarget& target, Linear& l) {
    for (Lora* adapter : l.adapters())
      if (adapter->full_name() == l.full_name() + "." + std::string(target.name))
        out.push_back({layer, &target, &l, adapter});
  });
  return out;
}

}  // namespace tessera
