// backward(): from the newest node to the oldest.
#include <map>
#include <set>
#include <utility>
#include <vector>

#include "autograd/graph.h"
#include "tensor/ops/elementwise.h"

namespace tessera {
namespace {

using Ready = std::map<uint64_t, std::shared_ptr<Node>, std::greater<>>;  // newest first

// Counts, for every leaf under `root`, the gradients that this walk will bring it; finds graphs that are used up.
void expect_gradients(const std::shared_ptr<Node>& root) {
  std::set<const Node*> seen{root.get()};
  std::vector<const Node*> stack{root.get()};
  std::vector<Leaf*> leaves;
  while (!stack.empty()) {
    const Node* node = stack.back();
    stack.pop_back();
    if (node->walked)
      throw Error(std::string("[backward] called twice through the same '") + node->op +
                  "': its saved values are gone; run the forward pass again");
    for (const Edge& e : node->inputs) {
      if (e.leaf) leaves.push_back(e.leaf.get());
      if (e.node && seen.insert(e.node.get()).second) stack.push_back(e.node.get());
    }
  }
  for (Leaf* leaf : leaves) ++leaf->expected;
}

}  // namespace

void Node::add_output_grad(int i, Tensor g) {
  const auto at = static_cast<size_t>(i);
  if (!(g.shape() == output_shapes[at]))
    throw Error(std::string("[backward] a gradient of shape ") + g.shape().str() + " reached output " +
                std::to_string(i) + " of '" + op + "', whose shape is " + output_shapes[at].str());
  Tensor& total = output_grads[at];
  if (!total.defined())
    total = std::move(g);
  else if (total.unique())
    add_(total, g);
  else if (g.unique()) {  // a + b and b + a have the same bits
    add_(g, total);
    total = std::move(g);
  } else
    total = binary<Add>(total, g);
}

const Tensor& Grads::output(int i) const { return node_.output_grads[static_cast<size_t>(i)]; }
Tensor Grads::take_output(int i) { return std::exchange(node_.output_grads[static_cast<size_t>(i)], Tensor()); }
bool Grads::needs(int input) const { return node_.inputs[static_cast<size_t>(input)].wanted(); }

void Grads::give(int input, Tensor gradient) {
  const auto at = static_cast<size_t>(input);
  const Edge& edge = node_.inputs[at];
  if (edge.leaf) {
    if (!(gradient.shape() == edge.leaf->shape))
      throw Error(std::string("[backward] '") + node_.op + "' gave input " + std::to_string(input) +
                  " a gradient of shape " + gradient.shape().str() + "; its shape is " + edge.leaf->shape.str());
    edge.leaf->receive(std::move(gradient));
  } else if (edge.node) {
    edge.node->add_output_grad(edge.output, std::move(gradient));
  }
}

void Grads::give_into(int input, std::function<void(Tensor&)> write) {
  const auto at = static_cast<size_t>(input);
  const Edge& edge = node_.inputs[at];
  if (edge.leaf) {
    if (defer_)
      defer_->push([leaf = edge.leaf, w = std::move(write)] { leaf->receive(w); });
    else
      edge.leaf->receive(write);
  } else if (edge.node) {
    Tensor g = Tensor::empty(node_.input_shapes[at], node_.input_dtypes[at], node_.arena);
    write(g);
    edge.node->add_output_grad(edge.output, std::move(g));
  }
}

void DeferredWeightGrads::run() {
  const NoGrad no_grad;
  const std::vector<std::function<void()>> now = std::move(pending_);
  pending_.clear();
  for (const auto& f : now) f();
}

void backward(const Var& root, const BackwardOptions& options) {
  if (!root.requires_grad() || !root.impl_->node)
    throw Error("[backward] the root has no graph: no input of it requires a gradient, or gradients were off");
  const std::shared_ptr<Node>& start = root.impl_->node;
  expect_gradients(start);
  const NoGrad no_grad;
  const Arena::Scope scope(*start->arena, Category::workspace);

  Tensor seed = options.seed;
  if (!seed.defined()) {
    root.value().check_size(1);
    seed = root.value().make(root.shape());
    seed.fill(1);
  }
  start->add_output_grad(root.impl_->output, std::move(seed));
  Ready ready{{start->sequence, start}};
  while (!ready.empty()) {
    const std::shared_ptr<Node> node = ready.begin()->second;
    ready.erase(ready.begin());
    bool reached = false;
    for (const Tensor& g : node->output_grads) reached = reached || g.defined();
    if (reached) {
      Grads grads(*node, options.defer);
      node->vjp(grads);
    }
    for (const Edge& e : node->inputs) {
      if (e.node) ready.emplace(e.node->sequence, e.node);
      if (e.leaf && !reached) e.leaf->one_less();
    }
    node->walked = true;
    node->vjp = nullptr;  // frees what it saved, in the order of the walk
    node->inputs.clear();
    for (Tensor& g : node->output_grads) g = Tensor();
  }
}

}  // namespace tessera
