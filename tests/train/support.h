// Runs of small jobs, and the files that they save.
#pragma once
#include <cstdint>
#include <cstring>
#include <functional>
#include <map>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "train/checkpoint/state.h"
#include "train/trainer.h"

namespace tessera {

// Trains for the given number of steps, then calls `then` on each rank.
inline void train(const TrainConfig& job, const Sequences& sequences, int64_t steps,
                  const std::function<void(Trainer&, Communicator&)>& then) {
  launch(launch_options(job.plan), [&](Communicator& world) {
    Trainer trainer(job, sequences, world);
    for (int64_t i = 0; i < steps; ++i) trainer.step();
    then(trainer, world);
  });
}

inline void train(const TrainConfig& job, int64_t steps, const std::function<void(Trainer&, Communicator&)>& then) {
  train(job, synthetic_sequences(job.model.vocab, job.model.context, job.optim.batch, 1), steps, then);
}

// A file of the tokens i * i % 37.
inline TokenFile squares(int32_t count) {
  std::vector<int32_t> tokens;
  for (int32_t i = 0; i < count; ++i) tokens.push_back(i * i % 37);
  return TokenFile::from_tokens(tokens, 37, "squares");
}

// Tensors by name, for a trainer to read.
template <class T>
FullTensors make_source(const std::map<std::string, std::vector<T>>& all) {
  return [&all](const std::string& name, DType dtype, const Shape&) {
    const auto found = all.find(name);
    if (found == all.end()) throw Error("nobody has saved " + name);
    return make_reader(std::as_bytes(std::span(found->second)), dtype);
  };
}

// Full tensors of a checkpoint, assembled from the slices that each rank saves.
using File = std::map<std::string, std::vector<std::byte>>;
inline void save(Trainer& trainer, File& file) {
  static std::mutex one_at_a_time;
  for (const auto& parts : {own_values(trainer.state()), own_state(trainer.state())})
    for (const TensorSlice& h : parts) {
      const std::lock_guard lock(one_at_a_time);
      const Tensor part = h.part.on_host().contiguous();
      const int64_t element = element_size(part.dtype());
      std::vector<std::byte>& full = file[h.name];
      full.resize(static_cast<size_t>(h.parameter->stored().numel() * element));
      for_each_run(*h.parameter, h.begin, h.begin + part.numel(), [&](int64_t here, int64_t there, int64_t count) {
        std::memcpy(full.data() + there * element, part.raw() + (here - h.begin) * element,
                    static_cast<size_t>(count * element));
      });
    }
}

}  // namespace tessera
