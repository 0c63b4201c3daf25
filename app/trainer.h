// One rank of a training run: the model or its part of it, its optimizer, and its place in the data.
#pragma once
#include <memory>

#include "app/options.h"
#include "app/progress.h"
#include "app/sequences.h"
#include "data/token_file.h"
#include "models/gpt.h"
#include "optim/lr_schedule.h"
#include "optim/optimizer.h"
#include "parallel/comm/communicator.h"
#include "parallel/data_strategy.h"

namespace tessera {

GptConfig gpt_config(const TrainOptions& options, int64_t tokenizer_vocab);

class Trainer {
 public:
  // Makes the model with its first weights. Every rank of `world` makes one; `options` and `world` must outlive it.
  Trainer(const TrainOptions& options, Sequences sequences, Communicator& world);
  ~Trainer();

  // One update. Throws Error (not_finite) on every rank when the loss or the gradient norm is not a number, before
  // anything is updated. `stop` tells a rank's wish to end the run to all others: see StepReport::stop.
  StepReport step(bool stop = false);
  // The two halves of step(), for those who want to see the gradients in between: they are in strategy().shards().
  StepReport compute_gradients(bool stop);
  void update(const StepReport& report);

  // The mean loss over a whole split, in windows of the context; the same on every rank.
  double mean_loss(const TokenFile& split);

  int64_t steps_done() const { return optimizer_->steps(); }
  void set_steps_done(int64_t steps) { optimizer_->set_steps(steps); }
  Gpt& model() { return model_; }
  Optimizer& optimizer() { return *optimizer_; }
  DataStrategy& strategy() { return *strategy_; }
  const DataStrategy& strategy() const { return *strategy_; }
  Communicator& world() { return world_; }
  Communicator& data_axis() { return *data_axis_; }
  const ArenaPtr& arena() const { return arena_; }
  int64_t tokens_per_step() const { return options_.batch * model_.config.context; }

 private:
  double forward_backward(int64_t microbatch);  // the sum of the losses of its tokens
  double sum_of_squares();

  const TrainOptions& options_;
  Sequences sequences_;
  Communicator& world_;
  std::unique_ptr<Communicator> data_axis_;
  ArenaPtr arena_;
  Gpt model_;
  std::unique_ptr<DataStrategy> strategy_;
  std::unique_ptr<Optimizer> optimizer_;
  LrSchedule schedule_;
};

// Of training: 6 per weight in a product and 12 L C T of attention.
double flops_per_token(Gpt& model);
// The best rate, in FLOP/s, of a few matrix products of 1024^3: what the model's use of the machine is measured
// against.
double measured_peak_flops(DType dtype, const ArenaPtr& arena);

}  // namespace tessera
