// The configuration file: accepted options round-trip through TOML.
#include <string>
#include <string_view>

#include "app/resolve.h"
#include "tests/fuzz/target.h"

namespace tessera::fuzz {

const Target target("config", [](std::string_view bytes) {
  TypedOptions options, again;
  apply_config(options, bytes, kWhat);
  const std::string written = to_toml(options);
  try {
    apply_config(again, written, "what was written");
  } catch (const Error& e) {
    require(false, std::string("a written configuration can be read: ") + e.what());
  }
  require(config_values(again) == config_values(options), "a configuration round-trips");
  named([&] { checked(options); });  // errors name the option, which may also come from the command line
});

}  // namespace tessera::fuzz
