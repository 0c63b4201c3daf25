// What this machine can do at most, measured: the two roofs of the roofline (Williams et al. 2009).
#pragma once
#include "tensor/tensor.h"

namespace tessera::bench {

struct Ceilings {
  double bytes_per_s;  // of a copy, read and written bytes together, by all threads
  double flops;        // of a product of 1024^3, on a GPU of 8192^3, by the library
};

// The best of several rounds; the copy is of `bytes` to and from.
Ceilings measure_ceilings(DType dtype, int64_t bytes, const ArenaPtr& arena);

}  // namespace tessera::bench
