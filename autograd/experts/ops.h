// Mixture-of-experts ops on Vars; the kernels are in tensor/ops/experts/.
#pragma once
#include <cstdint>
#include <functional>
#include <vector>

#include "autograd/var.h"
#include "tensor/ops/experts/experts.h"

namespace tessera {

// route() with differentiable weights. The backward pass adds the unscaled gradients of the auxiliary losses: it
// assumes that the root of backward() is the loss that includes them.
struct RoutedVar {
  Routed routed;
  Var weights;  // (N, k)
};
// `count`, if set, is called with the number of choices per sequence and expert, and adds other ranks' choices.
RoutedVar route(const Var& logits, const RouteOptions& options, const std::function<void(Tensor&)>& count = {});
Var dispatch_rows(const Var& x, const Routed& routed);
Var combine_rows(const Var& rows, const Var& weights, const Routed& routed);

// Splits x (R, C) into consecutive slices of `sizes` rows, and joins such slices. Every slice receives a gradient, zero
// or empty if necessary, so that its producer's hooks always run.
std::vector<Var> split_rows(const Var& x, const std::vector<int64_t>& sizes);
Var join_rows(const std::vector<Var>& slices);
// As in tensor/ops/experts/experts.h: x (R, K), each w (N, K) -> (R, N). Weight i multiplies the next counts[i] rows;
// if there are more counts than weights, the weights repeat in rounds. Weight gradients are computed per round and
// accumulated in round order.
Var grouped_linear(const Var& x, const std::vector<Var>& w, const std::vector<int64_t>& counts);

}  // namespace tessera
