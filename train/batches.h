// Batches: where the sequences of a training step come from, and their way to where a rank computes.
#pragma once

#include <map>

#include "data/dataset.h"
#include "models/layout.h"
#include "train/step.h"

namespace tessera {

struct Sequences {
  int64_t vocab = 0;
  // Sequences [first, first + count) of a step: `inputs` and the tokens after them, `targets`, both (count, context).
  // A target may be Rows::kIgnored only where `trained` is there.
  std::function<void(int64_t step, int64_t first, int64_t count, int32_t* inputs, int32_t* targets)> load;
  std::optional<int32_t> document_end = {};  // the token that ends documents, where there is one
  // How many targets of a step's whole batch are trained, the same on every rank: the loss is their mean. Without it
  // all are.
  std::function<int64_t(int64_t step)> trained = {};
  // Beginnings of documents, for sequences that know them without such a token: for each token the place in its
  // sequence, (count, context).
  std::function<void(int64_t step, int64_t first, int64_t count, int32_t* starts)> starts = {};
  // Tokens of a sequence before its padding, as Rows::length() has them. Without it none is padded.
  std::function<int64_t(int64_t step, int64_t sequence)> length = {};
  int64_t tokens_per_step = 0;  // without padding, on average; 0: each sequence fills the context

  // Lengths of sequences [first, first + count) of a step; empty: none is padded.
  std::vector<int64_t> lengths(int64_t step, int64_t first, int64_t count) const;
};

// Tokens of each sequence that a pass computes, of sequences with these lengths: those of the longest, rounded up to a
// multiple of kTokensTogether and of what the ranks of cp and of sp share, at most the context; and the context where
// there are no lengths. So a function of the rows of a micro-batch and of the plan's cp, tp and sp alone.
inline constexpr int64_t kTokensTogether = 64;
int64_t padded_tokens(const Job& job, std::span<const int64_t> lengths);
// The starts of those tokens, int32 (B, T) in the host's memory: `starts` (B, context), where that is defined, else 0,
// and Documents::kPadding behind each sequence; without lengths `starts`.
Tensor padded_starts(const Tensor& starts, std::span<const int64_t> lengths, int64_t tokens, const ArenaPtr& host);

// That token, for a run that masks documents by it. Throws FieldError where there is none.
int32_t document_end(const Sequences& sequences);

// Whether the job can be trained on them. Throws FieldError: documents that are to be masked and cannot be told;
// targets that are not all trained, under a plan whose updates have no whole batch to take the mean over.
void check_sequences(const Job& job, const Sequences& sequences);

// The targets that the loss of a step is divided by.
int64_t targets_of_step(const Sequences& sequences, int64_t step, int64_t all);

// Sequences of the training split, which must outlive the result. Examples, shards and mixtures come in epochs, and so
// does a single file if it is to be shuffled: each row (data/examples.h, or TrainingWindows) once in an epoch, in an
// order of its own (data/token_file.h). Otherwise sequences of a file begin where Loader draws them. Throws InputError,
// Error (usage) for files that are too short.
Sequences make_sequences(const Dataset& dataset, int64_t context, int64_t batch, uint64_t seed, bool shuffle = false);

// Counted random tokens in [0, vocab), most of which follow from the one before, so that there is something to learn.
// Any rank can make any sequence, and no file is needed. Token 0 ends documents.
Sequences synthetic_sequences(int64_t vocab, int64_t context, int64_t batch, uint64_t seed);

// The tokens of a step on their way from the data set to where a rank computes, and where their documents begin.
//
// For a rank on a GPU they lie in pinned memory, one place for each micro-batch, from which the GPU copies them when it
// comes to them: nothing waits, and a step that was captured finds there the tokens of the step that it is replayed
// for.

class StepTokens final : public BatchSource {
 public:
  // `positions`: the columns of every sequence that this rank has; empty: all of the context. `job` and `strategy` must
  // outlive it. Throws FieldError as check_sequences() does.
  StepTokens(const Job& job, Sequences sequences, std::vector<int64_t> positions, const DataStrategy& strategy,
             ArenaPtr arena);
  // From now on micro-batches say where this graph finds the step's number.
  void queue_for(const StepGraph& graph) { graph_ = &graph; }

  // From now on load() is about this step, and so is what was queued and is launched again. All copies of the step
  // before must be done.
  void begin(int64_t step);
  // Reads the tokens of a step that may come next, so that a GPU need not wait for that; what it was asked for lies
  // still where it was.
  void ahead(int64_t step);
  // int32 (B, T) of a micro-batch, those that are asked for; meta tensors where this rank loads none. Queued on a GPU.
  Microbatch load(int64_t microbatch, bool ids, bool targets) override;
  // The place of a micro-batch, with its documents for the parts of them that are here, where the job masks documents.
  // Queued on a GPU; reads the sequences on any rank, also on one that loads no ids.
  StepInfo where(int64_t microbatch) override;
  int64_t columns(int64_t microbatch) const override;
  // The place of sequences (B, T) in the host's memory that are not trained on, with documents as in their ids or by
  // `starts` (B, T) where that is defined. Waits on a GPU.
  StepInfo where(const Tensor& whole, const Tensor& starts) const;
  // The number of trained targets in the whole batch of the step.
  double targets() const { return targets_; }
  // Whether each step has another number of them.
  bool counts_targets() const { return sequences_.trained != nullptr; }
  const Sequences& sequences() const { return sequences_; }
  // Tokens of the step's whole batch, without padding.
  int64_t tokens_of_step() const;
  // This rank's columns of (B, T) in the host's memory, where it computes. Waits on a GPU.
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
  StepInfo place(int64_t tokens) const;
  // Lengths of the sequences of a micro-batch that are computed here, or move together with them.
  std::vector<int64_t> lengths(int64_t step, int64_t microbatch, bool moved) const;
  // This rank's columns of sequences of `tokens` tokens; empty: all.
  const std::vector<int64_t>& terminal_width(int64_t tokens) const;
  Documents own_documents(const Tensor& whole, const Tensor& starts) const;
  Tensor own_columns(const Tensor& whole) const;
  void fill(Place& place, const Parts& parts) const;
  bool splits_tokens() const { return job_.plan.cp > 1 || job_.plan.sp; }

  const Job& job_;
  Sequences sequences_;
  std::vector<int64_t> positions_;
  mutable std::map<int64_t, std::vector<int64_t>> columns_;  // of shorter sequences
  const DataStrategy& strategy_;
  ArenaPtr arena_;
  const StepGraph* graph_ = nullptr;
  int64_t step_ = 0;
  double targets_ = 1;
  std::vector<Place> places_;
  std::vector<Parts> ahead_;  // by micro-batch, in the host's memory
  int64_t ahead_step_ = -1;
};

}  // namespace tessera
