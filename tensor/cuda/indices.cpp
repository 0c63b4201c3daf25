// Slots, one for each op and limit, and the complaint that is made of what a kernel wrote.
#include "tensor/cuda/indices.h"

#include <fmt/format.h>

#include <algorithm>
#include <string_view>

namespace tessera::cuda {

IndexChecks::IndexChecks() {
  check(cudaHostAlloc(memory_.receive(), kMost * sizeof(*first_), cudaHostAllocDefault), "context");
  first_ = static_cast<unsigned long long*>(memory_.get());
  std::fill(first_, first_ + kMost, kNone);
}

Bounds IndexChecks::bounds(const Indices& indices) {
  const std::lock_guard lock(mutex_);
  size_t slot = 0;
  while (slot < count_ &&
         (known_[slot].limit != indices.limit || std::string_view(known_[slot].op) != std::string_view(indices.op)))
    ++slot;
  if (slot == kMost) return {};
  if (slot == count_) known_[count_++] = indices;
  return {first_ + slot, indices.limit};
}

void IndexChecks::report() {
  const std::lock_guard lock(mutex_);
  const auto* const found = std::find_if(first_, first_ + count_, [](unsigned long long f) { return f != kNone; });
  if (found == first_ + count_) return;
  const Indices of = known_[static_cast<size_t>(found - first_)];
  const auto place = *found >> 32;
  const auto value = static_cast<int32_t>(static_cast<uint32_t>(*found));
  std::fill(first_, first_ + count_, kNone);
  throw Error(fmt::format("[{}] {} {} {} {} is outside [0, {})", of.op, of.what, value, of.where, place, of.limit));
}

std::span<const unsigned long long> IndexChecks::complaints() {
  const std::lock_guard lock(mutex_);
  return {first_, count_};
}

void IndexChecks::clear() {
  const std::lock_guard lock(mutex_);
  count_ = 0;
}

}  // namespace tessera::cuda
