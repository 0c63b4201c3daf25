// checkpoint(): a node whose vjp is a forward and a backward pass of its own.
#include "autograd/checkpoint.h"

namespace tessera {

Var checkpoint(const std::function<Var(const std::vector<Var>&)>& f, const std::vector<Var>& inputs) {
  if (!grad_enabled()) return f(inputs);
  bool wanted = false;
  for (const Var& in : inputs) wanted = wanted || in.requires_grad();
  if (!wanted) throw Error("[checkpoint] no input requires a gradient, so the block's parameters would get none");
  Tensor out;
  {
    const NoGrad no_grad;
    out = f(inputs).take();
  }
  std::vector<Tensor> kept;
  for (const Var& in : inputs) kept.push_back(in.value());
  return record_one("checkpoint", std::move(out), inputs, [f, kept](Grads& g) {
    const GradMode record_again(true);
    std::vector<Var> leaves;
    for (size_t i = 0; i < kept.size(); ++i) {
      leaves.push_back(g.needs(static_cast<int>(i)) ? Var::input(kept[i]) : Var(kept[i]));
    }
    const Var again = [&] {
      const Arena::Scope scope(*kept[0].arena(), Category::activations);
      return f(leaves);
    }();
    backward(again, {.seed = g.output(), .defer = g.defer()});
    for (size_t i = 0; i < leaves.size(); ++i)
      if (g.needs(static_cast<int>(i)) && leaves[i].grad().defined()) g.give(static_cast<int>(i), leaves[i].grad());
  });
}

}  // namespace tessera
