// Which weights of a model are held in four bits: those of the linear layers inside of its decoder layers, as QLoRA has
// it. Embeddings, head, norms, biases and adapters stay as they are.
#pragma once
#include <map>
#include <string>

#include "models/language_model.h"
#include "tensor/ops/quantize/quantize.h"

namespace tessera {

// Freezes these weights of a model whose configuration asks for it, and says how they are quantised. Before place(),
// and before there is memory. Throws Error (usage) for sizes that do not divide.
void pack_layers(LanguageModel& model);

// Of the whole model, by the names of their parameters. Cost: shapes only.
std::map<std::string, Packing> packings_of(const ModelConfig& config);

}  // namespace tessera
