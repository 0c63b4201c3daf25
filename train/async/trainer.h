// One rank of an asynchronous run: a worker, and a parameter server (parallel/async/server.h) that applies pushes
// immediately. Each worker runs `steps` steps of batch / ranks sequences: the run consumes as many sequences as a
// synchronous one, in `ranks` times as many updates.
#pragma once
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "data/loader.h"
#include "parallel/async/server.h"
#include "train/batches.h"
#include "train/checkpoint/full_state.h"
#include "train/config.h"

namespace tessera {

// Full tensors on rank 0, empty elsewhere.
struct AsyncTensors {
  std::vector<NamedTensor> values, state;
  std::vector<NamedTensor> pulled;  // by workers for their next step ("worker.1.blocks.0..."), only in a replay
};

class AsyncTrainer {
 public:
  // Every rank of `world`, which must outlive this object, constructs one. Throws FieldError if some targets are not
  // trained: a single worker's update has no global batch to average over.
  AsyncTrainer(const TrainConfig& job, Sequences sequences, Communicator& world);

  AsyncServer& server() { return server_; }
  Communicator& axis() { return *axis_; }
  LanguageModel& model() { return *model_; }
  const ArenaPtr& arena() const { return arena_; }

  // Computes the gradient of a worker's sequences; returns their mean loss.
  double worker_step(int worker, int64_t step);
  // Mean loss over all targets of a split; nullopt if a rank requests a stop. Collective.
  std::optional<double> mean_loss(const Rows& split, const std::function<bool()>& stop);

  // Collective.
  AsyncTensors gather();
  // Load this rank's shards.
  void read(const FullTensors& values, const FullTensors& state, int64_t updates);
  void read_pulled(const FullTensors& pulled);
  void begin_with(const FullTensors& values);

 private:
  AsyncOptions async_options();
  Documents documents(const Tensor& ids) const;
  void gather(const std::string& suffix, const std::function<Tensor(size_t unit)>& shard,
              std::vector<NamedTensor>& out);

  TrainConfig job_;
  Sequences sequences_;
  std::unique_ptr<Communicator> axis_;
  ArenaPtr arena_;
  std::unique_ptr<LanguageModel> model_;
  LrSchedule schedule_;
  AsyncServer server_;
};

}  // namespace tessera
