// Module: a tree of named parameters.
//
// A model is built on the meta device (shapes, no memory), may be partitioned by a strategy, and is allocated and
// initialized by materialize(). Each initial element is a function of (seed, full name, index), so all layouts start
// from the same model. Parameters of one unit (an embedding, a block, a head) share a flat buffer; see nn/parameter.h.
#pragma once
#include <algorithm>
#include <cstdint>
#include <functional>
#include <list>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "nn/parameter.h"
#include "nn/step.h"

namespace tessera {

struct Packing;  // tensor/ops/quantize/quantize.h

class Module : NotCopied {  // children hold references into it
 public:
  virtual ~Module() = default;

  // For modules with one input and one output; others define separate functions.
  virtual Var forward(const Var& x);
  // forward() with all wrappers, the last one outermost.
  Var operator()(const Var& x);
  using Inner = std::function<Var(const Var&)>;
  // Calls `inner` in place of forward(), with all wrappers; x may be undefined.
  Var call(Inner inner, const Var& x);
  void wrap(std::function<Var(const Inner&, const Var&)> f) {
    require_object(f ? this : nullptr, "[wrap] f");
    wraps_.push_back(std::move(f));
  }
  // Declares that parameter or gradient memory is allocated and freed per unit: ops must not combine units.
  void disable_fusion() { may_fuse_ = false; }
  // Whether an op may combine this module with others, instead of calling it.
  virtual bool may_fuse() const { return may_fuse_ && wraps_.empty(); }
  // The forward pass replaces each of this module's parameters by f(parameter), called at each use. The result may be
  // recomputed after the use (Var::with_recompute).
  void transform(std::function<Var(const Var&)> f) { transforms_ = std::move(f); }

  // `var` is a parameter of this module, also in shard() and quantize().
  Parameter& parameter(const Var& var);
  // Restricts a parameter to a shard. Throws Error after materialization, or if a run exceeds the dim.
  void shard(const Var& var, ShardSpec spec);
  // Freezes all parameters of this module and its descendants. Throws Error after materialization.
  void freeze();
  // Freezes a matrix and stores it in 4 bits. Throws Error after sharding or materialization, and for sizes that are
  // not multiples of a block.
  void quantize(const Var& var, const Packing& packing);
  // Excludes a module's parameters from parameters() and layout() if they are on another rank.
  void set_local(bool here) { here_ = here; }

  std::vector<Parameter*> parameters();  // depth first, in declaration order
  int64_t parameter_count();
  std::string full_name() const;
  bool contains(const Module& module) const;
  // Depth first, including this module.
  template <class M>
  std::vector<M*> all() {
    std::vector<M*> out;
    if (M* self = dynamic_cast<M*>(this)) out.push_back(self);
    for (const auto& c : children_)
      for (M* below : c->template all<M>()) out.push_back(below);
    return out;
  }

  // Stores parameters of this module and of descendants outside other units in one flat buffer.
  void make_unit() { is_unit_ = true; }
  // Layout of a unit's parameters, in `size` elements (bytes for 4-bit parameters). A module's matrices with
  // full-matrix updates, its frozen and its 4-bit parameters form separate units, which follow its first unit.
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
  // Allocates and initializes all values (`dtype`) and gradients (`grad_dtype`); returns the units in order. Throws
  // Error if called twice.
  std::vector<FlatUnit>& materialize(uint64_t seed, const ArenaPtr& arena, DType dtype, DType grad_dtype);
  std::vector<FlatUnit>& units() { return units_; }

  // The next gradients overwrite the buffers.
  void clear_gradients();
  // After the last backward of a step: zeroes gradients that did not arrive.
  void zero_missing_gradients();
  // Packed weights are rebuilt on demand.
  virtual void drop_packs();

  // Position of the current step in the run. Set on the root and visible to all modules; map_step_info() modifies it
  // for one subtree.
  void set_step(const StepInfo& step) { step_ = step; }
  StepInfo step() const;
  void map_step_info(std::function<StepInfo(StepInfo)> f) { adjust_ = std::move(f); }

 protected:
  Var& param(std::string name, const Shape& shape, Init init);
  Var used(const Var& parameter) const { return transforms_ ? transforms_(parameter) : parameter; }
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
  bool is_unit_ = false, may_fuse_ = true;
  std::list<Parameter> parameters_;
  std::list<std::unique_ptr<Module>> children_;
  std::vector<std::function<Var(const Inner&, const Var&)>> wraps_;
  std::function<Var(const Var&)> transforms_;
  std::function<StepInfo(StepInfo)> adjust_;
  bool here_ = true;
  std::vector<FlatUnit> units_;
  StepInfo step_;
};

}  // namespace tessera
