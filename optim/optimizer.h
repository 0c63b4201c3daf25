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
#include <array>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "nn/parameter.h"

namespace tessera {

struct OptimizerOptions {
  double momentum = 0.9;  // sgd; muon, of matrices
  double beta1 = 0.9;     // adam, adamw
  double beta2 = 0.999;
  double eps = 1e-8;
  double weight_decay = 0;
  DType state = DType::float32;  // bfloat16: for values of bfloat16 on the CPU
  uint64_t seed = 0;             // of stochastic rounding
  // Where the state is kept; null: beside the gradients. For gradients on a GPU: memory that its kernels reach, see
  // make_pinned_arena(). An update then reads and writes the state over the bus, both ways at once, while it computes.
  // The same holds for values in such memory.
  ArenaPtr state_arena = {};
  // muon: makes updates of matrices from what is here of them, in place. A tensor for each unit, like its values;
  // undefined for those that are not of matrices. Null: all of each matrix is here.
  std::function<void(const std::vector<FlatUnit>& units, const std::vector<Tensor>& updates)> orthogonalise = {};
};

// The numbers of a step that its update is made with; an update rounds them once, to the type that it computes in.
struct UpdateNumbers {
  double lr = 0, grad_scale = 1;         // grad_scale: the clip factor
  double step_size = 0, root_scale = 0;  // Adam's -lr / (1 - beta1^t) and 1 / sqrt(1 - beta2^t)
  double keep = 1;                       // AdamW's 1 - lr weight_decay
  bool skip = false;                     // nothing is to be updated
};

class Optimizer {
 public:
  // Checks the units; the state is zero, and a master copy is taken of the values as they are now, so parameters are
  // materialised or loaded first. Throws Error naming the unit when its buffers or slots do not fit together.
  Optimizer(std::vector<FlatUnit> units, const OptimizerOptions& options);
  virtual ~Optimizer() = default;
  Optimizer(const Optimizer&) = delete;
  Optimizer& operator=(const Optimizer&) = delete;

  // One update with learning rate `lr` of every unit. Each gradient is multiplied by `grad_scale` (the clip factor)
  // as it is read; the gradient buffers stay as they are. Bumps the version of each unit's storage.
  // Cost of AdamW: in float32 16 bytes read and 12 written per element; all in bfloat16 8 and 6.
  void step(double lr, double grad_scale);

  // The same where the host shall not know the clip factor, of units on a GPU: it writes next(lr) to memory there,
  // something on the GPU sets grad_scale and skip, queue_step() queues the update, and count_step() is called when it
  // is known that the update was made.
  virtual UpdateNumbers next(double lr) const = 0;  // of the step after steps(), with a grad_scale of 1
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

 protected:
  // Makes the update with `now`, or, on a GPU, with the numbers at `on_gpu` unless that is null.
  virtual void update(const UpdateNumbers& now, const UpdateNumbers* on_gpu) = 0;
  // Zeros as long as the unit's values, in the arena's optimizer category, in the dtype of the unit's state.
  Tensor add_state(const FlatUnit& unit, std::string_view suffix) {
    return add_state(unit, suffix, rounds(unit) ? DType::bfloat16 : wide_of(unit.values.dtype()));
  }
  // Of each unit, in their order: one of masters().
  Tensor add_master(const FlatUnit& unit);
  // Whether values and state of the unit are rounded stochastically.
  bool rounds(const FlatUnit& unit) const {
    return options_.state == DType::bfloat16 && unit.values.dtype() == DType::bfloat16;
  }
  const OptimizerOptions& options() const { return options_; }

  int64_t steps_ = 0;

 private:
  Tensor add_state(const FlatUnit& unit, std::string_view suffix, DType dtype);
  std::vector<FlatUnit> units_;
  OptimizerOptions options_;
  std::vector<NamedTensor> state_;
  std::vector<Tensor> masters_;
};

enum class OptimizerKind : uint8_t { sgd, adam, adamw, muon };
inline constexpr std::array<std::string_view, 4> kOptimizerNames = {"sgd", "adam", "adamw", "muon"};
// Throws Error for an option out of range.
std::unique_ptr<Optimizer> make_optimizer(OptimizerKind kind, std::vector<FlatUnit> units,
                                          const OptimizerOptions& options);

}  // namespace tessera
