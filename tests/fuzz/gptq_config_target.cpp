// The GPTQ configuration: an accepted one round-trips.
#include <string_view>

#include "hub/gptq_format.h"
#include "tests/fuzz/target.h"

namespace tessera::fuzz {

const Target target("gptq_config", [](std::string_view bytes) {
  const GptqConfig config = parse_gptq_config(bytes, kWhat, false);
  require(config.group == -1 || config.group > 0, "a group has columns");
  const GptqConfig again = parse_gptq_config(gptq_config(config), kWhat);
  require(again.group == config.group, "a configuration round-trips");
});

}  // namespace tessera::fuzz
