// Timing, and checks for non-finite results.
#include "train/step_report.h"

#include <fmt/format.h>

#include <cmath>
#include <cstdint>
#include <string>

#include "base/error.h"

namespace tessera {

std::string number_text(double v) { return std::isnan(v) ? "nan" : fmt::format("{}", v); }

void set_time(StepReport& r, double seconds, int64_t tokens) {
  r.step_ms = seconds * 1e3;
  r.tokens_per_s = static_cast<double>(tokens) / seconds;
}

void check_finite(const StepReport& r, int64_t step) {
  if (std::isfinite(r.loss) && std::isfinite(r.grad_norm)) return;
  throw Error(
      fmt::format("step {}: the loss is {} and the gradient norm {}; expected finite values (a smaller `lr` may help)",
                  step, number_text(r.loss), number_text(r.grad_norm)),
      Status::not_finite);
}

}  // namespace tessera
