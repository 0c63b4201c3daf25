// Reports of training steps, the ranks' agreement about a step, and its tokens.
#pragma once
#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "models/layout.h"
#include "parallel/comm/communicator.h"
#include "parallel/data_strategy.h"
#include "train/job.h"
#include "train/sequences.h"

namespace tessera {

// Requests that a rank makes of all others with a step: to save after it, or to end the run.
enum class Wish : uint8_t { none, save, stop };
// Ranks add up their votes, and the sum says what the most demanding of them wants.
inline double vote_for(Wish wish) { return wish == Wish::stop ? 1 << 20 : wish == Wish::save ? 1 : 0; }
inline Wish wish_of(double votes) {
  return votes >= vote_for(Wish::stop) ? Wish::stop : votes > 0 ? Wish::save : Wish::none;
}

struct StepReport {
  int64_t step = 0;  // steps done
  double loss = 0, lr = 0, grad_norm = 0, tokens_per_s = 0, step_ms = 0;
  Wish wish = Wish::none;  // the ranks' wish, the same on all
};

// Sets the time of a step of `tokens` tokens that took `seconds`, and their speed.
void set_time(StepReport& report, double seconds, int64_t tokens);

// As it is shown: a NaN has a sign, which nobody wants to read.
std::string number_text(double number);

// Throws Error (not_finite) naming `step` when its loss or its gradient norm is not a number.
void check_finite(const StepReport& report, int64_t step);

// The ranks' work together on a step that the host only begins and ends (train/step_graph.h).
//
// Before it they meet on the host, once, and agree on how all of them make it: a rank whose arena has another layout
// than its graph would queue what the others launch, and NCCL may want all of them when it is captured. On the GPU they
// add up what each has found. Who waits for the end looks after the others, and ends NCCL's kernels where one has
// failed.

class StepRanks {
 public:
  enum class How : uint8_t { queue, capture, launch };
  struct Agreed {
    How how = How::queue;
    Wish wish = Wish::none;  // the wish of all ranks
  };

  // Every communicator that this rank uses in a step, once; they must outlive it.
  StepRanks(Communicator& world, std::vector<Communicator*> all);

  // Launched where every rank has a graph that fits, captured where every rank could do one or the other.
  Agreed agree(Wish wish, bool can_launch, bool can_capture);
  // The way that a rank would choose on its own.
  static How choose(bool can_launch, bool can_capture);
  // Queues the sum over ranks, in place.
  void add_up(const Tensor& numbers) { world_.all_reduce(numbers); }
  void wait(Arena& gpu) { world_.wait_for_gpu(gpu, "step"); }

  // Between these two a step is captured, whose communications are counted as they are called; a launch without calls
  // counts them again.
  void begin_capture();
  void end_capture();
  void count_again();

 private:
  Communicator& world_;
  std::vector<Communicator*> all_;
  std::vector<OpCounts> of_step_;  // while it is captured: the counts at its beginning
};

// The tokens of a step on their way from the data set to where a rank computes, and where their documents begin.
//
// For a rank on a GPU they lie in pinned memory, one place for each micro-batch, from which the GPU copies them when it
// comes to them: nothing waits, and a step that was captured finds there the tokens of the step that it is replayed
// for.

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
  // Documents of a micro-batch of whole sequences, for the parts of them that are here; undefined where the job does
  // not mask documents. Queued on a GPU; reads the sequences on any rank, also on one that loads no ids.
  Documents documents(int64_t microbatch);
  // Documents of ids (B, context) in the host's memory, or by `starts` where that is defined. Waits on a GPU.
  Documents documents(const Tensor& whole, const Tensor& starts) const;
  // The number of trained targets in the whole batch of the step.
  double targets() const { return targets_; }
  // Whether each step has another number of them.
  bool counts_targets() const { return sequences_.trained != nullptr; }
  // This rank's columns of (B, context) in the host's memory, where it computes. Waits on a GPU.
  Tensor own(const Tensor& whole) const;

 private:
  // Parts of a micro-batch: ids, targets, and where documents are masked their starts and positions.
  using Parts = std::array<Tensor, 4>;
  // They lie one after another in pinned memory.
  struct Place {
    std::shared_ptr<std::byte> memory;
    Parts like;         // meta, int32 (B, T)
    int64_t step = -1;  // the step of the tokens that are there
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
