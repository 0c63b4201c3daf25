// config.json of a Hugging Face directory: an accepted model round-trips through config.json, including its
// quantization.
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>

#include "hub/config.h"
#include "tests/fuzz/target.h"

namespace tessera::fuzz {

const Target target("hub_config", [](std::string_view bytes) {
  std::optional<GptqConfig> gptq;
  const ModelConfig c = parse_hub_config(bytes, kWhat, &gptq);
  if (c.layers <= 64) require(!hub_tensors(c).empty(), "a model has tensors");
  std::string written;
  try {
    written = hub_config(c, DType::float32, gptq ? &*gptq : nullptr);
  } catch (const InputError&) {
    throw std::logic_error("a model is no file");
  } catch (const Error&) {
    return;  // the family does not support this head size
  }
  std::optional<GptqConfig> again;
  const ModelConfig same = parse_hub_config(written, kWhat, &again);
  require(hub_config(same, DType::float32, again ? &*again : nullptr) == written, "a configuration round-trips");
});

}  // namespace tessera::fuzz
