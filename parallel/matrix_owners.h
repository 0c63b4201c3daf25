// Optimizers that update full matrices (optim/muon.h) with sharded matrices: one owner among the ranks that store a
// matrix's unit computes its update.
//
//   DDP                                        ZeRO, here a matrix sharded over three ranks, owned by rank 1
//     every rank has the reduced update          ranks 0, 2   ---- shards ---->   rank 1
//     the owner orthogonalizes it                rank 1       orthogonalizes the full matrix
//     broadcast from the owner                   ranks 0, 2   <--- shards -----   rank 1
//
// If a tensor axis also shards a matrix, the ranks at the owner's data coordinate gather it first, and each computes
// the full update (bitwise identical) and retains its shard. Each shard_ranks group has an owner; an expert's matrix is
// owned by one of the ranks that have this expert.
//
// Owners are balanced by size: the largest matrix first, each to the rank with the smallest load (Graham 1969, "Bounds
// on multiprocessing timing anomalies"); experts are balanced separately. Volume therefore differs between ranks. For a
// matrix of S bytes over n ranks, in addition to the strategy's traffic: DDP (n - 1) S in total, from the owner; ZeRO
// twice the bytes of the shards that the owner lacks; over a tensor axis of t ranks (t - 1) t times the largest shard.
// Liu et al. 2025, "Muon is scalable for LLM training", section 2.3, has the same volume.
#pragma once
#include <cstdint>
#include <span>
#include <vector>

#include "optim/optimizer.h"
#include "parallel/data_strategy.h"

namespace tessera {

std::vector<int> balanced_owners(std::span<const int64_t> sizes, int ranks);

class MatrixOwners {
 public:
  // Collective over the strategy's axes and tp, which must all outlive this object.
  MatrixOwners(const DataStrategy& strategy, Communicator& tp);

  // The optimizer's OptimizerOptions::orthogonalise. Collective.
  void make_updates(const std::vector<Tensor>& updates);
  decltype(OptimizerOptions::orthogonalise) hook() {
    return [this](const std::vector<FlatUnit>&, const std::vector<Tensor>& updates) { make_updates(updates); };
  }

 private:
  struct Matrix {
    size_t unit = 0;  // index among the trained units
    Slot slot;        // begin: in this rank's shard
    Communicator* axis = nullptr;
    int owner = 0;                       // rank in `axis`
    std::vector<ShardSpec> shards = {};  // per rank of tp
    int64_t largest = 0;                 // elements of the largest of these shards
  };
  void assign_owners(const Communicator& axis);
  void exchange_shards();
  Range stored(const Matrix& matrix, int rank) const;
  Tensor gathered(const Matrix& matrix, const Tensor& update);
  void update_full(const Matrix& matrix, const Tensor& here);

  Communicator& tp_;
  bool sharded_;                         // units are sharded over the axis
  bool independent_;                     // no other rank uses this rank's updates
  std::vector<int64_t> shard_elements_;  // of each unit
  std::vector<Matrix> matrices_;
};

}  // namespace tessera
