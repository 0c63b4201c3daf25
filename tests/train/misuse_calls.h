// Helpers of the table of wrong calls.
#pragma once
#include <cmath>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "models/decoder.h"
#include "tests/support/draw.h"
#include "tests/support/strategy.h"
#include "train/trainer.h"

namespace tessera::misuse {

using test::Sampler;

// One wrong call, by a rank of two. `sample` has the same random numbers on every rank.
struct WrongCall {
  std::string name;   // AREA: argument
  std::string names;  // a part of the message that names the argument
  std::function<void(Communicator& world, Sampler& sample)> call;
};

inline ArenaPtr arena() { return make_arena(); }
inline Tensor floats(const Shape& shape) { return Tensor::zeros(shape, DType::float32, arena()); }
inline Tensor ints(const Shape& shape) { return Tensor::zeros(shape, DType::int32, arena()); }
inline Var var(const Shape& shape) { return Var(floats(shape), true); }
inline int64_t negative(Sampler& sample) { return -sample.between(1, 1'000'000); }
inline const double kNan = std::nan("");
inline constexpr const char* kUndefined = "used before it was assigned a value";

inline ModelConfig small() { return {.layers = 2, .heads = 2, .channels = 8, .context = 4, .vocab = 16}; }

inline std::unique_ptr<LanguageModel> ready_model() {
  std::unique_ptr<LanguageModel> model = make_model(small());
  model->materialize(1, arena(), DType::float32, DType::float32);
  return model;
}

inline std::unique_ptr<DataStrategy> strategy_with(Communicator& world, LanguageModel& model,
                                                   DataOptions options = {}) {
  return make_data_strategy(model, world, arena(), options);
}

inline TrainConfig job_of_two() { return {.model = small(), .optim = {.steps = 4, .batch = 4}, .plan = {.dp = 2}}; }
inline Sequences sequences() { return synthetic_sequences(16, 4, 4, 1); }

// Calls of a step: strategies, optimizers, layers, models and trainers.
std::vector<WrongCall> wrong_step_calls();

}  // namespace tessera::misuse
