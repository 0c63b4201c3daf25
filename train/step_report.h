// What a training step tells.
#pragma once
#include <cstdint>
#include <string>

namespace tessera {

// What a rank asks all others for with a step: to save after it, or to end the run.
enum class Wish : uint8_t { none, save, stop };
// Ranks add up their votes, and the sum says what the most demanding of them wants.
inline double vote_for(Wish wish) { return wish == Wish::stop ? 1 << 20 : wish == Wish::save ? 1 : 0; }
inline Wish wish_of(double votes) {
  return votes >= vote_for(Wish::stop) ? Wish::stop : votes > 0 ? Wish::save : Wish::none;
}

struct StepReport {
  int64_t step = 0;  // steps done
  double loss = 0, lr = 0, grad_norm = 0, tokens_per_s = 0, step_ms = 0;
  Wish wish = Wish::none;  // of the ranks, the same on all
};

// Of a step of so many tokens that took so long.
void set_time(StepReport& report, double seconds, int64_t tokens);

// As it is shown: a NaN has a sign, which nobody wants to read.
std::string number_text(double number);

// Throws Error (not_finite) naming `step` when its loss or its gradient norm is not a number.
void check_finite(const StepReport& report, int64_t step);

}  // namespace tessera
