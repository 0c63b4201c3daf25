// The families of models, a line for each.
#include "models/gpt.h"
#include "models/llama.h"
#include "models/lora.h"
#include "models/packed_layers.h"
#include "tensor/error.h"

namespace tessera {

namespace {

std::unique_ptr<LanguageModel> make_family(const ModelConfig& config) {
  switch (config.family) {
    case Family::gpt2:
      return std::make_unique<Gpt>(config);
    case Family::llama:
      return std::make_unique<Llama>(config);
  }
  throw Error("[model] there is no family " + std::to_string(static_cast<int>(config.family)));
}

}  // namespace

std::unique_ptr<LanguageModel> make_model(const ModelConfig& config) {
  if (config.experts.count > 0 && config.quantize.codec != Codec::none)
    throw FieldError("quantize", "not built beside experts; expected a model without experts, found " +
                                     std::to_string(config.experts.count) + " of them");
  std::unique_ptr<LanguageModel> made = make_family(config);
  attach_lora(*made);
  pack_layers(*made);
  return made;
}

}  // namespace tessera
