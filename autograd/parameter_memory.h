// Memory of parameters and their gradients, for modules and strategies that allocate it in flat buffers, or free and
// gather it. The Vars are leaves that require a gradient.
#pragma once

#include <functional>

#include "autograd/var.h"

namespace tessera {

// Accumulates gradients into this view (a slice of a flat buffer; may be float32 for a bfloat16 value).
void set_grad_buffer(const Var& parameter, Tensor buffer);
// `provide` allocates the buffer (by set_grad_buffer) on the first gradient; drop_grad() releases it.
void provide_grad(const Var& parameter, std::function<void()> provide);
void drop_grad(const Var& parameter);
void zero_missing_grad(const Var& parameter);
// Ops that save this leaf, possibly frozen, read its value at backward time and keep no reference to its memory: for
// parameters that are freed and gathered again.
void read_at_backward(const Var& parameter);

}  // namespace tessera
