// The numbers of one training step in a GPU's memory, where its kernels read and write them: the host hears of a step
// when it is over, and what was queued for one step can be queued again for the next, with other numbers.
//
//   set(...); fetch(); ... the passes, whose dropout reads step() ... close(parts(...)); the update reads update();
//   give_back(); one wait; found()
//
// All but set() and found() are queued on the arena's stream. Several ranks add their parts up before they close the
// step: then all have the same numbers, and come to the same decision.
#pragma once

#include "optim/optimizer.h"
#include "tensor/tensor.h"

namespace tessera::cuda {

class StepState {
 public:
  struct Numbers {
    uint64_t step = 0;                   // that dropout counts by
    UpdateNumbers update;                // from the host, but for what close() finds: grad_scale and skip
    double loss_sum = 0, grad_norm = 0;  // from close()
  };
  explicit StepState(const ArenaPtr& arena);

  const uint64_t* step() const;
  const UpdateNumbers* update() const;

  // Sets the numbers that the next fetch() brings to the GPU. Whatever was queued before must have been waited for.
  void set(uint64_t step, const UpdateNumbers& update);
  void fetch() const;
  // The numbers that this rank says of the step, float64 (2 + units): the loss, float64 (); 1 where a kernel has noted
  // an index outside its bounds; the sum of squares of each unit's gradients, float64 (units). The numbers that another
  // rank says are zero here.
  struct Says {
    bool loss = true, squares = true;
  };
  Tensor parts(const Tensor& loss_sum, const Tensor& squares, const Says& says) const;
  // The norm of the gradients from the units' sums of squares, which are added in order; the clip factor that follows
  // (max_norm 0: none). Nothing is to be updated where loss or norm is not finite, or an index was outside.
  void close(const Tensor& parts, double max_norm) const;
  void give_back() const;
  // After the wait.
  const Numbers& found() const { return host_.get()[1]; }

 private:
  Numbers* there() const { return reinterpret_cast<Numbers*>(there_.address()); }
  Tensor there_;
  std::shared_ptr<Numbers> host_;  // pinned: on the way there, and what came back
};

}  // namespace tessera::cuda
