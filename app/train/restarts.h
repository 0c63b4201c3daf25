// `train --restarts N`: a launcher that starts the run as a child program and restarts it from the newest complete
// checkpoint after a failure, at most N times.
//
//   tessera train --restarts 3 ...                                          ranks are threads of the started program
//   tessera train --restarts 3 --launch "mpirun -n {ranks}" --ranks 8 ...   processes of mpirun, or of srun in a job
//
// With the same number of ranks, the result is bitwise identical to an uninterrupted run. With --hostfile, which is
// read before each start, the data axis is limited by the available slots; each of its ranks then computes more
// micro-batches, so the batch size is unchanged, and the run continues as if resumed under another layout.
//
// Permanent failures are not retried: errors of the command line, of input files or of outputs, and a loss that is not
// finite.
#pragma once

#include "app/options.h"

namespace tessera {

// Runs the command line `args` with restarts. Returns the exit status of the last start, or 3 if it was killed.
int run_with_restarts(const TrainOptions& options, const std::vector<std::string>& args);

// The arguments of the started program: those of the launcher except its own options, and `more`.
std::vector<std::string> start_args(const std::vector<std::string>& args, const std::vector<std::string>& more);
// The plan on `slots` ranks: the largest data axis that fits, divides data ranks x micro-batches (whose product is
// constant), and is a multiple of the groups of shard ranks. Throws Error (communication) if even the smallest one does
// not fit.
Plan plan_on(Plan plan, int64_t slots);
// Whether a start that ended with this status may succeed if it is repeated.
bool is_retryable(int status);

// The step and time of a run's newest checkpoint; 0 if there is none.
struct SavedStep {
  int64_t step = 0;
  std::chrono::system_clock::time_point at{};
};
SavedStep newest_saved(const std::filesystem::path& run);

// Hostfiles in mpirun's format: one host per line, with its number of slots.
//
//   node1 slots=4    # Open MPI
//   node2:4          # MPICH
//   node3            # one

struct Host {
  std::string name;
  int64_t slots = 1;
};

// Throws InputError naming `what` and the line.
std::vector<Host> parse_hosts(std::string_view text, const std::string& what);
int64_t count_slots(const std::vector<Host>& hosts);

}  // namespace tessera
