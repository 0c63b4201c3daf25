// Safetensors: accepted tensors cover the data without holes, each within its bounds.
#include <cstdint>
#include <span>
#include <string_view>

#include "data/safetensors.h"
#include "tests/fuzz/target.h"

namespace tessera::fuzz {

const Target target("safetensors", [](std::string_view bytes) {
  const std::span<const std::byte> all = as_bytes(bytes);
  const Safetensors file(all, kWhat);
  const std::byte* at = nullptr;
  for (const TensorBytes& t : file.tensors()) {
    require(at == nullptr || t.bytes.data() == at, "tensors are contiguous");
    require(t.bytes.data() >= all.data() + 8 &&
                t.bytes.size() <= static_cast<size_t>(all.data() + all.size() - t.bytes.data()),
            "a tensor is inside the file");
    auto size = static_cast<size_t>(element_size(t.dtype));
    for (const int64_t d : t.shape) size *= static_cast<size_t>(d);
    require(size == t.bytes.size(), "the shape fits the bytes");
    require(file.contains(t.name) && file.at(t.name).bytes.data() == t.bytes.data(), "a tensor is found by its name");
    at = t.bytes.data() + t.bytes.size();
  }
  require(at == nullptr || at == all.data() + all.size(), "the last tensor ends the file");
});

}  // namespace tessera::fuzz
