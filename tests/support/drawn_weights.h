// Weights so large that what a model gives depends on every token before and on its place.
#pragma once

#include "nn/module.h"
#include "tensor/random.h"

namespace tessera::test {

// Sets the weights of a model on one rank, with memory: each is the constant that its parameter starts from plus 0.4
// times a normal number.
inline void draw_weights(Module& model, uint64_t seed = 3) {
  for (const Parameter* p : model.parameters()) {
    const Philox random = Philox::named(seed, p->name);
    Tensor values = p->var.value();
    std::vector<double> drawn(static_cast<size_t>(values.numel()));
    for (size_t i = 0; i < drawn.size(); ++i) drawn[i] = p->init.constant + 0.4 * random.normal(i);
    values.copy_from(Tensor::of<double>(drawn, values.shape(), values.arena()).to(values.dtype()));
  }
}

}  // namespace tessera::test
