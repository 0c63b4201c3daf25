// The train/validation split of a text.
#include "data/text.h"

#include <fmt/format.h>

#include "tensor/error.h"

namespace tessera {

Text one_document(std::string name, std::string bytes) {
  const Span all{0, std::ssize(bytes)};
  return {std::move(name), std::move(bytes), {all}};
}

Split split_text(const Text& text) {
  Split split;
  for (const Span& d : text.documents) {
    int64_t cut = d.begin + (d.end - d.begin) * 9 / 10;
    while (cut < d.end && (static_cast<uint8_t>(text.bytes[static_cast<size_t>(cut)]) & 0xC0u) == 0x80u) ++cut;
    split.train.append(text.bytes, static_cast<size_t>(d.begin), static_cast<size_t>(cut - d.begin));
    split.val.append(text.bytes, static_cast<size_t>(cut), static_cast<size_t>(d.end - cut));
  }
  if (split.train.size() < 2 || split.val.size() < 2)
    throw InputError(fmt::format(
        "data '{}': a text of {} bytes is too short; its last tenth, held out for validation, needs at least 2 bytes",
        text.name, text.bytes.size()));
  return split;
}

}  // namespace tessera
