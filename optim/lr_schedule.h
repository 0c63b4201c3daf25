// The learning rate of a step: linear warm-up, then half a cosine down to min_lr (Loshchilov and Hutter, "SGDR", ICLR
// 2017, without restarts), in the form that nanoGPT uses.
#pragma once
#include <cmath>
#include <cstdint>
#include <numbers>

namespace tessera {

struct LrSchedule {
  double lr = 1e-3;
  double min_lr = 1e-3;  // equal to lr: constant after the warm-up
  int64_t warmup = 0;    // steps
  int64_t steps = 0;     // the step at which min_lr is reached, and kept

  // The rate of step 0, 1, ...: lr (step + 1) / (warmup + 1) during the warm-up.
  double at(int64_t step) const {
    if (step < warmup) return lr * (static_cast<double>(step) + 1) / (static_cast<double>(warmup) + 1);
    if (min_lr == lr) return lr;
    if (step >= steps) return min_lr;
    const double done = static_cast<double>(step - warmup) / static_cast<double>(steps - warmup);
    return min_lr + 0.5 * (1 + std::cos(std::numbers::pi * done)) * (lr - min_lr);
  }
};

}  // namespace tessera
