// Units of random parameters and gradients for tests of optimizers and the gradient norm.
#pragma once
#include <cstdint>
#include <deque>
#include <mutex>
#include <string>
#include <vector>

#include "nn/parameter.h"
#include "tensor/random.h"

namespace tessera::test {

inline FlatUnit make_unit(const std::string& name, const std::vector<int64_t>& sizes, DType values, DType grads,
                          const ArenaPtr& arena) {
  FlatUnit unit{.name = name, .values = {}, .grads = {}, .slots = {}};
  int64_t n = 0;
  for (size_t i = 0; i < sizes.size(); ++i) {
    static std::mutex one_at_a_time;
    static std::deque<Parameter> all;  // units outlive their creators
    const std::lock_guard lock(one_at_a_time);
    all.push_back({.name = name + "." + std::to_string(i), .full_shape = {sizes[i]}, .decays = i % 2 == 0});
    unit.slots.push_back({&all.back(), n, sizes[i]});
    n += (sizes[i] + 15) / 16 * 16;
  }
  unit.values = Tensor::empty({n}, values, arena, Category::parameters);
  unit.grads = Tensor::empty({n}, grads, arena, Category::gradients);
  unit.values.fill(0);
  unit.grads.fill(0);
  return unit;
}

// Writes f(i) to element i of each slot.
template <class F>
void fill_slots(const FlatUnit& unit, const Tensor& target, const F& f) {
  with_floating(target.dtype(), "test", [&](auto type) {
    using T = decltype(type);
    for (const Slot& slot : unit.slots)
      for (int64_t i = 0; i < slot.size; ++i)
        target.data<T>()[slot.begin + i] = static_cast<T>(static_cast<Accumulate<T>>(f(slot, i)));
  });
}

inline void fill_normal(const FlatUnit& unit, const Tensor& target, uint64_t seed, double scale) {
  fill_slots(unit, target, [=](const Slot& slot, int64_t i) {
    return scale * Philox::named(seed, slot.parameter->name).normal(static_cast<uint64_t>(i));
  });
}

}  // namespace tessera::test
