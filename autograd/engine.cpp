// backward(): newest node to oldest.
#include <set>

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

// Updates of leaves during a walk: immediate, or for parameters collected until run() if weight gradients are deferred.
class DeferrableUpdates {
 public:
  DeferrableUpdates(DeferredWeightGrads* defer, const ArenaPtr& arena) : defer_(defer) {
    if (defer_) defer_->arena_ = arena;
  }
  template <class F>
  void operator()(const std::shared_ptr<Leaf>& leaf, F f) const {
    if (defer_ && !leaf->transient)
      defer_->pending_.emplace_back([leaf, f = std::move(f)]() mutable { f(*leaf); });
    else
      f(*leaf);
  }

 private:
  DeferredWeightGrads* defer_;
};

void Node::add_output_grad(int i, Tensor g) {
  const auto at = static_cast<size_t>(i);
  if (!(g.shape() == output_shapes[at]))
    throw Error(std::string("[backward] a gradient of shape ") + g.shape().str() + " reached output " +
                std::to_string(i) + " of '" + op + "'; expected shape " + output_shapes[at].str());
  add_gradient(output_grads[at], std::move(g));
  row_sums = nullptr;
}

const Tensor& Grads::output(int i) const { return node_.output_grads[static_cast<size_t>(i)]; }
Tensor Grads::take_output(int i) { return std::exchange(node_.output_grads[static_cast<size_t>(i)], Tensor()); }
bool Grads::needs(int input) const { return node_.inputs[static_cast<size_t>(input)].wanted(); }

const RowSums& Grads::row_sums() const { return node_.row_sums; }
bool Grads::row_sums_required() const { return node_.row_sums_required; }
bool Grads::row_sums_requested(int input) const {
  const Edge& edge = node_.inputs[static_cast<size_t>(input)];
  return edge.node && edge.node->row_sums_requested;
}

bool Grads::writes_at_once(int first, int count) const {
  const std::span edges = std::span(node_.inputs).subspan(static_cast<size_t>(first), static_cast<size_t>(count));
  return !defer_ && std::ranges::any_of(edges, &Edge::wanted) &&
         std::ranges::all_of(edges, [](const Edge& e) { return !e.wanted() || (e.leaf && !e.leaf->transient); });
}

Tensor Grads::take_accumulated(int input) {
  const Edge& edge = node_.inputs[static_cast<size_t>(input)];
  if (edge.leaf) return edge.leaf->transient ? edge.leaf->take() : Tensor();
  return edge.node ? std::exchange(edge.node->output_grads[static_cast<size_t>(edge.output)], {}) : Tensor();
}

void Grads::give(int input, Tensor gradient, RowSums row_sums) {
  const auto at = static_cast<size_t>(input);
  const Edge& edge = node_.inputs[at];
  if (edge.leaf) {
    if (!(gradient.shape() == edge.leaf->shape))
      throw Error(std::string("[backward] '") + node_.op + "' returned for input " + std::to_string(input) +
                  " a gradient of shape " + gradient.shape().str() + "; expected shape " + edge.leaf->shape.str());
    DeferrableUpdates(defer_, node_.arena)(edge.leaf,
                                           [g = std::move(gradient)](Leaf& l) mutable { l.receive(std::move(g)); });
  } else if (edge.node) {
    const bool alone = !edge.node->output_grads[static_cast<size_t>(edge.output)].defined();
    edge.node->add_output_grad(edge.output, std::move(gradient));
    if (alone && edge.output == 0) edge.node->row_sums = std::move(row_sums);
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

// Count parameters from last to first, the order in which a chain of layers produces gradients.
void Grads::write_grad(int first, int count, std::function<void(std::span<const GradTarget>)> write) {
  std::vector<std::shared_ptr<Leaf>> parameters(static_cast<size_t>(count));
  std::vector<GradTarget> others(parameters.size());
  std::shared_ptr<Leaf> any;
  bool now = false;
  for (size_t i = 0; i < parameters.size(); ++i) {
    const size_t at = static_cast<size_t>(first) + i;
    const Edge& edge = node_.inputs[at];
    if (edge.leaf && !edge.leaf->transient) {
      any = parameters[i] = edge.leaf;
    } else if (edge.wanted()) {
      const DType dtype = edge.leaf ? edge.leaf->dtype : accum_dtype(node_.input_dtypes[at]);
      others[i].to = Tensor::empty(node_.input_shapes[at], dtype, node_.arena);
      now = true;
    }
  }
  if (now) write(others);
  for (size_t i = 0; i < others.size(); ++i)
    if (others[i].to.defined()) give(first + static_cast<int>(i), std::move(others[i].to));
  if (!any) return;
  DeferrableUpdates(defer_, node_.arena)(any, [leaves = std::move(parameters), write = std::move(write)](Leaf&) {
    std::vector<GradTarget> targets;
    for (const std::shared_ptr<Leaf>& leaf : leaves) targets.push_back(leaf ? leaf->place() : GradTarget{});
    write(targets);
    for (size_t i = leaves.size(); i-- > 0;)
      if (leaves[i]) leaves[i]->gradient_done();
  });
}

void Grads::set_precomputed(int input, std::shared_ptr<PrecomputedGrad> gradient) {
  const auto at = static_cast<size_t>(input);
  const Edge& edge = node_.inputs[at];
  if (edge.leaf) {
    DeferrableUpdates(defer_, node_.arena)(edge.leaf, [early = std::move(gradient)](Leaf& l) { l.receive(early); });
  } else if (edge.node) {
    edge.node->add_output_grad(edge.output, gradient->at.to(accum_dtype(node_.input_dtypes[at])));
  }
}

void DeferredWeightGrads::run() {
  if (empty()) return;
  const NoGrad no_grad;
  const Arena::Scope scope(*arena_, Category::workspace);
  for (auto& action : std::exchange(pending_, {})) std::exchange(action, nullptr)();  // frees captures
}

void backward(const Var& root, const BackwardOptions& options) {
  if (!root.requires_grad() || !root.impl_->node)
    throw Error("[backward] the root has no graph: none of its inputs requires a gradient, or gradients were disabled");
  const std::shared_ptr<Node>& start = root.impl_->node;
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
      if (e.leaf && !reached) to_leaf(e.leaf, [](Leaf& l) { l.gradient_done(); });
    }
    node->walked = true;
    node->vjp = nullptr;  // frees saved values in traversal order
    node->inputs.clear();
    node->row_sums = nullptr;
    for (Tensor& g : node->output_grads) g = Tensor();
  }
}

}  // namespace tessera
