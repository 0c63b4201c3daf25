// Texts known by name, each verified by its SHA-256 and kept in the cache directory.
#pragma once
#include <optional>
#include <string>
#include <string_view>

#include "data/text.h"

namespace tessera {

// The text of a known name, or nothing for another name:
//   austen           Jane Austen's six novels (public domain, one document each), from the Debian and Ubuntu package
//                    r-cran-janeaustenr: the cached copy, an installed package, or `apt-get download` and `dpkg-deb
//                    -x`. Neither root nor R is needed.
//   tinyshakespeare  one file, fetched with curl or wget.
// Throws InputError, naming what failed and what to do, when it cannot be had or fails its checksum.
std::optional<Text> known_text(std::string_view name);

}  // namespace tessera
