// Updates that need whole matrices (optim/muon.h), of matrices that ranks share out: each has one owner among the ranks
// that keep its unit, which makes its update for all of them.
//
//   DDP                                        ZeRO, here a matrix whose shards are on three ranks, owned by rank 1
//     every rank has the update of its sums      ranks 0, 2   --- their parts --->   rank 1
//     the owner makes it orthogonal              rank 1       makes the whole orthogonal
//     broadcast from the owner                   ranks 0, 2   <-- their parts ----   rank 1
//
// Ranks of a tensor axis have parts of a matrix beside each other: those of the owner's place on the data axis gather
// it first, and each makes the whole (the same bits), of which it keeps its part. What all of them have whole (a
// router) they do not send. With groups of shard ranks there is an owner in each group. A matrix of an expert has its
// owner among the ranks that have this expert.
//
// Owners are balanced by size: the largest matrix first, each to the rank that has least so far (Graham 1969, "Bounds
// on multiprocessing timing anomalies"); those of experts by themselves. So bytes differ between ranks. Of a matrix of
// S bytes here and n ranks that share it out, beside what the strategy sends: DDP (n - 1) S in all, from the owner;
// ZeRO twice the bytes of shards that the owner has not; over a tensor axis of t ranks (t - 1) t times the largest
// part. (Rajbhandari et al. 2020 do not treat such optimizers; Liu et al. 2025, "Muon is scalable for LLM training",
// section 2.3, gather as much.)
#pragma once

#include "optim/optimizer.h"
#include "parallel/data_strategy.h"

namespace tessera {

// The rank of each of the matrices, of such sizes.
std::vector<int> balanced_owners(std::span<const int64_t> sizes, int ranks);

class MatrixOwners {
 public:
  // Shares out the matrices among the units of the strategy. Every rank of its axes and of tp makes one; the strategy
  // and tp must outlive it.
  MatrixOwners(const DataStrategy& strategy, Communicator& tp);

  // OptimizerOptions::orthogonalise of an optimizer over the strategy's shards. Every rank calls it.
  void make_updates(const std::vector<Tensor>& updates);
  decltype(OptimizerOptions::orthogonalise) hook() {
    return [this](const std::vector<FlatUnit>&, const std::vector<Tensor>& updates) { make_updates(updates); };
  }

 private:
  struct Matrix {
    size_t unit = 0;                    // among those that are trained
    Slot slot;                          // begin: in this rank's shard
    Communicator* axis = nullptr;       // the ranks that share it out
    int owner = 0;                      // number of the owner among them
    std::vector<ShardSpec> parts = {};  // parts of the ranks of tp
    int64_t largest = 0;                // elements of the largest of those parts
  };
  void share_out(const Communicator& axis);
  void find_parts();
  Range held(const Matrix& matrix, int rank) const;
  Tensor gathered(const Matrix& matrix, const Tensor& update);
  void make_whole(const Matrix& matrix, const Tensor& here);

  Communicator& tp_;
  bool cut_;                     // ranks that share out a unit have parts of it
  bool alone_;                   // this rank makes updates for nobody else
  std::vector<int64_t> pieces_;  // elements of each unit that a rank keeps
  std::vector<Matrix> matrices_;
};

}  // namespace tessera
