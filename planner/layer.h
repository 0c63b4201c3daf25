// What a layer, and what stands before and after the layers, takes one rank for one micro-batch.
#pragma once
#include "planner/predict.h"
#include "planner/rates.h"

namespace tessera::planner {

// Seconds of a forward pass, and of the two halves of a backward pass.
struct Passes {
  double forward = 0, input = 0, weight = 0;
  double backward() const { return input + weight; }
  double sum() const { return forward + input + weight; }
  Passes& operator+=(const Passes& o) {
    forward += o.forward, input += o.input, weight += o.weight;
    return *this;
  }
};
inline Passes operator*(double n, Passes p) { return {n * p.forward, n * p.input, n * p.weight}; }

struct LayerTime {
  Passes compute = {};     // products, attention, elementwise
  double recompute = 0;    // of the input's half of the backward pass
  Passes tp, cp, ep = {};  // exposed
  // FLOPs of the forward pass, and of what is made again of it.
  double flops = 0, again = 0;
  double forward() const { return compute.forward + tp.forward + cp.forward + ep.forward; }
  double input() const { return compute.input + recompute + tp.input + cp.input + ep.input; }
  double weight() const { return compute.weight + tp.weight; }
};

// The tokens that a rank has of a micro-batch.
double local_tokens(const Case& c);
Axis tp_axis(const Case& c);
Axis cp_axis(const Case& c);
Axis data_axis(const Case& c);  // dp and cp
Axis pp_axis(const Case& c);

LayerTime layer_time(const Case& c);
LayerTime embedding_time(const Case& c);
LayerTime head_time(const Case& c);  // with the last norm and the loss

}  // namespace tessera::planner
