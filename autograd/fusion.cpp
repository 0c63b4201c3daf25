// Fusion state of values, nodes and leaves.
#include "autograd/fusion.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "autograd/graph.h"

namespace tessera::fusion {

namespace {

const std::shared_ptr<GraphAccess::Impl>& defined_impl(const Var& v) {
  if (!v.defined()) v.value();  // throws
  return GraphAccess::impl(v);
}

}  // namespace

void defer_add(const Var& value, Tensor addend) {
  GraphAccess::Impl& impl = *GraphAccess::impl(value);
  impl.deferred = std::make_shared<DeferredAdd>(DeferredAdd{std::exchange(impl.value, {}), std::move(addend)});
}

bool is_deferred(const Var& v) {
  const auto& impl = GraphAccess::impl(v);
  return impl && impl->deferred && !impl->deferred->sum.defined();
}

Addends take_addends(const Var& v) {
  if (!is_deferred(v)) return {v.value(), {}};
  DeferredAdd& deferred = *GraphAccess::impl(v)->deferred;
  return {std::exchange(deferred.value, {}), std::exchange(deferred.addend, {})};
}

void set_sum(const Var& v, Tensor sum) { GraphAccess::impl(v)->deferred->sum = std::move(sum); }

void request_row_sums(const Var& v) {
  if (const auto& node = defined_impl(v)->node) node->row_sums.requested = true;
}

bool row_sums_requested(const Var& v) {
  const auto& impl = GraphAccess::impl(v);
  return impl && impl->node && impl->node->row_sums.requested;
}

bool row_sums_requested(const Grads& g, int input) {
  const Edge& edge = GraphAccess::node(g).input(input);
  return edge.node && edge.node->row_sums.requested;
}

void require_row_sums(const Var& v) {
  if (const auto& node = defined_impl(v)->node) node->row_sums.required = true;
}

bool row_sums_required(const Grads& g) { return GraphAccess::node(g).row_sums.required; }

const RowSums& row_sums(const Grads& g) { return GraphAccess::node(g).row_sums.sums; }

void set(Grads& g, int input, Tensor gradient, RowSums sums) {
  const Edge& edge = GraphAccess::node(g).input(input);
  const bool alone = edge.node && edge.output == 0 && !edge.node->output_grads[0].defined();
  g.set(input, std::move(gradient));
  if (alone) edge.node->row_sums.sums = std::move(sums);
}

Var pass_through(const char* op, Var x, std::function<void(const Grads&)> before) {
  const Var edge = x.edge(), deferred = is_deferred(x) ? x : Var();
  Tensor value = deferred.defined() ? GraphAccess::impl(x)->deferred->value : std::move(x).take();
  Var same = record_one(op, std::move(value), {edge}, [edge, before = std::move(before)](Grads& g) {
    before(g);
    if (row_sums_required(g)) require_row_sums(edge);
    RowSums sums = row_sums(g);
    set(g, 0, g.take_output(), std::move(sums));
  });
  if (deferred.defined()) {
    GraphAccess::impl(same)->value = {};
    GraphAccess::impl(same)->deferred = GraphAccess::impl(deferred)->deferred;
  }
  if (row_sums_requested(edge)) request_row_sums(same);
  return same;
}

Tensor take_accumulated(Grads& g, int input) {
  const Edge& edge = GraphAccess::node(g).input(input);
  if (edge.leaf) return edge.leaf->transient ? edge.leaf->take() : Tensor();
  return edge.node ? std::exchange(edge.node->output_grads[static_cast<size_t>(edge.output)], {}) : Tensor();
}

bool writes_at_once(const Grads& g, int first, int count) {
  const std::span edges =
      std::span(GraphAccess::node(g).inputs).subspan(static_cast<size_t>(first), static_cast<size_t>(count));
  return !g.defer() && std::ranges::any_of(edges, &Edge::wanted) &&
         std::ranges::all_of(edges, [](const Edge& e) { return !e.wanted() || (e.leaf && !e.leaf->transient); });
}

// Marks gradients as done from last to first, the order in which a chain of layers produces them.
void write_grads(Grads& g, int first, int count, std::function<void(std::span<const GradTarget>)> write) {
  const Node& node = GraphAccess::node(g);
  std::vector<std::shared_ptr<Leaf>> parameters(static_cast<size_t>(count));
  std::vector<GradTarget> others(parameters.size());
  std::shared_ptr<Leaf> any;
  bool now = false;
  for (size_t i = 0; i < parameters.size(); ++i) {
    const size_t at = static_cast<size_t>(first) + i;
    const Edge& edge = node.inputs[at];
    if (edge.leaf && !edge.leaf->transient) {
      any = parameters[i] = edge.leaf;
    } else if (edge.wanted()) {
      const DType dtype = edge.leaf ? edge.leaf->dtype : accum_dtype(node.input_dtypes[at]);
      others[i].to = Tensor::empty(node.input_shapes[at], dtype, node.arena);
      now = true;
    }
  }
  if (now) write(others);
  for (size_t i = 0; i < others.size(); ++i)
    if (others[i].to.defined()) g.set(first + static_cast<int>(i), std::move(others[i].to));
  if (!any) return;
  DeferrableUpdates(g.defer(), node.arena)(any, [leaves = std::move(parameters), write = std::move(write)](Leaf&) {
    std::vector<GradTarget> targets;
    for (const std::shared_ptr<Leaf>& leaf : leaves) targets.push_back(leaf ? leaf->place() : GradTarget{});
    write(targets);
    for (size_t i = leaves.size(); i-- > 0;)
      if (leaves[i]) leaves[i]->gradient_done();
  });
}

std::shared_ptr<PrecomputedGrad> precomputed_grad(const Var& parameter, DType wide) {
  auto early = std::make_shared<PrecomputedGrad>();
  Leaf* const leaf = GraphAccess::impl(parameter)->leaf.get();
  const bool free = leaf && !leaf->transient && leaf->holds == GradState::nothing && leaf->grad.defined() &&
                    leaf->grad.dtype() == wide && leaf->grad.is_contiguous() && leaf->lent.expired();
  early->at = free ? leaf->grad : parameter.value().make(parameter.shape(), wide, Category::workspace);
  if (free) leaf->lent = early;
  return early;
}

void set_precomputed(Grads& g, int input, std::shared_ptr<PrecomputedGrad> gradient) {
  const Node& node = GraphAccess::node(g);
  const auto at = static_cast<size_t>(input);
  const Edge& edge = node.inputs[at];
  if (edge.leaf) {
    DeferrableUpdates(g.defer(), node.arena)(edge.leaf, [early = std::move(gradient)](Leaf& l) { l.receive(early); });
  } else if (edge.node) {
    edge.node->add_output_grad(edge.output, gradient->at.to(accum_dtype(node.input_dtypes[at])));
  }
}

}  // namespace tessera::fusion
