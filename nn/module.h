// Module: a tree of named parameters.
//
// A model is built on the meta device (shapes, no memory), may then be cut by a strategy, and gets its memory and its
// first values from materialize(): each element is a function of (seed, full name, index), so every layout starts from
// the same model. Parameters of one unit (an embedding, a block, a head) share one flat buffer; see nn/parameter.h.
#pragma once
#include <list>

#include "nn/parameter.h"
#include "nn/step.h"

namespace tessera {

struct Packing;  // tensor/ops/quantize/quantize.h

class Module : NotCopied {  // children hold references into it
 public:
  virtual ~Module() = default;

  // A module with one input and one output; ops of other arity have functions of their own.
  virtual Var forward(const Var& x);
  // forward(), seen through the wraps, the last one outermost.
  Var operator()(const Var& x);
  using Inner = std::function<Var(const Var&)>;
  // The same for another function of this module's parameters than forward(); x may be undefined.
  Var call(Inner inner, const Var& x);
  void wrap(std::function<Var(const Inner&, const Var&)> f) { wraps_.push_back(std::move(f)); }
  bool is_wrapped() const { return !wraps_.empty(); }
  // From now on the memory of this unit's parameters or of their gradients comes and goes, unit by unit: no op uses
  // them together with those of other units.
  void disable_fusion() { is_apart_ = true; }
  bool is_apart() const { return is_apart_ || is_wrapped(); }
  // From now on the forward pass sees f(parameter) in place of each parameter of this module; f is called at each use.
  // Its result may hold no memory of its own beyond the use (Var::with_recompute).
  void see(std::function<Var(const Var&)> f) { transforms_ = std::move(f); }

  // All that is known of one of this module's own parameters.
  Parameter& parameter(const Var& var);
  // Keeps only a part of one of this module's parameters, before it has memory. Throws when it has, and when a run lies
  // outside the dim.
  void shard(const Var& var, ShardSpec spec);
  // Freezes the parameters of this module and of all modules below it: they are not trained. To be called before they
  // have memory; throws afterwards.
  void freeze();
  // One of this module's own matrices is frozen, and held in four bits. Before it is cut, and before it has memory;
  // throws otherwise, and for sizes that do not divide.
  void quantize(const Var& var, const Packing& packing);
  // A module whose parameters are not here has none in parameters() and layout(): another rank has them.
  void set_local(bool here) { here_ = here; }

  std::vector<Parameter*> parameters();  // depth first, in order of declaration
  int64_t parameter_count();
  std::string full_name() const;
  // Whether `module` is this one or below it.
  bool contains(const Module& module) const;
  // This module and all below it that are of a kind, depth first.
  template <class M>
  std::vector<M*> all() {
    std::vector<M*> out;
    if (M* self = dynamic_cast<M*>(this)) out.push_back(self);
    for (const auto& c : children_)
      for (M* below : c->template all<M>()) out.push_back(below);
    return out;
  }

  // Marks this module's parameters, and those of children that are no unit themselves, as one flat buffer.
  void make_unit() { is_unit_ = true; }
  // A unit before it has memory: where each of its parameters goes in `size` elements. Matrices of a module that are
  // updated as wholes are a unit of their own, after that of the others; so are frozen parameters, and those in four
  // bits are one of bytes.
  struct Unit {
    std::string name;
    Module* module = nullptr;
    bool trainable = true, packed = false, matrices = false;
    bool is_expert() const { return slots[0].parameter->is_expert; }
    std::vector<Slot> slots = {};
    int64_t size = 0;
    DType dtype(DType of_values) const { return packed ? DType::uint8 : of_values; }
  };
  std::vector<Unit> layout();
  // Gives every parameter memory for its value (of `dtype`) and its gradient (of `grad_dtype`), and its first value.
  // Throws when called twice. Returns the units in order.
  std::vector<FlatUnit>& materialize(uint64_t seed, const ArenaPtr& arena, DType dtype, DType grad_dtype);
  std::vector<FlatUnit>& units() { return units_; }

  // The next gradients overwrite.
  void clear_gradients();
  // After the last backward of a step: gradients that no one brought become zero.
  void zero_missing_gradients();
  // Frees copies of weights in other layouts; they are made again when they are needed.
  virtual void drop_packs();

  // The place of the running step in the run (dropout reads it). It is set on the root and seen by all modules;
  // map_step_info() changes it for one module and those below.
  void set_step(const StepInfo& step) { step_ = step; }
  StepInfo step() const;
  void map_step_info(std::function<StepInfo(StepInfo)> f) { adjust_ = std::move(f); }

 protected:
  Var& param(std::string name, const Shape& shape, Init init);
  // A parameter as the forward pass sees it.
  Var seen(const Var& parameter) const { return transforms_ ? transforms_(parameter) : parameter; }
  template <class M, class... Args>
  M& child(const std::string& name, Args&&... args) {
    auto owned = std::make_unique<M>(std::forward<Args>(args)...);
    M& module = *owned;
    adopt(name, std::move(owned));
    return module;
  }

 private:
  void adopt(std::string name, std::unique_ptr<Module> module);
  void rename(const std::string& prefix);
  void collect(std::vector<Parameter*>& out);
  struct Group {
    Module* module;
    std::vector<Parameter*> members;
  };
  void collect_units(std::vector<Group>& out);
  void collect_members(std::vector<Group>& out, size_t unit);

  std::string name_;
  Module* parent_ = nullptr;
  bool is_unit_ = false, is_apart_ = false;
  std::list<Parameter> parameters_;
  std::list<std::unique_ptr<Module>> children_;
  std::vector<std::function<Var(const Inner&, const Var&)>> wraps_;
  std::function<Var(const Var&)> transforms_;
  std::function<StepInfo(StepInfo)> adjust_;
  bool here_ = true;
  std::vector<FlatUnit> units_;
  StepInfo step_;
};

// The first values of elements [begin, begin + values.numel()) of a unit, whatever the layout: element i of a whole
// parameter is Philox::named(seed, name).normal(i) times its deviation. Gaps and what lies past the unit are zero. What
// is held in four bits is drawn whole, in float, whatever of it is here.
void initialise(const Module::Unit& unit, const Tensor& values, int64_t begin, uint64_t seed);
// A unit with this memory, of unit.size elements or more: its first values, gradients of zero, and its parameters as
// views of both. A frozen unit has no gradients: `grads` is not looked at.
FlatUnit make_flat(const Module::Unit& unit, Tensor values, Tensor grads, uint64_t seed);
// The same with memory of its own.
FlatUnit make_unit(const Module::Unit& unit, const ArenaPtr& arena, DType dtype, DType grad_dtype, uint64_t seed);
// Makes the unit's parameters views of these buffers (of unit.size elements or more).
void bind_values(const Module::Unit& unit, const Tensor& values);
void bind_gradients(const Module::Unit& unit, const Tensor& grads);
// Leaves them without memory, until they are bound again.
void drop_values(const Module::Unit& unit, DType dtype);

}  // namespace tessera
