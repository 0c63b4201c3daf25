// The part of a parameter that is here: its shape and its size.
#include "nn/parameter.h"

#include "nn/quantize/packed.h"

namespace tessera {

Shape Parameter::local() const {
  Shape here = whole;
  if (shard.is_whole()) return here;
  here[shard.dim] = 0;
  for (const ShardSpec::Run& run : shard.runs) here[shard.dim] += run.size;
  return here;
}

Shape Parameter::stored() const { return packed ? packed->stored() : whole; }
const ShardSpec& Parameter::stored_shard() const { return packed ? packed->shard : shard; }
int64_t Parameter::stored_here() const {
  const int64_t elements = local().numel();
  return packed ? packed->packing.bytes(elements) : elements;
}

}  // namespace tessera
