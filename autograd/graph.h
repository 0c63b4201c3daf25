// The insides of the graph: nodes, leaves and edges. Only var.cpp and engine.cpp see them.
#pragma once
#include "autograd/var.h"

namespace tessera {

// The contents of a leaf's buffer.
//
//   nothing ----- a gradient ----> this_pass ---- the last of this backward ----> all
//      ^  \___________________ settle() ___________________________________________^
//      |____________________________ clear, another buffer _________________________|
enum class GradState {
  nothing,    // the next gradient overwrites
  this_pass,  // gradients of the running backward alone
  all,        // the sum that earlier backwards brought; that of the running one gathers in `pass` if there are several
};

// Where a parameter's gradient gathers.
struct Leaf {
  Tensor grad;
  Tensor pass;  // the running backward's sum, of a weight that is used more than once (a tied embedding)
  GradState holds = GradState::nothing;
  int expected = 0;  // gradients still to come in the running backward
  Shape shape;
  DType dtype{};
  ArenaPtr arena;
  Category category = Category::gradients;
  bool transient = false;                    // see Var::input()
  std::vector<std::function<void()>> hooks;  // called when the last gradient of a backward has been added
  std::function<void()> provide;             // called when a gradient comes and there is no buffer
  std::weak_ptr<PrecomputedGrad> lent;       // the early gradient in `grad`; it holds nothing then

  // A gradient arrives: the first is written in place, later ones are made fresh and then added, so that one rank with
  // two micro-batches does what two ranks do (never a matmul that accumulates into its output). For the same reason the
  // uses of a weight within one backward are summed first, and their sum is added to what earlier ones brought.
  void receive(const std::function<void(Tensor&)>& write);
  void receive(Tensor gradient);
  void receive(const std::shared_ptr<PrecomputedGrad>& early);
  Tensor take();          // gives the gradient that has come to a transient leaf; one that contains it follows
  GradTarget place();     // for a gradient of a parameter that comes now; gradient_done() says that it is there
  void reclaim_buffer();  // takes the lent buffer back, before anything else is written to it
  void settle();          // zero, since no gradient came
  void gradient_done();   // counts a gradient that has come, or that will not come

 private:
  void make_buffer();
  Tensor& sum() { return holds == GradState::this_pass || (expected == 1 && !pass.defined()) ? grad : pass; }
  void write_fresh(const Tensor& out, const std::function<void(Tensor&)>& write) const;
};

struct Edge {
  std::shared_ptr<Node> node;  // the node that made the input, and which of its outputs it was,
  int output = 0;
  std::shared_ptr<Leaf> leaf;  // or the leaf
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
  bool row_sums_requested = false, row_sums_required = false;  // row sums of output 0's gradient
  RowSums row_sums;                                            // or none
  std::function<void(Grads&)> vjp;
  ArenaPtr arena;

  void add_output_grad(int i, Tensor g);
};

// A sum that is not made yet, of the Vars that share it.
struct DeferredAdd {
  Tensor value, addend;  // handed over when it is made
  Tensor sum = {};
};

struct Var::Impl {
  Tensor value;
  std::shared_ptr<DeferredAdd> late;  // stands for the value
  std::shared_ptr<Node> node;
  int output = 0;
  std::shared_ptr<Leaf> leaf;
  std::function<Tensor()> recipe;
  bool read_late = false;
};

uint64_t next_sequence();
// total += g; an undefined total is zero. May write over g where nobody else holds it.
void add_gradient(Tensor& total, Tensor g);

}  // namespace tessera
