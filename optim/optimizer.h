// Optimizers over flat memory: one pass over each unit's buffers reads the gradient, updates the state and writes the
// parameters.
//
// The new value of an element is a function of its own value, gradient and state only, with the same roundings
// everywhere: a shard of a unit gets the bits that the same elements get in the whole unit, for any number of threads.
//
// State is float32 (float64 when the values are float64). bfloat16 values have a float32 master copy in the state.
// The master is updated, and the values are the master rounded to nearest even. With `state` bfloat16 there is no
// master, and values and state are bfloat16, rounded stochastically (optim/rounding.h). Weight decay applies only to
// parameters that decay; frozen units are left out. A unit may be a shard: a slot may begin before element 0 or end
// past the last one, and only the part inside is updated. Elements outside every slot are neither read nor written.
#pragma once

#include "optim/rules.h"
#include "tensor/random.h"

namespace tessera {

class Optimizer : NotCopied {
 public:
  // Checks the units; the state is zero, and a master copy is taken of the values as they are now, so parameters are
  // materialised or loaded first. Throws Error for an option out of range, and naming the unit when its
  // buffers or slots do not fit together.
  Optimizer(OptimizerKind kind, std::vector<FlatUnit> units, const OptimizerOptions& options);

  // One update with learning rate `lr` of every unit. Each gradient is multiplied by `grad_scale` (the clip factor)
  // as it is read; the gradient buffers stay as they are. Bumps the version of each unit's storage.
  // Cost of AdamW: in float32 16 bytes read and 12 written per element; all in bfloat16 8 and 6.
  void step(double lr, double grad_scale);

  // An update of units on a GPU whose clip factor the host shall not know: it writes next(lr) to memory there,
  // something on the GPU sets grad_scale and skip, queue_step() queues the update, and count_step() is called when it
  // is known that the update was made.
  UpdateNumbers next(double lr) const;  // for the step after steps(), with a grad_scale of 1
  void queue_step(const UpdateNumbers* on_gpu) { update({}, on_gpu); }
  void count_step();

  // The state that a checkpoint must keep beside steps(), in an order that depends only on the units: for each unit in
  // turn its tensors, named "<unit>.momentum", "<unit>.m", "<unit>.v", "<unit>.master". Each is as long as the unit's
  // values. Waits for an update that a GPU has still under way when they lie in the host's memory.
  const std::vector<NamedTensor>& state() const;
  // The tensor that an update reads and writes, of each of units(): the master copy of bfloat16, or the values.
  const std::vector<Tensor>& masters() const { return masters_; }
  int64_t steps() const { return steps_; }  // steps done: the t of Adam's bias correction
  void set_steps(int64_t steps) { steps_ = steps; }
  const std::vector<FlatUnit>& units() const { return units_; }

 private:
  // Makes the update with `now`, or, on a GPU, with the numbers at `on_gpu` unless that is null.
  void update(const UpdateNumbers& now, const UpdateNumbers* on_gpu);
  // Updates one unit; streams of `rounding` for each of its slots, or none.
  void run(const UnitUpdate& of, std::span<const Philox> rounding, const UpdateNumbers& now,
           const UpdateNumbers* on_gpu) const;
  // Zeros as long as the unit's values, in the arena's optimizer category.
  Tensor add_state(const FlatUnit& unit, std::string_view suffix, DType dtype);
  // Whether values and state of the unit are rounded stochastically.
  bool rounds(const FlatUnit& unit) const {
    return options_.state == DType::bfloat16 && unit.values.dtype() == DType::bfloat16;
  }

  OptimizerKind kind_;
  std::vector<FlatUnit> units_;
  OptimizerOptions options_;
  int64_t steps_ = 0;
  std::vector<NamedTensor> state_;
  // Each unit's own, in their order.
  std::vector<UpdateRule> rules_;
  std::vector<std::vector<Tensor>> states_;
  std::vector<Tensor> masters_;
  std::vector<std::vector<Philox>> rounding_;  // empty where nothing is rounded stochastically
};

inline std::unique_ptr<Optimizer> make_optimizer(OptimizerKind kind, std::vector<FlatUnit> units,
                                                 const OptimizerOptions& options) {
  return std::make_unique<Optimizer>(kind, std::move(units), options);
}

}  // namespace tessera
