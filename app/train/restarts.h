// `train --restarts N`: a launcher that starts the run as a child program and restarts it from the newest complete
// checkpoint after a failure, at most N times.
//
//   tessera train --restarts 3 ...                                          ranks are threads of the started program
//   tessera train --restarts 3 --launch "mpirun -n {ranks}" --ranks 8 ...   processes of mpirun, or of srun in a job
//
// With the same number of ranks, the result is bitwise identical to an uninterrupted run. --hostfile is read before
// each start: the available slots limit the data axis, whose ranks then compute more micro-batches, so the batch size
// is unchanged and the run continues as if resumed under another layout. Permanent failures are not retried: errors of
// the command line, input files or outputs, and a non-finite loss.
#pragma once
#include <chrono>
#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

#include "app/options.h"

namespace tessera {

// Returns the exit status of the last start, or 3 if it was killed.
int run_with_restarts(const TrainCommand& command, const std::vector<std::string>& args);

// The launcher's arguments without its own options, followed by `more`.
std::vector<std::string> start_args(const std::vector<std::string>& args, const std::vector<std::string>& more);
// The plan on `slots` ranks: the largest data axis that fits, divides data ranks x micro-batches (whose product is
// constant), and is a multiple of the ZeRO group size. Throws Error (communication) if none fits.
Plan plan_on(Plan plan, int64_t slots);
// Whether a repeated start may succeed after this exit status.
bool is_retryable(int status);

// The newest checkpoint; step 0 if there is none.
struct SavedStep {
  int64_t step = 0;
  std::chrono::system_clock::time_point at{};
};
SavedStep newest_saved(const std::filesystem::path& run);

// mpirun's format: one host per line with its number of slots.
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
