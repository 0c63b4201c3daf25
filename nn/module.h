// Module: a tree of named parameters.
//
// A model is built on the meta device (shapes, no memory), may then be cut by a strategy, and gets its memory and its
// first values from materialize(): each element is a function of (seed, full name, index), so every layout starts from
// the same model. Parameters of one unit (an embedding, a block, a head) share one flat buffer; see nn/flat.h.
#pragma once
#include <functional>
#include <list>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "autograd/var.h"
#include "nn/flat.h"
#include "nn/step.h"

namespace tessera {

// How a parameter starts: normal with the given standard deviation, or a constant.
struct Init {
  double deviation = 0;
  double constant = 0;
  static Init normal(double deviation) { return {deviation, 0}; }
  static Init zeros() { return {0, 0}; }
  static Init ones() { return {0, 1}; }
};

struct Parameter {
  std::string name;  // local: "weight"
  Var var;
  Init init;
};

class Module {
 public:
  Module() = default;
  virtual ~Module() = default;
  Module(const Module&) = delete;  // pinned: children hold references into it
  Module& operator=(const Module&) = delete;

  // A module with one input and one output; ops of other arity have functions of their own.
  virtual Var forward(const Var& x);
  // forward(), seen through the wraps, the last one outermost.
  Var operator()(const Var& x);
  using Inner = std::function<Var(const Var&)>;
  void wrap(std::function<Var(const Inner&, const Var&)> f) { wraps_.push_back(std::move(f)); }

  struct Named {
    std::string name;  // full: "blocks.0.mlp.up.weight"
    Parameter* parameter;
  };
  std::vector<Named> parameters();  // depth first, in order of declaration; tied uses are not listed
  int64_t parameter_count();
  std::string full_name() const;

  // Marks this module's parameters, and those of children that are no unit themselves, as one flat buffer.
  void make_unit() { is_unit_ = true; }
  // Gives every parameter memory for its value (of `dtype`) and its gradient (of `grad_dtype`), and its first value.
  // Throws when called twice. Returns the units in order.
  std::vector<FlatUnit>& materialize(uint64_t seed, const ArenaPtr& arena, DType dtype, DType grad_dtype);
  std::vector<FlatUnit>& units() { return units_; }

  // The next gradients overwrite.
  void clear_gradients();
  // After the last backward of a step: gradients that no one brought become zero, and each tied weight gets the sum of
  // its uses, its own first.
  void settle_gradients();

  // Where the running step stands (dropout reads it); set on the root, seen by all.
  void set_step(const StepInfo& step) { step_ = step; }
  const StepInfo& step() const { return parent_ ? parent_->step() : step_; }

 protected:
  Var& param(std::string name, const Shape& shape, Init init);
  // Another use of a parameter: the same value, a gradient accumulator of its own.
  Var& tie(Var& source);
  template <class M, class... Args>
  M& child(const std::string& name, Args&&... args) {
    auto owned = std::make_unique<M>(std::forward<Args>(args)...);
    M& module = *owned;
    adopt(name, std::move(owned));
    return module;
  }

 private:
  struct Tie {
    Var* source;
    Var use;
  };
  void adopt(std::string name, std::unique_ptr<Module> module);
  void collect(const std::string& prefix, std::vector<Named>& out);
  void collect_units(const std::string& prefix, std::vector<std::pair<std::string, std::vector<Named>>>& out);
  void for_each_tie(const std::function<void(Tie&)>& f);

  std::string name_;
  Module* parent_ = nullptr;
  bool is_unit_ = false;
  std::list<Parameter> parameters_;
  std::list<std::unique_ptr<Module>> children_;
  std::list<Tie> ties_;
  std::vector<std::function<Var(const Inner&, const Var&)>> wraps_;
  std::vector<FlatUnit> units_;
  StepInfo step_;
};

}  // namespace tessera
