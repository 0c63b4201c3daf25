// Linear warm-up, then half a cosine period down to min_lr (Loshchilov and Hutter, "SGDR", ICLR 2017, without
// restarts), as in nanoGPT.
#pragma once
#include <cmath>
#include <cstdint>
#include <numbers>

namespace tessera {

struct LrSchedule {
  double lr = 1e-3;
  double min_lr = 1e-3;  // equal to lr: constant after warm-up
  int64_t warmup = 0;    // steps
  int64_t steps = 0;     // min_lr from this step on

  // lr (step + 1) / (warmup + 1) during warm-up.
  double at(int64_t step) const {
    if (step < warmup) return lr * (static_cast<double>(step) + 1) / (static_cast<double>(warmup) + 1);
    if (min_lr == lr) return lr;
    if (step >= steps) return min_lr;
    const double done = static_cast<double>(step - warmup) / static_cast<double>(steps - warmup);
    return min_lr + 0.5 * (1 + std::cos(std::numbers::pi * done)) * (lr - min_lr);
  }
};

}  // namespace tessera
