// Sharding and dequantization of 4-bit matrices.
#include "nn/quantize/packed.h"

#include <cstdint>
#include <memory>
#include <numeric>
#include <string>

#include "base/error.h"

namespace tessera {

std::shared_ptr<Packed> make_packed(const Packing& packing) {
  return std::make_shared<Packed>(Packed{.packing = packing, .runs = {{0, 0, packing.elements()}}});
}

void cut(Packed& packed, const Parameter& p) {
  const Packing& packing = packed.packing;
  packed.runs.clear();
  for_each_run(p.full_shape, p.shard, 0, p.local().numel(), [&](int64_t here, int64_t full, int64_t count) {
    packed.runs.push_back({here, full, count});
  });
  if (const int64_t bound = splits_block(packing, packed.runs); bound > 0) {
    int64_t step = bound;
    for (const ElementRun& run : packed.runs) step = std::gcd(step, std::gcd(run.full, run.count));
    throw FieldError(p.shard.axis, "'" + p.name + "' " + p.full_shape.str() + " would be sharded at multiples of " +
                                       std::to_string(step) + " elements, which the " +
                                       std::to_string(packing.block()) +
                                       " quantized together do not divide; expected fewer ranks");
  }
  packed.shard = {.axis = p.shard.axis};
  for_each_byte_run(packing, packed.runs, [&](int64_t, int64_t full, int64_t count) {
    packed.shard.runs.push_back({full, count});
  });
}

Var unpacked(const Parameter& p, DType dtype) {
  const auto make = [packed = p.packed, shape = p.local(), dtype] {
    if (!packed->bytes.defined()) throw Error("[packed] a 4-bit matrix was used before its bytes were loaded");
    Tensor out = packed->bytes.make(shape, dtype, Category::workspace);
    dequantize(packed->packing, packed->runs, packed->bytes, out);
    return out;
  };
  return Var(make()).with_recompute(make);
}

}  // namespace tessera
