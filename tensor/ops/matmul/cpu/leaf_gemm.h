// The CPU's matmul in leaves.
#pragma once
#include "tensor/cpu/vectorize.h"
#include "tensor/ops/matmul/leaves.h"

namespace tessera::cpu {

// out (M, N) = a (M, K) b (K, N) in float32 (float64 for float64) on the CPU, rounded once to out's dtype. Any strides
// of a and b; out has contiguous rows. An element is bitwise independent of M, N, threads and the instruction set.
// Cost: 2 M N K FLOPs, and copies of both operands in panels.
void leaf_matmul(const Tensor& out, const Tensor& a, const Tensor& b, const LeafOrder& order,
                 InstructionSet isa = instruction_set());

}  // namespace tessera::cpu
