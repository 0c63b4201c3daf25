// Inputs of every rank for a collective that is graded, and results that typical mistakes would make of them.
#pragma once
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "lab/compare.h"
#include "models/decoder.h"
#include "train/batches.h"
#include "train/trainer.h"

namespace tessera::lab {

inline constexpr double kUntouched = -1000;  // the value that results are filled with before

// Each rank's array of `count` float32 numbers: small whole ones, or any.
struct Inputs {
  int ranks = 2;
  int64_t count = 1;
  bool whole_numbers = true;

  double at(int rank, int64_t i) const;
  Range range(int r) const { return piece(count, ranks, r); }
  std::vector<double> of(int rank, Range r) const;
  std::vector<double> of_piece(int rank, int p) const { return of(rank, range(p)); }
  std::string where(const char* operation, int rank) const;

  struct Result {
    std::vector<double> values;
    int64_t sent = 0;
    bool in_kept = true, within = true;  // its array is as it was; nothing lies behind its piece
  };
  // Results of body(world, whole, own) on each rank, and the bytes that each has sent by `op`: `whole` is the rank's
  // array, `own` room for its piece.
  using Body = std::function<Tensor(Communicator& world, Tensor whole, Tensor own)>;
  std::vector<Result> run(const Body& body, Op op, Algorithm algorithm) const;

  // Throws Wrong where a reduce-scatter has changed its input, or has written more than a piece.
  void expect_kept(const std::string& where, const Result& result) const;
  // Guesses at the sum of all ranks' piece `r`, on rank r.
  std::vector<Guess> guesses_of_sum(int r) const;
  // Throws Wrong where a piece is not that of its rank.
  void expect_gathered(const std::string& where, const std::vector<double>& found) const;
};

// Calls check() for arrays over 2, 3 and 5 ranks, of 1 to 1003 numbers: of whole ones first, whose sums have one value
// in any order.
void for_inputs(const std::function<void(const Inputs&)>& check);

// Gradients of each micro-batch of each data rank, computed by one rank without a strategy; and their sums in the
// orders of the strategies, and as typical mistakes would have them.

inline constexpr int64_t kSequences = 2;  // sequences of a micro-batch

struct DataCase {
  int ranks = 2;
  int64_t microbatches = 1;
  int zero = 0;
  int64_t bucket_bytes = int64_t{1} << 20;
  bool idle = false;  // the model has a parameter that is never used

  std::string where(int rank) const;
};

// A GPT; with `idle` a parameter more, declared last, that no gradient reaches.
std::unique_ptr<Decoder> small_model(const DataCase& c);
// Forward and backward of one micro-batch of one rank: its part of the gradient of the mean over the global batch.
void learn(Decoder& model, const DataCase& c, int rank, int64_t microbatch, const ArenaPtr& arena);

// Gradients of every parameter, in order.
using Gradients = std::vector<std::vector<float>>;
void add(Gradients& to, const Gradients& more);

struct MicroGradients {
  DataCase of;
  std::vector<std::string> names;
  std::vector<std::vector<float>> values;     // values of the parameters, before the update
  std::vector<std::vector<Gradients>> parts;  // [rank][micro-batch]

  // Each rank's micro-batches in order, then the ranks; or the ranks of each micro-batch, then the micro-batches.
  Gradients summed() const;
  Gradients of_rank(int r) const;            // the sum of its micro-batches
  Gradients of_microbatch(int64_t j) const;  // the sum over ranks
};
MicroGradients micro_gradients(const DataCase& c);

// A small model that graders train, under a plan and on one rank.

// Two layers, whose sizes two and three tensor ranks divide, 12 sequences in a step.
Job small_job(const Plan& plan);
// A job of one rank with the sequences of `job`, cut into as many micro-batches as all ranks together have.
Job one_rank(Job job);
// A Trainer on each rank.
void on_ranks_of(const Job& job, const std::function<void(Trainer& trainer, int rank)>& body);

}  // namespace tessera::lab
