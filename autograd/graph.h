// The graph's internals, which only the sources of this directory include.
#pragma once
#include <algorithm>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "autograd/fusion.h"
#include "autograd/var.h"

namespace tessera {

// State of a leaf's gradient buffer.
//
//   nothing ----- a gradient ----> this_pass ---- the last of this backward ----> all
//      ^  \___________________ settle() ___________________________________________^
//      |____________________________ clear, new buffer _____________________________|
enum class GradState {
  nothing,    // the next gradient overwrites
  this_pass,  // gradients of the running backward pass only
  all,        // sum of earlier backward passes; the running one accumulates in `pass` if the leaf has several uses
};

struct Leaf {
  Tensor grad;
  Tensor pass;  // sum of the running pass for a weight with several uses (a tied embedding)
  GradState holds = GradState::nothing;
  int expected = 0;  // outstanding gradients of the running backward pass
  Shape shape;
  DType dtype{};
  ArenaPtr arena;
  Category category = Category::gradients;
  bool transient = false;                       // see Var::input()
  std::vector<std::function<void()>> hooks;     // called after the last gradient of a backward pass
  std::function<void()> provide;                // called on the first gradient without a buffer
  std::weak_ptr<fusion::PrecomputedGrad> lent;  // precomputed gradient stored in `grad`, whose state is then `nothing`

  // The first gradient is written in place, later ones are computed separately and added (never by a matmul that
  // accumulates into its output), so that one rank with two micro-batches is bitwise identical to two ranks. For the
  // same reason a weight's gradients within one backward pass are summed before they are added to earlier ones.
  void receive(const std::function<void(Tensor&)>& write);
  void receive(Tensor gradient);
  void receive(const std::shared_ptr<fusion::PrecomputedGrad>& early);
  Tensor take();               // moves out a transient leaf's gradient
  fusion::GradTarget place();  // destination of the next gradient; gradient_done() follows the write
  void reclaim_buffer();       // moves a precomputed gradient out of the buffer before another write
  void settle();               // zero if no gradient arrived
  void gradient_done();        // counts a gradient that arrived or is absent

 private:
  void make_buffer();
  Tensor& sum() { return holds == GradState::this_pass || (expected == 1 && !pass.defined()) ? grad : pass; }
  void write_fresh(const Tensor& out, const std::function<void(Tensor&)>& write) const;
};

struct Edge {
  std::shared_ptr<Node> node;  // producer and output index; null for a leaf
  int output = 0;
  std::shared_ptr<Leaf> leaf;  // null for a node's output
  bool wanted() const { return node || leaf; }
};

struct Node {
  const char* op = "";
  uint64_t sequence = 0;  // creation order on this thread
  bool walked = false;
  std::vector<Edge> inputs;
  std::vector<Shape> input_shapes;
  std::vector<DType> input_dtypes;
  std::vector<Tensor> output_grads;
  std::vector<Shape> output_shapes;
  fusion::RowSumState row_sums;
  std::function<void(Grads&)> vjp;
  ArenaPtr arena;

  const Edge& input(int i) const { return inputs[static_cast<size_t>(i)]; }
  void add_output_grad(int i, Tensor g);
};

struct Var::Impl {
  Tensor value;
  std::shared_ptr<fusion::DeferredAdd> deferred;  // replaces `value` until computed
  std::shared_ptr<Node> node;
  int output = 0;
  std::shared_ptr<Leaf> leaf;
  std::function<Tensor()> recompute;
  bool read_at_backward = false;
};

// The only access to the private members of Var and Grads.
struct GraphAccess {
  using Impl = Var::Impl;
  static Var var(std::shared_ptr<Impl> impl) { return Var(std::move(impl)); }
  static const std::shared_ptr<Impl>& impl(const Var& v) { return v.impl_; }
  static Grads grads(Node& node, DeferredWeightGrads* defer) { return {node, defer}; }
  static Node& node(const Grads& g) { return g.node_; }
  // Throws Error unless v is a leaf that requires a gradient.
  static Leaf& leaf(const Var& v, const char* what);
};

// Updates of leaves during a walk: immediate, or, for parameters with deferred weight gradients, collected until run().
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

uint64_t next_sequence();
// total += g; an undefined total counts as zero. May overwrite g if it is unshared.
void add_gradient(Tensor& total, Tensor g);

}  // namespace tessera
