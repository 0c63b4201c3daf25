// adapter_config.json of a PEFT directory: accepted adapters round-trip.
#include <string_view>

#include "hub/peft.h"
#include "tests/fuzz/target.h"

namespace tessera::fuzz {

const Target target("peft_config", [](std::string_view bytes) {
  const PeftConfig c = parse_peft_config(bytes, kWhat);
  require(c.lora.rank >= 1 && !c.targets.empty(), "adapters have a rank and layers");
  LoraConfig lora = c.lora;
  lora.targets = {"q_proj"};
  const PeftConfig again = parse_peft_config(peft_config(lora, Family::llama, c.base), kWhat);
  require(again.base == c.base && again.lora.rank == c.lora.rank && again.lora.alpha == c.lora.alpha, "it round-trips");
});

}  // namespace tessera::fuzz
