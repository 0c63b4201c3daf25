// A GPT sharded over a tensor axis and the one-rank reference: inputs, a pass of each, and the distance between shards
// and the reference.
#pragma once
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

#include "models/decoder.h"
#include "models/layout.h"

namespace tessera::test {

struct Batch {
  Tensor ids, targets;  // int32 (B, T)
};

// About every tenth target is ignored.
inline Batch random_batch(int64_t rows, int64_t tokens, int64_t vocab, const ArenaPtr& arena) {
  Batch out{Tensor::empty({rows, tokens}, DType::int32, arena), Tensor::empty({rows, tokens}, DType::int32, arena)};
  const Philox random = Philox::named(static_cast<uint64_t>(vocab), "batch");
  for (int64_t i = 0; i < rows * tokens; ++i) {
    const auto at = static_cast<uint64_t>(3 * i), entries = static_cast<uint64_t>(vocab);
    out.ids.data<int32_t>()[i] = static_cast<int32_t>(random.below(entries, at));
    out.targets.data<int32_t>()[i] =
        random.below(10, at + 2) == 0 ? -1 : static_cast<int32_t>(random.below(entries, at + 1));
  }
  return out;
}

// Adds a function of the full tensor's elements to every parameter, because initial biases and norms are too symmetric.
inline void disturb(Module& model) {
  for (const Parameter* p : model.parameters()) {
    const Tensor value = p->var.value();
    const Philox random = Philox::named(11, p->name);
    with_floating(value.dtype(), "disturb", [&](auto t) {
      using T = decltype(t);
      for_each_run(*p, 0, value.numel(), [&](int64_t here, int64_t full, int64_t count) {
        for (int64_t i = 0; i < count; ++i) {
          const double noise = 0.05 * random.normal(static_cast<uint64_t>(full + i));
          T& x = value.data<T>()[here + i];
          x = T(static_cast<Accumulate<T>>(static_cast<double>(static_cast<Accumulate<T>>(x)) + noise));
        }
      });
    });
  }
}

// An initialized GPT: full, or the shard of a rank of `axes`.
struct MadeGpt : Decoder {
  MadeGpt(const ModelConfig& c, const ArenaPtr& arena, const ModelAxes& axes = {}, DType dtype = DType::float32,
          DType grads = DType::float32, uint64_t seed = 7)
      : Decoder(c) {
    place(axes);
    materialize(seed, arena, dtype, grads);
  }
};

// Computes one training step's gradients; returns the sum of the losses.
inline double learn_sharded(Decoder& model, const Batch& batch, DeferredWeightGrads* defer = nullptr,
                            bool full = false) {
  model.set_step(
      {.seed = 5, .step = 3, .first_sequence = 2, .training = true, .tokens_total = full ? 0 : batch.ids.dim(1)});
  model.clear_gradients();
  const double scale = 1.0 / static_cast<double>(batch.ids.numel());
  const Loss loss = model.loss(batch.ids, batch.targets, scale);
  backward(loss.mean, {.seed = {}, .defer = defer});
  if (defer) defer->run();
  model.zero_missing_gradients();
  return loss.loss_sum;
}

inline double learn_full(Decoder& model, const Batch& batch) { return learn_sharded(model, batch, nullptr, true); }

// |shard of x - shard of full| / |full| over all ranks, where `x` is this rank's shard; fails if the shards do not
// cover the full tensor.
inline double distance(const Tensor& x_any, const Parameter& part, const Tensor& full_any, Communicator& tp) {
  const std::vector<double> x = x_any.to(DType::float64).to_vector<double>(),
                            full = full_any.to(DType::float64).to_vector<double>();
  double difference = 0, norm = 0;
  std::vector<double> counts(full.size());
  for_each_run(part, 0, x_any.numel(), [&](int64_t here, int64_t there, int64_t count) {
    for (int64_t i = 0; i < count; ++i) {
      const double expected = full[static_cast<size_t>(there + i)], d = x[static_cast<size_t>(here + i)] - expected;
      difference += d * d;
      norm += expected * expected;
      ++counts[static_cast<size_t>(there + i)];
    }
  });
  tp.sum(counts);
  EXPECT_EQ(std::count(counts.begin(), counts.end(), part.shard.is_replicated() ? tp.size() : 1),
            static_cast<int64_t>(counts.size()));
  difference = tp.sum(difference);
  norm = tp.sum(norm);
  EXPECT_GT(norm, 0);
  return std::sqrt(difference / norm);
}

inline void expect_same_gradients(Decoder& cut, Decoder& full, Communicator& tp, double bound,
                                  const std::string& what) {
  const std::vector<Parameter*> parts = cut.parameters(), wholes = full.parameters();
  ASSERT_EQ(parts.size(), wholes.size()) << what;
  for (size_t i = 0; i < parts.size(); ++i) {
    ASSERT_EQ(parts[i]->name, wholes[i]->name);
    const Parameter &part = *parts[i], &one = *wholes[i];
    EXPECT_LE(distance(part.var.grad(), part, one.var.grad(), tp), bound) << what << ": " << part.name;
  }
}

}  // namespace tessera::test
