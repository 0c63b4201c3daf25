// The report of a training step, and requests of ranks that accompany it.
#pragma once
#include <cstdint>
#include <string>

namespace tessera {

// A rank's request to all ranks: save a checkpoint after the step, or end the run.
enum class StepRequest : uint8_t { none, save, stop };
// Requests are summed over ranks; the sum decodes to the strongest.
inline double encode(StepRequest request) {
  return request == StepRequest::stop ? 1 << 20 : request == StepRequest::save ? 1 : 0;
}
inline StepRequest decode(double votes) {
  return votes >= encode(StepRequest::stop) ? StepRequest::stop : votes > 0 ? StepRequest::save : StepRequest::none;
}

struct StepReport {
  int64_t step = 0;  // completed steps
  double loss = 0, lr = 0, grad_norm = 0, tokens_per_s = 0, step_ms = 0;
  StepRequest request = StepRequest::none;  // strongest request of any rank
};

void set_time(StepReport& report, double seconds, int64_t tokens);

// For display; drops the sign of NaN.
std::string number_text(double number);

// Throws Error (not_finite) naming `step` if its loss or gradient norm is not finite.
void check_finite(const StepReport& report, int64_t step);

}  // namespace tessera
