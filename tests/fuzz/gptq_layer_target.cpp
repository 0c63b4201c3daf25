// A GPTQ layer in a safetensors file: an accepted layer decodes to the values of its codes and packs to identical bits.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>
#include <vector>

#include "hub/gptq_format.h"
#include "tests/fuzz/target.h"

namespace tessera::fuzz {

const Target target("gptq_layer", [](std::string_view bytes) {
  const Safetensors file(as_bytes(bytes), kWhat, true);
  const TensorBytes &qweight = file.at("qweight"), &scales = file.at("scales");
  // A model defines the sizes; here they follow from two tensors, which may be inconsistent.
  if (qweight.shape.size() != 2 || scales.shape.size() != 2 || qweight.bytes.empty() || scales.bytes.empty())
    throw InputError(std::string(kWhat) + ": no sizes");
  const int64_t rows = qweight.shape[1], columns = 8 * qweight.shape[0], groups = scales.shape[0];
  const int64_t group = std::max<int64_t>(1, columns / groups);
  const TensorBytes* const g_idx = file.contains("g_idx") ? &file.at("g_idx") : nullptr;
  const GptqLayer layer({&qweight, &file.at("qzeros"), &scales, g_idx}, rows, columns, {.group = group}, kWhat);
  std::vector<float> values(static_cast<size_t>(rows * columns));
  layer.decode(0, values);
  require(std::ranges::all_of(values, [](float v) { return std::isfinite(v); }), "values are finite");
  if (!layer.plain()) return;  // an Int4Matrix cannot represent its codes
  const Int4Matrix matrix = layer.unpack();
  const GptqTensors packed = pack_gptq(matrix, 0, rows);
  require(std::memcmp(packed.qweight.data(), qweight.bytes.data(), qweight.bytes.size()) == 0, "codes round-trip");
  require(std::memcmp(packed.scales.data(), scales.bytes.data(), scales.bytes.size()) == 0, "scales round-trip");
});

}  // namespace tessera::fuzz
