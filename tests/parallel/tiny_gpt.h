// A GPT that trains quickly and has indivisible sizes, synthetic sequences for it, and one training step.
#pragma once
#include <cstdint>
#include <vector>

#include "models/decoder.h"

namespace tessera::test {

inline ModelConfig tiny_gpt(double dropout) {
  return {.layers = 2, .heads = 3, .channels = 24, .context = 10, .vocab = 37, .dropout = dropout};
}

struct Sequences {
  Tensor ids, targets;  // int32 (count, context)
};
// Sequences [first, first + count) of a step: each token determines the next, so the model can learn.
inline Sequences sequences(const ModelConfig& config, int64_t step, int64_t first, int64_t count,
                           const ArenaPtr& arena) {
  const Shape shape{count, config.context};
  Sequences out{Tensor::empty(shape, DType::int32, arena), Tensor::empty(shape, DType::int32, arena)};
  for (int64_t s = 0; s < count; ++s) {
    const Philox random(static_cast<uint64_t>(step * 1000 + first + s));
    auto token = static_cast<int32_t>(random.below(static_cast<uint64_t>(config.vocab), 0));
    for (int64_t t = 0; t < config.context; ++t) {
      const int64_t at = s * config.context + t;
      out.ids.data<int32_t>()[at] = token;
      token = static_cast<int32_t>((token * 5 + 3) % config.vocab);
      out.targets.data<int32_t>()[at] = token;
    }
  }
  return out;
}

// Forward and backward of these sequences; `tokens` is the divisor of the mean. Returns the sum of the losses.
inline double learn(Decoder& model, const Sequences& s, const StepInfo& info, int64_t tokens) {
  model.set_step(info);
  const Loss loss = model.loss(s.ids, s.targets, 1.0 / static_cast<double>(tokens));
  backward(loss.mean);
  return loss.loss_sum;
}

inline std::vector<std::byte> bytes(const Tensor& t) { return {t.raw(), t.raw() + t.nbytes()}; }
using Bytes = std::vector<std::vector<std::byte>>;

// The bytes of all parameters, in unit order.
inline Bytes copy_values(Module& model) {
  Bytes out;
  for (const Module::Unit& unit : model.layout())
    for (const Slot& slot : unit.slots) out.push_back(bytes(slot.parameter->var.value()));
  return out;
}

}  // namespace tessera::test
