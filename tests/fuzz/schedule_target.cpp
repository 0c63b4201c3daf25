// Pipeline schedules from a file: an accepted schedule round-trips, runs to completion, and remains valid after every
// applicable pass.

#include <string_view>

#include "parallel/pipeline/simulate.h"
#include "parallel/pipeline/validate.h"
#include "tests/fuzz/target.h"

namespace tessera::fuzz {
const Target target("schedule", [](std::string_view bytes) {
  const Schedule schedule = parse_schedule(bytes, kWhat);
  require(parse_schedule(to_text(schedule), kWhat) == schedule, "a schedule round-trips");
  const Simulation sim = simulate(schedule);
  require(sim.makespan >= 3.0 * schedule.microbatches, "every micro-batch has a forward and a backward pass");
  require(sim.bubble_fraction() >= 0 && sim.bubble_fraction() < 1, "the bubble is below 1");
  require(!draw(sim, 0, 40).empty(), "a schedule has a diagram");
  require(!find_fault(split_backward(schedule)), "a schedule is valid after splitting");
  require(has_messages(schedule) || !find_fault(insert_messages(schedule)), "a schedule is valid with messages");
});

}  // namespace tessera::fuzz
