// One rank of an asynchronous run: its worker, and the server beside it (parallel/async/server.h). Workers that push
// when they are ready, servers that apply at once; each worker makes `steps` steps of batch / ranks sequences, so the
// run sees as many sequences as a synchronous one, in `ranks` times as many updates.
#pragma once

#include "data/token_file.h"
#include "parallel/async/server.h"
#include "train/batches.h"
#include "train/checkpoint/state.h"
#include "train/job.h"

namespace tessera {

class AsyncTrainer {
 public:
  // Makes the model with its first weights. Every rank of `world`, which must outlive it, makes one. Throws FieldError
  // for sequences of which not all targets are trained: updates of single workers have no batch to take a mean over.
  AsyncTrainer(const Job& job, Sequences sequences, Communicator& world);

  AsyncServer& server() { return server_; }
  Communicator& axis() { return *axis_; }
  LanguageModel& model() { return *model_; }
  const ArenaPtr& arena() const { return arena_; }
  int64_t tokens_per_step() const { return job_.optim.batch * model_->config.context; }  // tokens of all workers

  // The mean loss of a worker's sequences of a step, and its gradient.
  double worker_step(int worker, int64_t step);
  // The mean loss over the targets of a whole split. Every rank calls it; nothing where one has stopped it.
  std::optional<double> mean_loss(const Rows& split, const std::function<bool()>& stop);
  std::optional<double> mean_loss(const TokenFile& split, const std::function<bool()>& stop) {
    return mean_loss(Windows(split, model_->config.context), stop);
  }

  // Whole tensors on rank 0, elsewhere none; every rank calls these: parameters; optimizer state; what workers have
  // pulled for their next step, "worker.1.blocks.0...", none but inside a replay.
  std::vector<NamedTensor> values();
  std::vector<NamedTensor> state();
  std::vector<NamedTensor> pulled();
  // This server's and this worker's part of them.
  void read(const FullTensors& values, const FullTensors& state, int64_t updates);
  void read_pulled(const FullTensors& pulled);
  // The first weights of a run, this server's part of them.
  void begin_with(const FullTensors& values);

 private:
  AsyncOptions async_options();
  Documents documents(const Tensor& ids) const;
  void gather(const std::string& suffix, const std::function<Tensor(size_t unit)>& shard,
              std::vector<NamedTensor>& out);

  Job job_;
  Sequences sequences_;
  std::unique_ptr<Communicator> axis_;
  ArenaPtr arena_;
  std::unique_ptr<LanguageModel> model_;
  LrSchedule schedule_;
  AsyncServer server_;
};

}  // namespace tessera
