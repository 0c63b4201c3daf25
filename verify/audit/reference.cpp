// Reference runs on one rank.
#include "verify/audit/reference.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <functional>
#include <map>
#include <span>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "base/bad_input.h"
#include "models/families.h"
#include "models/hub_tensors.h"
#include "parallel/comm/launch.h"
#include "train/device.h"
#include "train/trainer.h"

namespace tessera::audit {

namespace fs = std::filesystem;

namespace {

constexpr int64_t kMaxLogits = int64_t{1} << 28;  // elements of a pass

// Moves every other element of the token embeddings by one unit in the last place.
FullTensors moved(FullTensors weights) {
  return [weights = std::move(weights)](const std::string& name, DType dtype, const Shape& shape) -> TensorReader {
    TensorReader read = weights(name, dtype, shape);
    if (name != "tokens.weight" || !is_floating(dtype)) return read;
    return [read, dtype](int64_t begin, std::span<std::byte> to) {
      read(begin, to);
      with_floating(dtype, "audit", [&]<class T>(T) {
        for (size_t at = 0; at + sizeof(T) <= to.size(); at += 2 * sizeof(T)) {
          T x;
          std::memcpy(&x, to.data() + at, sizeof(T));
          const double ulp = std::is_same_v<T, double> ? 0x1p-52 : std::is_same_v<T, float> ? 0x1p-23 : 0x1p-7;
          x = static_cast<T>(
              static_cast<Accumulate<T>>(static_cast<double>(static_cast<Accumulate<T>>(x)) * (1 + ulp)));
          std::memcpy(to.data() + at, &x, sizeof(T));
        }
      });
    };
  };
}

// Parameters in the recording, for steps after the first; others are those of the model.
FullTensors recorded_weights(const Recording& found, const ReferenceModel& model) {
  std::map<std::string, HubTensor> table;
  for (HubTensor& t : hub_tensors(model.config)) table[t.name] = std::move(t);
  return [&found, &model, table](const std::string& name, DType dtype, const Shape& shape) -> TensorReader {
    const auto tensor = table.find(name);
    std::vector<double> all, part;
    if (tensor == table.end() || dtype == DType::uint8) return model.weights(name, dtype, shape);
    for (const HubTensor::Slice& slice : tensor->second.slices) {
      const auto* const stored = found.find(Kind::parameter, slice.name);
      if (!stored || stored->begin()->second.shape != tensor->second.slice_shape(slice))
        return model.weights(name, dtype, shape);
      const StoredTensor& t = stored->begin()->second;
      found.read(t, 0, {0, t.rows()}, part);
      if (tensor->second.transposed)
        for (int64_t column = 0; column < t.width(); ++column)
          for (int64_t row = 0; row < t.rows(); ++row)
            all.push_back(part[static_cast<size_t>(row * t.width() + column)]);
      else
        all.insert(all.end(), part.begin(), part.end());
    }
    return [all, dtype](int64_t begin, std::span<std::byte> to) {
      with_floating(dtype, "audit", [&]<class T>(T) {
        for (size_t i = 0; (i + 1) * sizeof(T) <= to.size(); ++i) {
          const T x = static_cast<T>(static_cast<Accumulate<T>>(all[static_cast<size_t>(begin) + i]));
          std::memcpy(to.data() + i * sizeof(T), &x, sizeof(T));
        }
      });
    };
  };
}

Sequences recorded_sequences(const Recording& found, const ModelConfig& model) {
  int64_t trained = 0;
  for (const TokenRow& row : found.rows())
    for (size_t i = 0; i < row.ids.size(); ++i) {
      if (row.ids[i] < 0 || row.ids[i] >= model.vocab || row.targets[i] >= model.vocab)
        bad_input("{}: expected tokens below the vocabulary size {} of the model, got {}", found.what(), model.vocab,
                  std::max(row.ids[i], row.targets[i]));
      trained += row.targets[i] >= 0 ? 1 : 0;
    }
  if (trained == 0) bad_input("{}: expected input_ids and targets, got none", found.what());
  const int64_t context = model.context;
  return {.vocab = model.vocab,
          .load =
              [&found, context](int64_t, int64_t first, int64_t count, int32_t* ids, int32_t* targets) {
                std::fill_n(ids, count * context, 0);
                std::fill_n(targets, count * context, Rows::kIgnored);
                for (int64_t r = 0; r < count; ++r) {
                  const TokenRow& row = found.rows()[static_cast<size_t>(first + r)];
                  for (int64_t i = 0; i < std::ssize(row.ids); ++i) {
                    ids[r * context + i] = static_cast<int32_t>(row.ids[static_cast<size_t>(i)]);
                    const int64_t target = row.targets[static_cast<size_t>(i)];
                    if (target >= 0) targets[r * context + i] = static_cast<int32_t>(target);
                  }
                }
              },
          .trained = [trained](int64_t) { return trained; }};
}

}  // namespace

ReferenceRuns run_references(const Recording& found, const ReferenceModel& model, const fs::path& directory) {
  const auto start = std::chrono::steady_clock::now();
  const double eps = found.epsilon();
  TrainConfig job;
  job.model = model.config;
  job.model.dropout = 0;
  job.model.experts.balance_loss = job.model.experts.z_loss = 0;
  if (!find_row(model.config.family).rotary) job.model.positions = model.config.position_rows();
  job.model.context = 1;
  for (const TokenRow& row : found.rows())
    job.model.context = std::max(job.model.context, static_cast<int64_t>(std::ssize(row.ids)));
  job.optim.batch = std::ssize(found.rows());
  job.optim.steps = 1;
  job.optim.clip = job.optim.lr = 0;  // the recorded update is recomputed from the recorded gradients
  job.optim.optimizer = OptimizerKind::sgd;
  job.optim.momentum = 0;
  job.optim.dtype = eps > 1e-4 ? DType::bfloat16 : eps > 1e-9 ? DType::float32 : DType::float64;
  job.plan = {.deterministic = true};
  const int64_t logits = job.optim.batch * job.model.context * job.model.vocab;
  while (logits / job.plan.microbatches > kMaxLogits && job.plan.microbatches < job.optim.batch) do
      ++job.plan.microbatches;
    while (job.optim.batch % job.plan.microbatches != 0);
  const Sequences sequences = recorded_sequences(found, job.model);
  const FullTensors weights = found.step() > 1 ? recorded_weights(found, model) : model.weights;
  ReferenceRuns out;
  const auto run = [&](const TrainConfig& config, const FullTensors& values, const std::string& name) {
    const fs::path to = directory / fmt::format("{}", out.names.size());
    fs::create_directories(to);
    launch(launch_options(config.plan), [&](Communicator& world) {
      Trainer trainer(config, sequences, world);
      begin_with(trainer.state().strategy().resident_units(), trainer.state().optimizer(), values);
      trainer.dump(1, to);
      trainer.step();
    });
    out.names.push_back(name);
    return to / "dump_1.safetensors";
  };
  out.reference = run(job, weights, std::string(to_string(job.optim.dtype)));
  if (job.plan.microbatches < job.optim.batch) {
    TrainConfig single = job;
    single.plan.microbatches = job.optim.batch;
    out.repeats.push_back(run(single, weights, "single sequences"));
  }
  if (job.optim.dtype != DType::float64) {
    TrainConfig wide = job;
    wide.optim.dtype = DType::float64;
    out.repeats.push_back(run(wide, weights, "float64"));
  }
  out.repeats.push_back(run(job, moved(weights), "embeddings moved by one ulp"));
  launch(launch_options(job.plan), [&](Communicator& world) {
    out.local = find_local_errors(found, job.model, weights, rank_arena(job.plan, world));
  });
  if (!out.local.errors.empty()) out.names.emplace_back("modules on recorded inputs");
  out.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  return out;
}

}  // namespace tessera::audit
