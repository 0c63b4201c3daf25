// Muon (Jordan et al. 2024, "Muon: an optimizer for hidden layers in neural networks"): layer matrices are updated by
// approximately orthogonalized momentum (singular values near 1), all other parameters by AdamW.
//
//   g = grad_scale * grad      m = momentum m + g      u = g + momentum m            (Nesterov)
//   o = orthogonalized u       p = p (1 - lr weight_decay) - lr 0.2 sqrt(max(rows, columns)) o
//
// The factor matches the typical magnitude of AdamW's updates, so both share one learning rate and weight decay (Liu et
// al. 2025, "Muon is scalable for LLM training", section 2.2). Fused queries, keys and values are three matrices
// (Parameter::rows).
//
// An update needs the full matrix, of which a rank may have only a shard: the optimizer computes u for its elements
// (MuonMomentum, optim/rules.h) and passes it to `orthogonalise`, which parallel/matrix_owners.h replaces.
#pragma once
#include <cstdint>
#include <vector>

#include "nn/parameter.h"

namespace tessera {

// Orthogonalizes x in place by five Newton-Schulz iterations: U S V^T becomes U S' V^T with S' between about 0.7 and
// 1.2 (0 stays 0). x: (rows, columns), contiguous; float32 or float64, which is also the accumulation dtype. Bitwise
// deterministic for a given shape and number of threads. Cost: 10 (2 rows columns n + n^3) FLOPs with n the smaller
// dimension, and buffers for one matrix of that shape and two of (n, n), plus the GEMM library's workspace.
void orthogonalise(const Tensor& x);
// Upper bound on that memory, including GEMM workspace on that device, for elements of `element` bytes.
int64_t orthogonalise_bytes(int64_t rows, int64_t columns, int64_t element, Device device);
// Orthogonalizes a full parameter, matrix by matrix, and multiplies by the update's factor.
void make_matrix_update(const Parameter& parameter, const Tensor& full);

// Units without full matrices have undefined `updates`.
void make_updates(const std::vector<FlatUnit>& units, const std::vector<Tensor>& updates);

namespace cuda {
// float32 or float64. x = x / (sqrt(square) + eps), with `square` float64 (1) on the GPU.
void normalise(const Tensor& x, const Tensor& square, double eps);
// y = a x + b y.
void blend(const Tensor& y, const Tensor& x, double a, double b);
}  // namespace cuda

}  // namespace tessera
