// Batches: the sequences of a training step and their transfer to the device.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "data/dataset.h"
#include "models/stages.h"
#include "train/step.h"

namespace tessera {

struct Sequences {
  int64_t vocab = 0;
  // Loads sequences [first, first + count) of a step: `inputs` and next-token `targets`, (count, context). A target may
  // be Rows::kIgnored only if `trained` is set.
  std::function<void(int64_t step, int64_t first, int64_t count, int32_t* inputs, int32_t* targets)> load;
  std::optional<int32_t> document_end = {};  // end-of-document token, if any
  // Trained targets in a step's global batch, the same on every rank. Unset: all.
  std::function<int64_t(int64_t step)> trained = {};
  // Document starts, for sequences without an end-of-document token: (count, context), the first position of each
  // token's document.
  std::function<void(int64_t step, int64_t first, int64_t count, int32_t* starts)> starts = {};
  // Tokens of a sequence before its padding (Rows::length()). Unset: no padding.
  std::function<int64_t(int64_t step, int64_t sequence)> length = {};
  int64_t tokens_per_step = 0;  // average without padding; 0: every sequence fills the context

  // Lengths of sequences [first, first + count) of a step; empty if none is padded.
  std::vector<int64_t> lengths(int64_t step, int64_t first, int64_t count) const;
};

// Tokens of a step without padding; an average if padding varies.
int64_t tokens_per_step(const TrainConfig& job, const Sequences& sequences);

// Tokens computed per sequence in a pass over sequences of these lengths: the maximum, rounded up to a multiple of
// kTokensTogether and of the number of cp and sp partitions, at most the context; the context if `lengths` is empty.
inline constexpr int64_t kTokensTogether = 64;
int64_t padded_tokens(const TrainConfig& job, std::span<const int64_t> lengths);
// Document starts of these tokens, int32 (B, T) in host memory: `starts` (B, context) if defined, otherwise 0;
// Documents::kPadding after each sequence. Returns `starts` if `lengths` is empty.
Tensor padded_starts(const Tensor& starts, std::span<const int64_t> lengths, int64_t tokens, const ArenaPtr& host);

// Throws FieldError if `sequences` has none.
int32_t document_end(const Sequences& sequences);

// Throws FieldError if the job masks documents without known boundaries, or if some targets are not trained under a
// plan without a global batch to average over.
void check_sequences(const TrainConfig& job, const Sequences& sequences);

// The divisor of a step's loss.
int64_t targets_of_step(const Sequences& sequences, int64_t step, int64_t all);

// Sequences of the training split; `dataset` must outlive the result. Examples, shards, mixtures and a shuffled single
// file are read in epochs: each row (data/examples.h, or TrainingWindows) once per epoch, in a new order
// (data/token_file.h). Otherwise Loader samples the start of each sequence. Throws InputError, and Error (usage) for
// short files.
Sequences make_sequences(const Dataset& dataset, int64_t context, int64_t batch, uint64_t seed, bool shuffle = false);

// Random tokens in [0, vocab), mostly predictable from the preceding token so that a model can learn. The RNG is
// counter-based: any rank can generate any sequence. Token 0 ends documents.
Sequences synthetic_sequences(int64_t vocab, int64_t context, int64_t batch, uint64_t seed);

// The tokens of a step and their document boundaries, on the device. On a GPU they are staged in pinned memory, one
// slot per micro-batch: copies are queued without blocking, and a replayed step graph reads the current step's tokens
// from the same addresses.

class StepTokens final : public BatchSource {
 public:
  // `positions`: columns of every sequence on this rank; empty: the full context. `job` and `strategy` must outlive
  // this object. Throws FieldError as check_sequences() does.
  StepTokens(const TrainConfig& job, Sequences sequences, std::vector<int64_t> positions, const DataStrategy& strategy,
             ArenaPtr arena);
  // Subsequently loaded micro-batches read their step number from this graph.
  void queue_for(const StepGraph& graph) { graph_ = &graph; }

  // Makes `step` current for load() and for replays of queued work. All copies of the previous step must have
  // completed.
  void begin(int64_t step);
  // Prefetches the tokens of a step; staged tokens stay valid.
  void ahead(int64_t step);
  // A micro-batch, int32 (B, T); `ids` or `targets` is a meta tensor if its flag is false. On a GPU, copies are queued.
  Microbatch load(int64_t microbatch, bool ids, bool targets) override;
  // Position of a micro-batch in the run, with this rank's documents if the job masks them; on a GPU, their copies are
  // queued. Reads the sequences even on ranks that load no ids.
  StepInfo where(int64_t microbatch) override;
  int64_t columns(int64_t microbatch) const override;
  // The same for validation sequences (B, T) in host memory; documents follow from `starts` (B, T) if defined,
  // otherwise from the ids. Synchronizes with the GPU.
  StepInfo where(const Tensor& full, const Tensor& starts) const;
  double targets() const { return targets_; }
  // Whether targets() differs between steps.
  bool counts_targets() const { return sequences_.trained != nullptr; }
  const Sequences& sequences() const { return sequences_; }
  // Tokens of the global batch without padding.
  int64_t tokens_of_step() const;
  // This rank's columns of (B, T) in host memory, copied to the device. Synchronizes with the GPU.
  Tensor own(const Tensor& full) const;

 private:
  // Ids and targets; starts and positions if documents are masked.
  using Arrays = std::array<Tensor, 4>;
  // Consecutive arrays in pinned memory.
  struct Place {
    std::shared_ptr<std::byte> memory;
    Arrays like;        // meta, int32 (B, T)
    int64_t step = -1;  // the step of the staged tokens
  };
  Arrays read(int64_t step, int64_t microbatch) const;
  Arrays arrays(int64_t microbatch, const std::array<bool, 4>& wanted);
  StepInfo place(int64_t tokens) const;
  // Lengths of this rank's sequences or (`moved`) of all that it exchanges.
  std::vector<int64_t> lengths(int64_t step, int64_t microbatch, bool moved) const;
  // This rank's columns of sequences of `tokens` tokens; empty: all.
  const std::vector<int64_t>& local_columns(int64_t tokens) const;
  Documents own_documents(const Tensor& full, const Tensor& starts) const;
  Tensor own_columns(const Tensor& full) const;
  void fill(Place& place, const Arrays& arrays) const;
  bool splits_tokens() const { return job_.plan.cp > 1 || job_.plan.sp; }

  const TrainConfig& job_;
  Sequences sequences_;
  std::vector<int64_t> positions_;
  mutable std::map<int64_t, std::vector<int64_t>> columns_;  // local_columns() by number of tokens
  const DataStrategy& strategy_;
  ArenaPtr arena_;
  const StepGraph* graph_ = nullptr;
  int64_t step_ = 0;
  double targets_ = 1;
  std::vector<Place> places_;
  std::vector<Arrays> ahead_;  // by micro-batch, in host memory
  int64_t ahead_step_ = -1;
};

// Converts `epochs`, `save_fraction` and `eval_fraction` to steps; Run expects steps. An epoch of a mixture has as many
// sequences as all its datasets together, and the weights determine how often each dataset is read (reported in the
// notes).
void resolve_epochs(TrainConfig& config, Dataset& dataset);

}  // namespace tessera
