// What a training step tells.
#pragma once
#include <cstdint>

namespace tessera {

struct StepReport {
  int64_t step = 0;  // steps done
  double loss = 0, lr = 0, grad_norm = 0, tokens_per_s = 0, step_ms = 0;
  bool stop = false;  // a rank has asked to end the run after this step
};

// Of a step of so many tokens that took so long.
void set_time(StepReport& report, double seconds, int64_t tokens);

// Throws Error (not_finite) naming `step` when its loss or its gradient norm is not a number.
void check_finite(const StepReport& report, int64_t step);

}  // namespace tessera
