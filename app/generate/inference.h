// A model that only computes, opened for a plan: what `generate` and `evaluate` share.
#pragma once
#include "app/run/pretrained.h"
#include "train/trainer.h"

namespace tessera {

struct Inference {
  Pretrained from;
  TrainOptions run;  // the options that say the same
  Job job;           // a model without gradients
  std::unique_ptr<Tokenizer> tokenizer;
};

// `words` are options of a run; without a word of ranks there is one. Says what was passed over on standard error.
// Throws Error (usage), InputError, and Error where memory does not suffice.
Inference open_inference(const std::string& from, const Words& words);

// This rank's part of it. The inference must outlive the result.
std::unique_ptr<Trainer> part_of(const Inference& inference, Communicator& world);

}  // namespace tessera
