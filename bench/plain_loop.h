// Training as one would write it with no word of ranks: what the trainer on one rank is measured against.
#pragma once
#include <memory>

#include "train/job.h"
#include "train/sequences.h"

namespace tessera::bench {

class PlainLoop {
 public:
  PlainLoop(const Job& job, Sequences sequences);
  void step();
  int64_t peak() const { return arena_->total().peak; }

 private:
  Optimisation optim_;
  Sequences sequences_;
  ArenaPtr arena_ = make_arena();
  std::unique_ptr<LanguageModel> model_;
  std::unique_ptr<Optimizer> optimizer_;
};

}  // namespace tessera::bench
