// One training run on one rank: the model, its optimizer and its place in the data.
#pragma once
#include <memory>

#include "app/options.h"
#include "app/progress.h"
#include "data/dataset.h"
#include "data/loader.h"
#include "models/gpt.h"
#include "optim/lr_schedule.h"
#include "optim/optimizer.h"
#include "tensor/cpu/vectorize.h"

namespace tessera {

GptConfig gpt_config(const TrainOptions& options, int64_t tokenizer_vocab);
DType dtype_of(const TrainOptions& options);

class Trainer {
 public:
  // Makes the model with its first weights. Keeps references to both arguments.
  Trainer(const TrainOptions& options, const Dataset& dataset);

  // One update. Throws Error (not_finite) when the loss or the gradient norm is not a number, before anything is
  // updated.
  StepReport step();
  struct Validation {
    double loss = 0, bits_per_byte = 0;
  };
  // Over the whole validation split, in windows of the context.
  Validation validate();

  int64_t steps_done() const { return optimizer_->steps(); }
  Gpt& model() { return model_; }
  Optimizer& optimizer() { return *optimizer_; }
  const ArenaPtr& arena() const { return arena_; }
  int64_t tokens_per_step() const { return options_.batch * model_.config.context; }
  double flops_per_token();  // of training: 6 per weight in a product and 12 L C T of attention

 private:
  double forward_backward(int64_t microbatch);  // the sum of the losses of its tokens

  const TrainOptions& options_;
  const Dataset& dataset_;
  ArenaPtr arena_;
  Gpt model_;
  std::unique_ptr<Optimizer> optimizer_;
  Loader loader_;
  LrSchedule schedule_;
  Tensor inputs_, targets_;  // of one micro-batch
};

// The best rate, in FLOP/s, of a few matrix products of 1024^3: what the model's use of the machine is measured
// against.
double measured_peak_flops(DType dtype, const ArenaPtr& arena);

}  // namespace tessera
