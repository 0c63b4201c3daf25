// A model that only computes, opened for a plan: what `generate` and `evaluate` share.
#pragma once
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "app/options.h"
#include "app/run/pretrained.h"
#include "data/examples.h"
#include "data/tokenizer.h"
#include "parallel/comm/communicator.h"
#include "train/job.h"
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

// A model's prompts as turns of a conversation, or each by itself.
class Conversation {
 public:
  // `vocab` is the model's table. Throws Error (usage) for options that do not go together, and
  // as ask() does.
  Conversation(const GenerateOptions& o, const Tokenizer& tokenizer, int64_t vocab);

  bool has_template() const { return how_.style != ChatTemplate::none; }
  // The tokens that the model reads when it is asked this after all that was said. Throws as ask() does.
  Asked asked(const std::string& prompt) const;
  void add(const std::string& prompt, const std::string& answer);

 private:
  const Tokenizer& tokenizer_;
  ExampleOptions how_;
  std::vector<Message> turns_;
};
// The next line of standard input that is not empty, the same on every rank; nothing at its end.
std::optional<std::string> next_line(Communicator& world);

}  // namespace tessera
