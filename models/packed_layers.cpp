// The linear layers of each decoder layer.
#include "models/packed_layers.h"

#include <algorithm>
#include <vector>

#include "models/lora.h"
#include "nn/quantize/packed.h"

namespace tessera {

void pack_layers(LanguageModel& model) {
  const QuantizeConfig& q = model.config.quantize;
  if (q.codec == Codec::none) return;
  for (int64_t i = 0; i < model.config.layers; ++i) {
    std::vector<const Linear*> adapters;
    for (const Lora* l : model.layer(i).all<Lora>()) adapters.insert(adapters.end(), {&l->a, &l->b});
    for (Linear* l : model.layer(i).all<Linear>()) {
      if (std::ranges::find(adapters, l) != adapters.end()) continue;
      const Shape& shape = l->weight.shape();
      l->quantize({.codec = q.codec,
                   .rows = shape[0],
                   .columns = shape[1],
                   .pieces = fused_rows(model, *l),
                   .group = q.group > 0 ? q.group : shape[1]});
    }
  }
}

std::map<std::string, Packing> packings_of(const ModelConfig& config) {
  std::map<std::string, Packing> out;
  const std::unique_ptr<LanguageModel> model = make_model(config);
  for (const Parameter* p : model->parameters())
    if (p->packed) out.emplace(p->name, p->packed->packing);
  return out;
}

}  // namespace tessera
