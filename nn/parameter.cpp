// Local and stored shapes of parameters.
#include "nn/parameter.h"

#include "nn/quantize/packed.h"

namespace tessera {

Shape ShardSpec::slice_unit(Shape full) const {
  if (is_replicated()) return full;
  full[dim] = 0;
  for (const Run& run : runs) full[dim] += run.size;
  return full;
}

Shape Parameter::stored() const { return packed ? packed->stored() : full_shape; }
const ShardSpec& Parameter::stored_shard() const { return packed ? packed->shard : shard; }
int64_t Parameter::stored_here() const {
  const int64_t elements = local().numel();
  return packed ? packed->packing.bytes(elements) : elements;
}

}  // namespace tessera
