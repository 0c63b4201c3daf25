// Optimizers over flat buffers: one pass over each unit reads gradients, updates state and writes parameters.
//
// An element's new value depends only on its own value, gradient and state, with the same roundings everywhere: sharded
// updates are bitwise identical to unsharded ones, for any number of threads.
//
// State is float32 (float64 if the values are). bfloat16 values have a float32 master copy in the state, which is
// updated and rounded to nearest even. With `state` bfloat16 there is no master copy, and values and state are rounded
// stochastically (optim/rounding.h). Weight decay applies only to parameters with `decays`. If a unit is a shard, slots
// may begin before element 0 or end past the last, and only the elements inside are updated.
#pragma once
#include <algorithm>
#include <cstdint>
#include <memory>
#include <span>
#include <string_view>
#include <vector>

#include "optim/rules.h"
#include "tensor/random.h"

namespace tessera {

class Optimizer : NotCopied {
 public:
  // State is zero, and master copies are copies of the current values, so materialize or load parameters first. Throws
  // Error for options out of range, or naming the unit if its buffers or slots are inconsistent.
  Optimizer(OptimizerKind kind, std::vector<FlatUnit> units, const OptimizerOptions& options);

  // Updates every unit with learning rate `lr`; gradients are multiplied by `grad_scale` (the clip factor) on read.
  // Increments the version of each unit's storage. Cost of AdamW per element: 16 bytes read and 12 written in float32;
  // 8 and 6 if everything is bfloat16.
  void step(double lr, double grad_scale);

  // Update on a GPU without the host knowing the clip factor: the host writes next(lr) to GPU memory, a kernel sets
  // grad_scale and skip, queue_step() queues the update, and count_step() follows once it has been applied.
  UpdateScalars next(double lr) const;  // for the step after steps(), with grad_scale 1
  void queue_step(const UpdateScalars* on_gpu) { update({}, on_gpu); }
  void count_step();

  // Checkpointed state, in an order that depends only on the units: per unit "<unit>.momentum", "<unit>.m", "<unit>.v",
  // "<unit>.master", each as long as the unit's values. Waits for a pending GPU update if the tensors are in host
  // memory.
  const std::vector<NamedTensor>& state() const;
  // For each of units(): bfloat16's master copy, or the values.
  const std::vector<Tensor>& masters() const { return masters_; }
  int64_t steps() const { return steps_; }  // the t of Adam's bias correction
  void set_steps(int64_t steps) { steps_ = steps >= 0 ? steps : throw FieldError("steps", "expected at least 0"); }
  const std::vector<FlatUnit>& units() const { return units_; }

 private:
  // On a GPU, scalars at `on_gpu`, unless null, replace `now`.
  void update(const UpdateScalars& now, const UpdateScalars* on_gpu);
  // `rounding` has a stream per slot, or is empty.
  void run(const UnitUpdate& of, std::span<const Philox> rounding, const UpdateScalars& now,
           const UpdateScalars* on_gpu) const;
  // Zeros as long as the unit's values.
  Tensor add_state(const FlatUnit& unit, std::string_view suffix, DType dtype);
  // Whether values and state are rounded stochastically.
  bool rounds(const FlatUnit& unit) const {
    return options_.state == DType::bfloat16 && unit.values.dtype() == DType::bfloat16;
  }

  OptimizerKind kind_;
  std::vector<FlatUnit> units_;
  OptimizerOptions options_;
  int64_t steps_ = 0;
  std::vector<NamedTensor> state_;
  std::vector<std::weak_ptr<ModuleState>> models_;  // of the units
  // By unit.
  std::vector<UpdateRule> rules_;
  std::vector<std::vector<Tensor>> states_;
  std::vector<Tensor> masters_;
  std::vector<std::vector<Philox>> rounding_;
};

inline std::unique_ptr<Optimizer> make_optimizer(OptimizerKind kind, std::vector<FlatUnit> units,
                                                 const OptimizerOptions& options) {
  return std::make_unique<Optimizer>(kind, std::move(units), options);
}

}  // namespace tessera
