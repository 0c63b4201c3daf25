// The tokens of a step on their way from the data set to where a rank computes, and where their documents begin.
//
// For a rank on a GPU they lie in pinned memory, one place for each micro-batch, from which the GPU copies them when it
// comes to them: nothing waits, and a step that was captured finds there the tokens of the step that it is replayed
// for.
#pragma once
#include <array>
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
  // Throws FieldError as check_sequences() does.
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
  // Of a micro-batch of whole sequences, for the parts of them that are here; undefined where the job does not mask
  // documents. Queued on a GPU; reads the sequences on any rank, also on one that loads no ids.
  Documents documents(int64_t microbatch);
  // Of ids (B, context) in the host's memory, or by `starts` where that is defined. Waits on a GPU.
  Documents documents(const Tensor& whole, const Tensor& starts) const;
  // Of the whole batch of the step: those that are trained.
  double targets() const { return targets_; }
  // Whether each step has another number of them.
  bool counts_targets() const { return sequences_.trained != nullptr; }
  // This rank's columns of (B, context) in the host's memory, where it computes. Waits on a GPU.
  Tensor own(const Tensor& whole) const;

 private:
  // Of a micro-batch: ids, targets, and where documents are masked their starts and positions.
  using Parts = std::array<Tensor, 4>;
  // They lie one after another in pinned memory.
  struct Place {
    std::shared_ptr<std::byte> memory;
    Parts like;         // meta, int32 (B, T)
    int64_t step = -1;  // of the tokens that are there
  };
  Parts read(int64_t step, int64_t microbatch) const;
  Parts parts(int64_t microbatch, const std::array<bool, 4>& wanted);
  Documents own_documents(const Tensor& whole, const Tensor& starts) const;
  Tensor own_columns(const Tensor& whole) const;
  void fill(Place& place, const Parts& parts) const;

  int64_t batch_, microbatches_;
  Sequences sequences_;
  int64_t context_;
  std::vector<int64_t> positions_;
  bool masks_documents_;
  bool all_queries_;  // attention has the queries of all tokens, not of those that are here
  const DataStrategy& strategy_;
  ArenaPtr arena_;
  int64_t step_ = 0;
  double targets_ = 1;
  std::vector<Place> places_;
  std::vector<Parts> ahead_;  // by micro-batch, in the host's memory
  int64_t ahead_step_ = -1;
};

}  // namespace tessera
