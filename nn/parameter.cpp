// What of a parameter is here.
#include "nn/parameter.h"

namespace tessera {

Shape Parameter::local() const {
  Shape here = whole;
  if (shard.is_whole()) return here;
  here[shard.dim] = 0;
  for (const ShardSpec::Run& run : shard.runs) here[shard.dim] += run.size;
  return here;
}

}  // namespace tessera
