// The numbers of one training step in a GPU's memory, where its kernels read and write them: the host hears of a step
// when it is over, and what was queued for one step can be queued again for the next, with other numbers.
//
//   set(...); fetch(); ... the passes, whose dropout reads step() ... close(...); the update reads update();
//   give_back(); one wait; found()
//
// All but set() and found() are queued on the arena's stream.
#pragma once
#include <cstdint>
#include <memory>
#include <span>

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

  // What the next fetch() brings to the GPU. Whatever was queued before must have been waited for.
  void set(uint64_t step, const UpdateNumbers& update);
  void fetch() const;
  // The loss (float64, ()) and the norm of the gradients, each tensor one unit, by the order of optim/grad_norm.h; the
  // clip factor that follows (max_norm 0: none). Nothing is to be updated where one of both is not finite, or where a
  // kernel has noted an index outside its bounds.
  void close(const Tensor& loss_sum, std::span<const Tensor> grads, double max_norm) const;
  void give_back() const;
  // After the wait.
  const Numbers& found() const { return host_.get()[1]; }

 private:
  Numbers* there() const { return reinterpret_cast<Numbers*>(there_.address()); }
  Tensor there_;
  std::shared_ptr<Numbers> host_;  // pinned: on the way there, and what came back
};

}  // namespace tessera::cuda
