// Pipeline schedules from a file: an accepted schedule round-trips, runs to completion, and remains valid after every
// applicable pass.

#include "parallel/pipeline/simulate.h"
#include "parallel/pipeline/validate.h"
#include "tests/fuzz/target.h"

namespace tessera::fuzz {
const Target target("schedule", [](std::string_view bytes) {
  const Schedule schedule = parse_schedule(bytes, kWhat);
  require(parse_schedule(to_text(schedule), kWhat) == schedule, "a schedule that was written is read back");
  const Simulation sim = simulate(schedule);
  require(sim.makespan >= 3.0 * schedule.microbatches, "every micro-batch goes forward and back");
  require(sim.bubble_share() >= 0 && sim.bubble_share() < 1, "somebody works");
  require(!draw(sim, 0, 40).empty(), "there is a picture");
  require(!find_fault(split_backward(schedule)), "splitting keeps a schedule right");
  require(has_messages(schedule) || !find_fault(insert_messages(schedule)), "messages keep a schedule right");
});

}  // namespace tessera::fuzz
