// Small plans for contract_test.cpp, the command that reproduces a plan, and runs on its ranks.
#pragma once
#include <cstdint>
#include <functional>
#include <string>
#include <string_view>

#include "app/resolve.h"
#include "train/trainer.h"

namespace tessera {

// Sets options from their text: say(o, "zero=2 shard_ranks=2").
inline void say(TypedOptions& o, std::string_view options) {
  for (const std::string& word : split(options, ' '))
    if (const size_t equals = word.find('='); equals != std::string::npos)
      o[word.substr(0, equals)] = word.substr(equals + 1);
}

namespace test {

// A model that trains twenty steps in a fraction of a second, with dropout, one thread per rank.
inline TypedOptions small_plan(std::string_view options = {}) {
  TypedOptions o = verify_defaults();
  say(o, "layers=2 heads=2 channels=32 context=16 vocab=40 threads_per_rank=1 timeout=30");
  say(o, options);
  return o;
}

// "tessera verify --layers 2 ..." with all non-default options.
inline std::string make_command(const TypedOptions& o) {
  std::string text = "tessera verify";
  const auto defaults = config_values(verify_defaults());
  for (const auto& [key, value] : config_values(o)) {
    bool is_default = false;
    for (const auto& [k, v] : defaults) is_default = is_default || (k == key && v == value);
    if (!is_default) text += fmt::format(" --{} {}", key, value);
  }
  return text;
}

inline Sequences synthetic(const TrainConfig& job, int64_t seed = 1) {
  return synthetic_sequences(job.model.vocab, job.model.context, job.optim.batch, static_cast<uint64_t>(seed));
}

// Calls f(trainer) on each rank of the job.
inline void on_ranks(const TrainConfig& job, const Sequences& sequences, const std::function<void(Trainer&)>& f) {
  launch(launch_options(job.plan), [&](Communicator& world) {
    Trainer trainer(job, sequences, world);
    f(trainer);
  });
}
inline void on_ranks(const TrainConfig& job, const std::function<void(Trainer&)>& f) {
  on_ranks(job, synthetic(job), f);
}

}  // namespace test
}  // namespace tessera
