// The tokens of a step on their way from the data set to where a rank computes.
//
// For a rank on a GPU they lie in pinned memory, one place for each micro-batch, from which the GPU copies them when it
// comes to them: nothing waits, and a step that was captured finds there the tokens of the step that it is replayed
// for.
#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "models/stages.h"
#include "parallel/data_strategy.h"
#include "train/job.h"
#include "train/sequences.h"

namespace tessera {

class StepTokens {
 public:
  // `positions`: the columns of every sequence that this rank has; empty: all `context`. `strategy` must outlive it.
  StepTokens(const Job& job, Sequences sequences, int64_t context, std::vector<int64_t> positions,
             const DataStrategy& strategy, ArenaPtr arena);

  // From now on load() is about this step, and so is what was queued and is launched again. All copies of the step
  // before must be done.
  void begin(int64_t step);
  // Reads the tokens of a step that may come next, so that a GPU need not wait for that; what it was asked for lies
  // still where it was.
  void ahead(int64_t step);
  // int32 (B, T) of a micro-batch, those that are asked for; meta tensors where this rank loads none. Queued on a GPU.
  Microbatch load(int64_t microbatch, bool ids, bool targets);
  // This rank's columns of (B, context) in the host's memory, where it computes. Waits on a GPU.
  Tensor own(const Tensor& whole) const;

 private:
  // A micro-batch in pinned memory: ids, then targets.
  struct Place {
    std::shared_ptr<std::byte> memory;
    Tensor like;        // meta, int32 (B, T)
    int64_t step = -1;  // of the tokens that are there
  };
  Microbatch read(int64_t step, int64_t microbatch) const;
  Tensor own_columns(const Tensor& whole) const;
  void fill(Place& place, const Microbatch& tokens) const;

  int64_t batch_, microbatches_;
  Sequences sequences_;
  int64_t context_;
  std::vector<int64_t> positions_;
  const DataStrategy& strategy_;
  ArenaPtr arena_;
  int64_t step_ = 0;
  std::vector<Place> places_;
  std::vector<Microbatch> ahead_;  // by micro-batch, in the host's memory
  int64_t ahead_step_ = -1;
};

}  // namespace tessera
