// Ops of a mixture of experts on Vars; what they compute stands in tensor/ops/experts/.
#pragma once

#include "autograd/var.h"
#include "tensor/ops/experts/experts.h"

namespace tessera {

// route(), whose weights are a Var too. In the backward pass the losses of the options are added to the gradient of
// the logits as they are: the root of backward() is taken to be the loss that they belong to.
struct RoutedVar {
  Routed routed;
  Var weights;  // (N, k)
};
// With `count`, the choices of each sequence and expert pass through it: it adds those of other ranks.
RoutedVar route(const Var& logits, const RouteOptions& options, const std::function<void(Tensor&)>& count = {});
Var dispatch_rows(const Var& x, const Routed& routed);
Var combine_rows(const Var& rows, const Var& weights, const Routed& routed);

// Parts of x (R, C), `sizes` rows each, one after another; and back. Every part gets a gradient, also where there is
// none to give or it has no rows, so that who is behind it is always heard of.
std::vector<Var> split_rows(const Var& x, const std::vector<int64_t>& sizes);
Var join_rows(const std::vector<Var>& parts);
// grouped_linear() of tensor/ops/experts/experts.h: x (R, K), each w (N, K) -> (R, N). The next counts[i] rows meet
// weight i; with more counts than weights these come again, in rounds. The gradients of the weights are made fresh of
// each round, and added in this order.
Var grouped_linear(const Var& x, const std::vector<Var>& w, const std::vector<int64_t>& counts);

}  // namespace tessera
