// Muon (Jordan et al. 2024, "Muon: an optimizer for hidden layers in neural networks"): the matrices of layers are
// updated by the nearest matrix whose singular values are all about 1, and everything else by AdamW.
//
//   g = grad_scale * grad      m = momentum m + g      u = g + momentum m            (Nesterov)
//   o = orthogonalised u       p = p (1 - lr weight_decay) - lr 0.2 sqrt(max(rows, columns)) o
//
// The factor gives an element of the update the usual size of AdamW's, so one learning rate and one weight decay serve
// both (Liu et al. 2025, "Muon is scalable for LLM training", section 2.2). A fused matrix of queries, keys and values
// is three matrices (Parameter::rows).
//
// An update needs a whole matrix, and a rank may have a part of it: the optimizer makes u of its elements
// (MuonMomentum, optim/rules.h), and hands all of them to `orthogonalise`, which ranks put in place of this file's
// (parallel/matrix_owners.h).
#pragma once

#include "nn/parameter.h"

namespace tessera {

// x = its Newton-Schulz iteration of five steps: a matrix U S V^T becomes U S' V^T with S' between about 0.7 and 1.2 (0
// stays 0). x: (rows, columns), contiguous, float32 or float64, in whose products the sums are made. The same bits for
// the same shape and number of threads. Cost: 10 (2 rows columns n + n^3) FLOPs, and memory for a matrix of that shape
// and two of (n, n), n the smaller side, beside what a product's library copies of its operands.
void orthogonalise(const Tensor& x);
// Bytes of that memory at most, with the copies that products make on that device, for elements of `element` bytes.
int64_t orthogonalise_bytes(int64_t rows, int64_t columns, int64_t element, Device device);
// Makes the whole of a parameter orthogonal, matrix by matrix, and then multiplies by the factor of the update.
void make_matrix_update(const Parameter& parameter, const Tensor& whole);

// The updates of units that have all of their matrices; undefined for other units.
void make_updates(const std::vector<FlatUnit>& units, const std::vector<Tensor>& updates);

namespace cuda {
// Tensors here are float32 or float64. x = x / (sqrt(square) + eps), with `square` float64 (1) on the GPU.
void normalise(const Tensor& x, const Tensor& square, double eps);
// y = a x + b y.
void blend(const Tensor& y, const Tensor& x, double a, double b);
}  // namespace cuda

}  // namespace tessera
