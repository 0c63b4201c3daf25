// Files that the build embeds in the program (cmake/tessera_embed.cmake).
#pragma once
#include <string_view>

namespace tessera {

struct EmbeddedFile {
  std::string_view name, text;  // name: without file extension
};

}  // namespace tessera
