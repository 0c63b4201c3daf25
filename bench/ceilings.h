// What this machine can do at most, measured: the two roofs of the roofline (Williams et al. 2009).
#pragma once
#include "tensor/tensor.h"

namespace tessera::bench {

struct Ceilings {
  double bytes_per_s;  // of a copy, read and written bytes together, by all threads
  double flops;        // of a product of 1024^3, on a GPU of 8192^3, by the library
};

double copy_rate(int64_t bytes, double seconds);  // bytes/s of a copy of so many: they are read and written
double product_rate(int64_t n, double seconds);   // FLOP/s of a product of n x n matrices

// What a benchmark says of so much work, done in so many seconds.
struct Rates {
  double bytes_per_s, flops, share;  // share: of the time that the slower of the two takes at the ceilings
};
Rates rates_of(double bytes, double flops, double seconds, const Ceilings& ceilings);

// The best of several rounds; the copy is of `bytes` to and from.
Ceilings measure_ceilings(DType dtype, int64_t bytes, const ArenaPtr& arena);

}  // namespace tessera::bench
