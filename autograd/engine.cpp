// record() and backward(), which visits nodes from the newest to the oldest.
#include <algorithm>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "autograd/graph.h"
#include "tensor/ops/elementwise.h"

namespace tessera {
namespace {

using Ready = std::map<uint64_t, std::shared_ptr<Node>, std::greater<>>;  // newest first

// Collects the leaves under `root`, once per gradient that this walk will produce; rejects graphs already traversed.
std::vector<std::shared_ptr<Leaf>> leaves_under(const std::shared_ptr<Node>& root) {
  std::set<const Node*> seen{root.get()};
  std::vector<const Node*> stack{root.get()};
  std::vector<std::shared_ptr<Leaf>> leaves;
  while (!stack.empty()) {
    const Node* node = stack.back();
    stack.pop_back();
    if (node->walked)
      throw Error(std::string("[backward] second backward pass through '") + node->op +
                  "': its saved tensors were freed; rerun the forward pass");
    for (const Edge& e : node->inputs) {
      if (e.leaf) leaves.push_back(e.leaf);
      if (e.node && seen.insert(e.node.get()).second) stack.push_back(e.node.get());
    }
  }
  return leaves;
}

}  // namespace

void Node::add_output_grad(int i, Tensor g) {
  const auto at = static_cast<size_t>(i);
  if (!(g.shape() == output_shapes[at]))
    throw Error(std::string("[backward] a gradient of shape ") + g.shape().str() + " reached output " +
                std::to_string(i) + " of '" + op + "'; expected shape " + output_shapes[at].str());
  add_gradient(output_grads[at], std::move(g));
  row_sums.sums = nullptr;
}

const Tensor& Grads::output(int i) const { return node_.output_grads[static_cast<size_t>(i)]; }
Tensor Grads::take_output(int i) { return std::exchange(node_.output_grads[static_cast<size_t>(i)], Tensor()); }
bool Grads::needs(int input) const { return node_.input(input).wanted(); }

void Grads::set(int input, Tensor gradient) {
  const Edge& edge = node_.input(input);
  if (edge.leaf) {
    if (!(gradient.shape() == edge.leaf->shape))
      throw Error(std::string("[backward] '") + node_.op + "' returned for input " + std::to_string(input) +
                  " a gradient of shape " + gradient.shape().str() + "; expected shape " + edge.leaf->shape.str());
    DeferrableUpdates(defer_, node_.arena)(edge.leaf,
                                           [g = std::move(gradient)](Leaf& l) mutable { l.receive(std::move(g)); });
  } else if (edge.node) {
    edge.node->add_output_grad(edge.output, std::move(gradient));
  }
}

void Grads::write_grad(int input, std::function<void(Tensor&)> write) {
  const auto at = static_cast<size_t>(input);
  const Edge& edge = node_.inputs[at];
  if (edge.leaf) {
    DeferrableUpdates(defer_, node_.arena)(edge.leaf, [w = std::move(write)](Leaf& l) { l.receive(w); });
  } else if (edge.node) {
    Tensor g = Tensor::empty(node_.input_shapes[at], accum_dtype(node_.input_dtypes[at]), node_.arena);
    write(g);
    edge.node->add_output_grad(edge.output, std::move(g));
  }
}

std::vector<Var> record(const char* op, std::vector<Tensor> outputs, const std::vector<Var>& inputs,
                        std::function<void(Grads&)> vjp) {
  bool wanted = false;
  for (const Var& in : inputs) wanted = wanted || in.requires_grad();
  std::shared_ptr<Node> node;
  if (wanted && grad_enabled()) {
    node = std::make_shared<Node>();
    node->op = op;
    node->sequence = next_sequence();
    node->vjp = std::move(vjp);
    node->arena = outputs[0].arena();
    for (const Var& in : inputs) {
      const auto& impl = GraphAccess::impl(in);
      node->inputs.push_back(impl ? Edge{impl->node, impl->output, impl->leaf} : Edge{});
      const bool present = impl && (impl->value.defined() || impl->deferred);
      node->input_shapes.push_back(present ? in.shape() : Shape{});
      node->input_dtypes.push_back(present ? in.dtype() : DType::float32);
    }
    node->output_grads.resize(outputs.size());
    for (const Tensor& t : outputs) node->output_shapes.push_back(t.shape());
  }
  std::vector<Var> vars;
  for (size_t i = 0; i < outputs.size(); ++i) {
    auto impl = std::make_shared<GraphAccess::Impl>();
    impl->value = std::move(outputs[i]);
    impl->node = node;
    impl->output = static_cast<int>(i);
    vars.push_back(GraphAccess::var(std::move(impl)));
  }
  return vars;
}

void DeferredWeightGrads::run() {
  if (empty()) return;
  const NoGrad no_grad;
  const Arena::Scope scope(*arena_, Category::workspace);
  for (auto& action : std::exchange(pending_, {})) std::exchange(action, nullptr)();  // frees captures
}

void backward(const Var& root, const BackwardOptions& options) {
  if (!root.requires_grad() || !GraphAccess::impl(root)->node)
    throw Error("[backward] the root has no graph: none of its inputs requires a gradient, or gradients were disabled");
  const std::shared_ptr<Node>& start = GraphAccess::impl(root)->node;
  const DeferrableUpdates to_leaf(options.defer, start->arena);
  for (const auto& leaf : leaves_under(start)) to_leaf(leaf, [](Leaf& l) { ++l.expected; });
  const NoGrad no_grad;
  const Arena::Scope scope(*start->arena, Category::workspace);

  Tensor seed = options.seed;
  if (!seed.defined()) {
    root.value().check_size(1);
    seed = root.value().make(root.shape());
    seed.fill(1);
  }
  start->add_output_grad(GraphAccess::impl(root)->output, std::move(seed));
  Ready ready{{start->sequence, start}};
  while (!ready.empty()) {
    const std::shared_ptr<Node> node = ready.begin()->second;
    ready.erase(ready.begin());
    bool reached = false;
    for (const Tensor& g : node->output_grads) reached = reached || g.defined();
    if (reached) {
      Grads grads = GraphAccess::grads(*node, options.defer);
      node->vjp(grads);
    }
    for (const Edge& e : node->inputs) {
      if (e.node) ready.emplace(e.node->sequence, e.node);
      if (e.leaf && !reached) to_leaf(e.leaf, [](Leaf& l) { l.gradient_done(); });
    }
    node->walked = true;
    node->vjp = nullptr;  // frees saved values in traversal order
    node->inputs.clear();
    node->row_sums.sums = nullptr;
    for (Tensor& g : node->output_grads) g = Tensor();
  }
}

}  // namespace tessera
