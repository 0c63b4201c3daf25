// What Muon makes of elements on a GPU; products make the rest of its update.
#pragma once
#include "optim/updates.h"

namespace tessera::cuda {

// W and `now` as of adam(), optim/cuda/updates.h. The new momentum of the unit, and to `update`, as long, what is to be
// made orthogonal; where nothing is to be updated both stay as they are.
template <class W>
void add_momentum(const FlatUnit& unit, const Tensor& momentum, const Tensor& update, const MuonStep<W>& step,
                  const UpdateNumbers* now);
// The new values of the unit, and their master.
template <class W>
void apply_update(const FlatUnit& unit, const Tensor& master, const Tensor& update, const MuonStep<W>& step,
                  const UpdateNumbers* now);

// Of float32 or float64 tensors: x / (sqrt(square) + eps), with `square` float64 (1) on the GPU; and y = a x + b y.
void normalise(const Tensor& x, const Tensor& square, double eps);
void blend(const Tensor& y, const Tensor& x, double a, double b);

}  // namespace tessera::cuda
