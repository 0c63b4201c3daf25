// Device of a tensor's elements, and dispatch on it.
//
// `meta` tensors have a shape and a dtype but no memory: a model is built on meta, sharded, and only then materialized.
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

// Calls cuda() for a tensor on a GPU, cpu() otherwise. A build without CUDA never instantiates cuda(), so the functions
// it calls need not exist.
template <class Cpu, class Cuda>
decltype(auto) on_device([[maybe_unused]] Device device, const Cpu& cpu, [[maybe_unused]] const Cuda& cuda) {
  if constexpr (kWithCuda)
    if (device == Device::cuda) return cuda();
  return cpu();
}

}  // namespace tessera
