// DiLoCo (Douillard et al. 2023, arXiv 2311.08105), and local SGD (Stich 2018, "Local SGD converges fast and
// communicates little"): ranks train copies of the model alone, and compare them only every H steps.
//
//   step          1     2   ...   H                        H+1
//   rank 0   |  inner inner ... inner  --+             +-- inner ...
//   rank 1   |  inner inner ... inner  --+-- outer ----+-- inner ...       outer: all-reduce of (common - own), then
//   rank 2   |  inner inner ... inner  --+             +-- inner ...       one step from `common` along its mean
//
//   delta = mean over ranks of (common - own)         momentum = mu momentum + delta
//   common = common - outer_lr (delta + mu momentum)  own = common     (Nesterov; Sutskever et al. 2013)
//
// In P fragments (Streaming DiLoCo, Douillard et al. 2025, arXiv 2501.18512, strided) each makes its outer steps in
// steps of its own, H apart (SyncSteps), so that about a P-th is sent at once. Here H = 4, P = 2:
//
//   step          1     2     3     4     5     6     7     8 (the last)
//   fragment 0                      o                       o
//   fragment 1          o                       o           o
//
// placements     parameters, gradients and the optimizer's state of each rank are its own; common and momentum are I
// memory/rank    DDP's, and 8 bytes per parameter: common and momentum in fp32 (4 where mu is 0)
// volume/rank    2 (n - 1) / n of the parameters, every H steps, in the dtype of gradients
//
// `own` is what the optimizer updates: the fp32 masters of bfloat16. Differences are made in fp32 (fp64 of fp64), and
// rounded once to the dtype of gradients, in whose memory they are summed. A rank's gradient is n times its part of the
// global batch's: the mean over its own sequences. Its norm, by which it is clipped, is its own too. With H = 1, SGD
// inside, and outside a rate of 1 without momentum, this is DDP but for rounding; with any H it is then local SGD.
// Beside context ranks a rank here is a group of them: they sum gradients in every step, and each makes outer steps
// with those that have its place in the other groups.
#pragma once
#include "parallel/data_strategy.h"

namespace tessera {

class Diloco final : public DataStrategy {
 public:
  Diloco(Module& model, Communicator& axis, const ArenaPtr& arena, const DataOptions& options);

  void begin_step() override;
  void finish_gradients() override;
  void share_parameters() override;

 private:
  struct Part {  // a unit that is trained; momentum is undefined where its factor is 0
    Tensor values, common, momentum;
    int64_t fragment = 0;
  };
  void outer_step(int64_t fragment);
  // The values of parts_[i], as the optimizer has them.
  Tensor own(size_t i) const { return masters_.empty() ? parts_[i].values : masters_[i]; }

  Tensor grads_;  // all of them
  std::vector<Part> parts_;
};

}  // namespace tessera
