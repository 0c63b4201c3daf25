// Scalars of a training step in GPU memory, read and written by its kernels: the host waits only at the end of a step,
// and the operations queued for one step can be replayed for the next with different scalars.
//
//   set(...); fetch(); ... the passes, whose dropout reads step() ... close(contributions(...));
//   the update reads update(); copy_back(); one wait; found()
//
// All but set() and found() are queued on the arena's stream. Ranks all-reduce contributions() before close(), so they
// have the same scalars and make the same decision.
#pragma once
#include <cstdint>
#include <memory>

#include "optim/optimizer.h"
#include "tensor/tensor.h"

namespace tessera::cuda {

class StepState {
 public:
  struct Scalars {
    uint64_t step = 0;
    UpdateScalars update;                // from the host, except grad_scale and skip, set by close()
    double loss_sum = 0, grad_norm = 0;  // set by close()
  };
  explicit StepState(const ArenaPtr& arena);

  const uint64_t* step() const;
  const UpdateScalars* update() const;

  // Sets the scalars that the next fetch() copies to the GPU. Everything queued before must have completed.
  void set(uint64_t step, const UpdateScalars& update);
  void fetch() const;
  // This rank's contributions, float64 (2 + units): the loss (); 1 if a kernel found an index out of bounds; each
  // unit's sum of squared gradients (units). Values that other ranks contribute are zero.
  struct Contributes {
    bool loss = true, squares = true;
  };
  Tensor contributions(const Tensor& loss_sum, const Tensor& squares, const Contributes& contributes) const;
  // Computes the gradient norm and its clip factor (max_norm 0: no clipping). Skips the update if loss or norm is not
  // finite, or an index was out of bounds.
  void close(const Tensor& contributions, double max_norm) const;
  void copy_back() const;
  const Scalars& found() const { return host_.get()[1]; }

 private:
  Scalars* there() const { return reinterpret_cast<Scalars*>(there_.address()); }
  Tensor there_;
  std::shared_ptr<Scalars> host_;  // pinned: input and output
};

}  // namespace tessera::cuda
