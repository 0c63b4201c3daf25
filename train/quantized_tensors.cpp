// Readers around readers.
#include "train/quantized_tensors.h"

#include <cstring>
#include <map>
#include <memory>

#include "models/packed_layers.h"

namespace tessera {
namespace {

using Bytes = std::vector<std::byte>;

TensorReader reader_of(const std::shared_ptr<const Bytes>& bytes) {
  return [bytes](int64_t begin, std::span<std::byte> to) { std::memcpy(to.data(), bytes->data() + begin, to.size()); };
}

}  // namespace

WholeTensors quantized(const ModelConfig& config, WholeTensors numbers) {
  return [all = packings_of(config), numbers = std::move(numbers)](const std::string& name, DType dtype,
                                                                   const Shape& shape) -> TensorReader {
    const auto found = all.find(name);
    if (found == all.end() || dtype != DType::uint8) return numbers(name, dtype, shape);
    const Packing& p = found->second;
    const TensorReader read = numbers(name, DType::float32, {p.rows, p.columns});
    try {
      return reader_of(std::make_shared<const Bytes>(
          quantize(p, [&](int64_t begin, std::span<float> to) { read(begin, std::as_writable_bytes(to)); })));
    } catch (const InputError&) {
      throw;
    } catch (const Error& e) {
      throw InputError("'" + name + "': " + e.what());
    }
  };
}

WholeTensors dequantized(const ModelConfig& config, WholeTensors stored) {
  return [all = packings_of(config), stored = std::move(stored)](const std::string& name, DType dtype,
                                                                 const Shape& shape) -> TensorReader {
    const auto found = all.find(name);
    if (found == all.end() || dtype == DType::uint8) return stored(name, dtype, shape);
    const Packing& p = found->second;
    const auto bytes = std::make_shared<Bytes>(static_cast<size_t>(p.bytes()));
    stored(name, DType::uint8, {p.bytes()})(0, *bytes);
    return [bytes, &p, dtype](int64_t begin, std::span<std::byte> to) {
      std::vector<float> wide(to.size() / static_cast<size_t>(size_of(dtype)));
      dequantize(p, *bytes, begin, wide);
      with_floating(dtype, "dequantize", [&](auto t) {
        using T = decltype(t);
        for (size_t i = 0; i < wide.size(); ++i) {
          const T value = converted<T>(wide[i]);
          std::memcpy(to.data() + i * sizeof value, &value, sizeof value);
        }
      });
    };
  };
}

}  // namespace tessera
