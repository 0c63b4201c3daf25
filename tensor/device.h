// Where a tensor's elements live, and how an op chooses its code by it.
//
// `meta` tensors have a shape and a dtype and no memory: a model is built on meta, cut into shards, and only then
// materialised. `cuda` is the GPU that the tensor's arena was made for.
#pragma once
#include <cstdint>
#include <string_view>

namespace tessera {

enum class Device : uint8_t { cpu, cuda, meta };

constexpr std::string_view to_string(Device device) {
  constexpr std::string_view names[] = {"cpu", "cuda", "meta"};
  return names[static_cast<int>(device)];
}

inline constexpr bool kWithCuda = TESSERA_WITH_CUDA;

// Calls cuda() for a tensor on a GPU and cpu() for all others. In a build without CUDA the second lambda is never
// called from anywhere, so the functions it names need not exist.
template <class Cpu, class Cuda>
decltype(auto) on_device([[maybe_unused]] Device device, const Cpu& cpu, [[maybe_unused]] const Cuda& cuda) {
  if constexpr (kWithCuda)
    if (device == Device::cuda) return cuda();
  return cpu();
}

}  // namespace tessera
