// Where a tensor's elements live.
//
// `meta` tensors have a shape and a dtype and no memory: a model is built on meta, cut into shards, and only then
// materialised.
#pragma once
#include <cstdint>

namespace tessera {

enum class Device : uint8_t { cpu, meta };

}  // namespace tessera
