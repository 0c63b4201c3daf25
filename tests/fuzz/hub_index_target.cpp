// model.safetensors.index.json: an accepted index names only files in the same directory.
#include <string>
#include <string_view>

#include "hub/folder.h"
#include "tests/fuzz/target.h"

namespace tessera::fuzz {

const Target target("hub_index", [](std::string_view bytes) {
  const auto shards = parse_hub_index(bytes, kWhat);
  require(!shards.empty(), "there are tensors");
  for (const auto& [tensor, file] : shards)
    require(file.ends_with(".safetensors") && file.find_first_of(std::string_view("/\0", 2)) == std::string::npos,
            "a file is in the same directory");
});

}  // namespace tessera::fuzz
