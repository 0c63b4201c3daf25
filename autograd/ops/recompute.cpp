// Activation checkpointing: the node's vjp runs a separate forward and backward pass.
#include <cstddef>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "autograd/ops.h"

namespace tessera {

namespace {

struct Block {
  std::function<Var(const std::vector<Var>&)> f;
  std::vector<Tensor> saved;
  std::vector<bool> wanted;
  std::vector<Var> leaves = {};
  Var recomputed = {};

  const Var& run() {
    if (recomputed.defined()) return recomputed;
    const GradMode recording(true);
    const Arena::Scope scope(*saved[0].arena(), Category::activations);
    leaves.clear();
    for (size_t i = 0; i < saved.size(); ++i) leaves.push_back(wanted[i] ? Var::input(saved[i]) : Var(saved[i]));
    return recomputed = f(leaves);
  }
};

}  // namespace

Var checkpoint(const std::function<Var(const std::vector<Var>&)>& f, const std::vector<Var>& inputs, bool drop_result) {
  if (!grad_enabled()) return f(inputs);
  const auto block = std::make_shared<Block>();
  block->f = f;
  bool any = false;
  for (const Var& in : inputs) {
    block->saved.push_back(in.value());
    block->wanted.push_back(in.requires_grad());
    any = any || in.requires_grad();
  }
  if (!any)
    throw Error(
        "[checkpoint] expected an input that requires a gradient; otherwise the block's parameters would receive no "
        "gradient");
  Tensor out;
  {
    const NoGrad no_grad;
    out = f(inputs).take();
  }
  const Var y = record_one("checkpoint", std::move(out), inputs, [block](Grads& g) {
    block->run();
    const Var recomputed = std::exchange(block->recomputed, Var()).edge();  // the value is unused
    backward(recomputed, {.seed = g.output(), .defer = g.defer()});
    const std::vector<Var> leaves = std::exchange(block->leaves, {});
    for (size_t i = 0; i < leaves.size(); ++i)
      if (g.needs(static_cast<int>(i)) && leaves[i].grad().defined()) g.set(static_cast<int>(i), leaves[i].grad());
  });
  return drop_result ? y.with_recompute([block] { return block->run().value(); }) : y;
}

}  // namespace tessera
