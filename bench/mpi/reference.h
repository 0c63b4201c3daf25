// Reference of the collective benchmarks.
#pragma once
#include <cstdint>

namespace tessera::bench {

void mpi_all_reduce_out_of_place(const float* in, float* out, int64_t count);

}  // namespace tessera::bench
