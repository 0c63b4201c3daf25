// A pretrained model to run, for `generate`, `evaluate` and `checkpoint quantize`.
#pragma once
#include <memory>
#include <string>

#include "app/options.h"
#include "app/pretrained.h"
#include "train/trainer.h"

namespace tessera {

struct Inference {
  Pretrained from;
  TrainCommand run;  // the equivalent configuration
  std::unique_ptr<Tokenizer> tokenizer;
};

// `args` are options of a run; without rank options there is one rank. Prints notes on standard error. Throws Error
// (usage), InputError, and Error if memory is insufficient.
Inference open_inference(const std::string& from, const Args& args);

// This rank's shard of the model. `inference` must outlive the trainer.
std::unique_ptr<Trainer> inference_trainer(const Inference& inference, Communicator& world);

}  // namespace tessera
