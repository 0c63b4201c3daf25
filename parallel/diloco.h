// DiLoCo (Douillard et al. 2023, arXiv 2311.08105), and local SGD (Stich 2018, "Local SGD converges fast and
// communicates little"): ranks train copies of the model alone, and compare them only every H steps.
//
//   step          1     2   ...   H                        H+1
//   rank 0   |  inner inner ... inner  --+             +-- inner ...
//   rank 1   |  inner inner ... inner  --+-- outer ----+-- inner ...       outer: all-reduce of (common - own), then
//   one rank 2   |  inner inner ... inner  --+             +-- inner ...       step from `common` along its mean
//
//   delta = mean over ranks of (common - values)      momentum = mu momentum + delta
//   common = common - outer_lr (delta + mu momentum)  values = common                   (Nesterov; Sutskever et al.
//   2013)
//
// placements     parameters, gradients and the optimizer's state of each rank are its own; common and momentum are I
// memory/rank    DDP's, and 8 bytes per parameter: common and momentum (4 where mu is 0)
// volume/rank    2 (n - 1) / n of the parameters, every H steps
//
// A rank's gradient is n times its part of the global batch's: the mean over its own sequences. Its norm, by which it
// is clipped, is its own too. With H = 1, SGD inside, and outside a rate of 1 without momentum, this is DDP but for
// rounding; with any H it is then local SGD. Differences are made and sent in the dtype of the parameters.
#pragma once
#include "parallel/data_strategy.h"

namespace tessera {

class Diloco final : public DataStrategy {
 public:
  // Throws FieldError for parameters of bfloat16, whose masters the optimizer has, and for gradients of another dtype.
  Diloco(Module& model, Communicator& axis, const ArenaPtr& arena, const DataOptions& options);

  void begin_step() override;
  void finish_gradients() override;
  void share_parameters() override;

 private:
  void outer_step();
  Stretch all_;
  Tensor common_, momentum_;  // momentum_ is undefined where its factor is 0
};

}  // namespace tessera
