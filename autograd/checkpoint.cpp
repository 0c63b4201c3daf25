// checkpoint(): a node whose vjp is a forward and a backward pass of its own.
#include "autograd/checkpoint.h"

#include <memory>
#include <utility>

namespace tessera {
namespace {

struct Block {
  std::function<Var(const std::vector<Var>&)> f;
  std::vector<Tensor> kept;
  std::vector<bool> wanted;  // of the inputs: a gradient
  std::vector<Var> leaves = {};
  Var again = {};

  const Var& run() {
    if (again.defined()) return again;
    const GradMode record_again(true);
    const Arena::Scope scope(*kept[0].arena(), Category::activations);
    leaves.clear();
    for (size_t i = 0; i < kept.size(); ++i) leaves.push_back(wanted[i] ? Var::input(kept[i]) : Var(kept[i]));
    return again = f(leaves);
  }
};

}  // namespace

Var checkpoint(const std::function<Var(const std::vector<Var>&)>& f, const std::vector<Var>& inputs, bool drop_result) {
  if (!grad_enabled()) return f(inputs);
  const auto block = std::make_shared<Block>();
  block->f = f;
  bool any = false;
  for (const Var& in : inputs) {
    block->kept.push_back(in.value());
    block->wanted.push_back(in.requires_grad());
    any = any || in.requires_grad();
  }
  if (!any) throw Error("[checkpoint] no input requires a gradient, so the block's parameters would get none");
  Tensor out;
  {
    const NoGrad no_grad;
    out = f(inputs).take();
  }
  const Var y = record_one("checkpoint", std::move(out), inputs, [block](Grads& g) {
    block->run();
    const Var again = std::exchange(block->again, Var()).edge();  // its value is not needed
    backward(again, {.seed = g.output(), .defer = g.defer()});
    const std::vector<Var> leaves = std::exchange(block->leaves, {});
    for (size_t i = 0; i < leaves.size(); ++i)
      if (g.needs(static_cast<int>(i)) && leaves[i].grad().defined()) g.give(static_cast<int>(i), leaves[i].grad());
  });
  return drop_result ? y.with_recipe([block] { return block->run().value(); }) : y;
}

}  // namespace tessera
