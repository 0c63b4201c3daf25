// Memory of units: initial values, and the flat buffers of which parameters are views.
#pragma once
#include <cstdint>

#include "nn/module.h"

namespace tessera {

// Initial values of elements [begin, begin + values.numel()) of a unit, independent of the layout: element i of the
// unsharded parameter is Philox::named(seed, name).normal(i) times its deviation. Gaps and elements past the unit are
// zero. A 4-bit weight is always generated in full, in float.
void initialise(const Module::Unit& unit, const Tensor& values, int64_t begin, uint64_t seed);
// A unit in buffers of at least unit.size elements: initial values, zero gradients, and parameters as views. `grads` is
// ignored for a frozen unit.
FlatUnit make_flat(const Module::Unit& unit, Tensor values, Tensor grads, uint64_t seed);
FlatUnit make_unit(const Module::Unit& unit, const ArenaPtr& arena, DType dtype, DType grad_dtype, uint64_t seed);
// Makes the unit's parameters views of these buffers, of at least unit.size elements.
void bind_values(const Module::Unit& unit, const Tensor& values);
void bind_gradients(const Module::Unit& unit, const Tensor& grads);
// Detaches the parameters from memory until the next bind_values().
void drop_values(const Module::Unit& unit, DType dtype);

}  // namespace tessera
