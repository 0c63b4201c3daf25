// Initial values and flat buffers of units.
#include "nn/units.h"

#include <algorithm>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "autograd/parameter_memory.h"
#include "nn/quantize/packed.h"
#include "tensor/cpu/vectorize.h"
#include "tensor/random.h"

namespace tessera {
namespace {

// `values` are the elements from index `from` on.
void initialise_elements(const Tensor& values, const Init& init, const Philox& random, int64_t from) {
  if (init.deviation == 0) {
    Tensor v = values;
    v.fill(init.constant);
    return;
  }
  with_floating(values.dtype(), "init", [&]<class T>(T) {
    T* const p = values.data<T>();
    cpu::split(values.numel(), 4096, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i)
        p[i] = T(static_cast<Accumulate<T>>(random.normal(static_cast<uint64_t>(from + i)) * init.deviation));
    });
  });
}

// Initializes bytes [begin, begin + values.numel()) of the local shard of a 4-bit matrix.
void initialise_bytes(const Tensor& values, const Parameter& p, const Philox& random, int64_t begin) {
  const std::vector<std::byte> full = quantize(p.packed->packing, [&](int64_t from, std::span<float> to) {
    cpu::split(std::ssize(to), 4096, [&](int64_t first, int64_t last) {
      for (int64_t i = first; i < last; ++i)
        to[static_cast<size_t>(i)] = static_cast<float>(
            p.init.deviation == 0 ? p.init.constant
                                  : random.normal(static_cast<uint64_t>(from + i)) * p.init.deviation);
    });
  });
  for_each_run(p, begin, begin + values.numel(), [&](int64_t at, int64_t from, int64_t count) {
    std::copy_n(full.begin() + from, count, values.raw() + (at - begin));
  });
}

Tensor view(const Tensor& buffer, const Slot& slot) {
  return buffer.narrow(0, slot.begin, slot.size).reshape(slot.parameter->local());
}

}  // namespace

void initialise(const Module::Unit& unit, const Tensor& values, int64_t begin, uint64_t seed) {
  if (cpu::DryRun::here()) return;
  // GPU values are generated on the host, whose C library gives bitwise identical sines and logarithms everywhere.
  const bool here = values.device() == Device::cpu;
  Tensor all =
      here ? values : Tensor::empty(values.shape(), values.dtype(), values.arena()->host(), Category::workspace);
  all.fill(0);
  const int64_t end = begin + values.numel();
  for (const Slot& slot : unit.slots) {
    const int64_t from = std::max(begin, slot.begin), to = std::min(end, slot.end());
    const Philox random = Philox::named(seed, slot.parameter->source());
    if (unit.packed) {
      if (from < to)
        initialise_bytes(all.narrow(0, from - begin, to - from), *slot.parameter, random, from - slot.begin);
      continue;
    }
    for_each_run(*slot.parameter, from - slot.begin, to - slot.begin, [&](int64_t at, int64_t full, int64_t count) {
      initialise_elements(all.narrow(0, slot.begin + at - begin, count), slot.parameter->init, random, full);
    });
  }
  if (!here) Tensor(values).copy_from(all);
}

void bind_values(const Module::Unit& unit, const Tensor& values) {
  for (const Slot& slot : unit.slots)
    if (unit.packed)
      slot.parameter->packed->bytes = values.narrow(0, slot.begin, slot.size);
    else
      slot.parameter->var.set_value(view(values, slot));
}

void drop_values(const Module::Unit& unit, DType dtype) {
  for (const Slot& slot : unit.slots)
    if (unit.packed)
      slot.parameter->packed->bytes = Tensor();
    else
      slot.parameter->var.set_value(Tensor::meta(slot.parameter->var.shape(), dtype));
}

void bind_gradients(const Module::Unit& unit, const Tensor& grads) {
  for (const Slot& slot : unit.slots) set_grad_buffer(slot.parameter->var, view(grads, slot));
}

FlatUnit make_flat(const Module::Unit& unit, Tensor values, Tensor grads, uint64_t seed) {
  initialise(unit, values, 0, seed);
  bind_values(unit, values);
  if (!unit.trainable) return {unit.name, std::move(values), {}, unit.slots};
  grads.fill(0);
  bind_gradients(unit, grads);
  return {unit.name, std::move(values), std::move(grads), unit.slots};
}

FlatUnit make_unit(const Module::Unit& unit, const ArenaPtr& arena, DType dtype, DType grad_dtype, uint64_t seed) {
  const Tensor values = Tensor::empty({unit.size}, unit.dtype(dtype), arena, Category::parameters);
  if (!unit.trainable) return make_flat(unit, values, {}, seed);
  return make_flat(unit, values, Tensor::empty({unit.size}, grad_dtype, arena, Category::gradients), seed);
}

}  // namespace tessera
