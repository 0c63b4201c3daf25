// Adapter targets, adapters, and 4-bit layers.
#include "models/adapters/adapters.h"

#include <algorithm>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "base/error.h"
#include "models/families.h"
#include "nn/quantize/packed.h"

namespace tessera {
namespace {

std::string adapter_names(const ModelConfig& config) {
  std::string out;
  for (const LoraTarget& t : lora_targets(config)) out += (out.empty() ? "" : ", ") + std::string(t.name);
  return out + (config.experts.count > 0 ? " (experts have no adapters)" : "");
}

// Excludes the linear layers of adapters.
template <class F>
void for_each_linear(LanguageModel& model, int64_t i, const F& f) {
  const size_t above = model.layer(i).full_name().size() + 1;
  for (Linear* l : model.layer(i).all<Linear>())
    if (find_row(model.config.family).find(l->full_name().substr(above))) f(*l, l->full_name().substr(above));
}

template <class F>
void for_each_target(LanguageModel& model, const F& f) {
  for (int64_t i = 0; i < model.config.layers; ++i)
    for (const LoraTarget& target : lora_targets(model.config))
      for_each_linear(model, i, [&](Linear& l, const std::string& name) {
        if (name == target.linear) f(i, target, l);
      });
}

std::vector<int64_t> fused_rows(const ModelConfig& config, Linear& l, std::string_view name) {
  return fused_rows(config, find_row(config.family).find(name)->theirs.size(), l.parameter(l.weight).full_shape[0]);
}

}  // namespace

// The last component of a tensor's name, or the full name if two layers share it.
std::vector<LoraTarget> lora_targets(const ModelConfig& config) {
  const FamilyRow& row = find_row(config.family);
  const auto last_word = [](std::string_view name) { return name.substr(name.rfind('.') + 1); };
  std::vector<LoraTarget> out;
  for (const std::vector<TensorNames>* names : {&row.attention, &row.feed_forward})
    for (const TensorNames& linear : *names)
      for (size_t i = 0; i < linear.theirs.size(); ++i)
        out.push_back({linear.theirs[i], linear.ours, static_cast<int>(i)});
  std::vector<std::string_view> ends;
  for (const LoraTarget& t : out) ends.push_back(last_word(t.name));
  for (LoraTarget& t : out)
    if (std::ranges::count(ends, last_word(t.name)) == 1) t.name = last_word(t.name);
  if (config.experts.count > 0)
    std::erase_if(out, [&](const LoraTarget& t) {
      return std::ranges::find(row.feed_forward, t.linear, &TensorNames::ours) != row.feed_forward.end();
    });
  return out;
}

std::vector<int64_t> fused_rows(const ModelConfig& c, size_t count, int64_t rows) {
  const int64_t key = c.all_heads().key * c.head_size();
  if (count == 3) return {c.attended(), key, key};
  return std::vector<int64_t>(count, rows / static_cast<int64_t>(count));
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
        std::ranges::any_of(lora_targets(dense), [&](const LoraTarget& t) { return t.name == name; });
    throw FieldError("lora_targets", "expected one or more of " + adapter_names(c) + ", got '" + name + "'" +
                                         (of_experts ? "" : did_you_mean(name, names)));
  }
  if (c.lora.targets.empty()) throw FieldError("lora_targets", "expected one or more of " + adapter_names(c));
  model.freeze();
  for_each_target(model, [&](int64_t, const LoraTarget& target, Linear& l) {
    if (std::ranges::find(c.lora.targets, target.name) == c.lora.targets.end()) return;
    const std::vector<int64_t> rows = fused_rows(c, l, target.linear);
    int64_t first = 0;
    for (int i = 0; i < target.index; ++i) first += rows[static_cast<size_t>(i)];
    l.adapt(
        std::string(target.name), first, rows.at(static_cast<size_t>(target.index)),
        {.rank = c.lora.rank, .scale = c.lora.scale(), .dropout = c.lora.dropout, .starts_idle = c.lora.starts_idle});
  });
}

std::vector<AttachedLora> adapter_tensors(LanguageModel& model) {
  std::vector<AttachedLora> out;
  for_each_target(model, [&](int64_t layer, const LoraTarget& target, Linear& l) {
    for (Lora* adapter : l.hooks.adapters)
      if (adapter->full_name() == l.full_name() + "." + std::string(target.name))
        out.push_back({layer, target, &l, adapter});
  });
  return out;
}

void pack_layers(LanguageModel& model) {
  const QuantizeConfig& q = model.config.quantize;
  if (q.codec == Codec::none) return;
  for (int64_t i = 0; i < model.config.layers; ++i)
    for_each_linear(model, i, [&](Linear& l, const std::string& name) {
      const Shape& shape = l.weight.shape();
      l.quantize({.codec = q.codec,
                  .rows = shape[0],
                  .columns = shape[1],
                  .fused_rows = fused_rows(model.config, l, name),
                  .group = q.group > 0 ? q.group : shape[1]});
    });
}

std::map<std::string, Packing> weight_packings(const ModelConfig& config) {
  std::map<std::string, Packing> out;
  const std::unique_ptr<LanguageModel> model = make_model(config);
  for (const Parameter* p : model->parameters())
    if (p->packed) out.emplace(p->name, p->packed->packing);
  return out;
}

}  // namespace tessera
