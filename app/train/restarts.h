// `train --restarts N`: a launcher that starts the run as a program of its own, and starts it again from the newest
// whole checkpoint when it fails, N times at most.
//
//   tessera train --restarts 3 ...                                          ranks are threads of the started program
//   tessera train --restarts 3 --launch "mpirun -n {ranks}" --ranks 8 ...   processes of mpirun, or of srun in a job
//
// With as many ranks the run ends with the bits of an undisturbed one. With --hostfile, which is read before each
// start, the data axis is as large as the hosts have room for; each of its ranks then computes more micro-batches, and
// the batch stays. From there on the run is one that was resumed under another layout.
//
// A failure that cannot get better is not started again: a command line, an input file, a loss, or an output that is
// wrong.
#pragma once

#include "app/options.h"

namespace tessera {

// Runs the command line `words`, with restarts. Returns the exit status of the last start; 3 where that was killed.
int run_with_restarts(const TrainOptions& options, const std::vector<std::string>& words);

// The words of the started program: those of the launcher without its own, and `more`.
std::vector<std::string> words_of_start(const std::vector<std::string>& words, const std::vector<std::string>& more);
// The plan on so many slots: its data axis shrinks to what fits, divides data ranks x micro-batches, which stay the
// same in all, and keeps groups of shard ranks whole. Throws Error (communication) where not even the least such axis
// fits.
Plan plan_on(Plan plan, int64_t slots);
// Whether a start that ended so may do better the next time.
bool is_worth_a_restart(int status);

// The steps of a run's newest checkpoint and when it was made; 0 where there is none.
struct SavedStep {
  int64_t step = 0;
  std::chrono::system_clock::time_point at{};
};
SavedStep newest_saved(const std::filesystem::path& run);

// A hostfile as mpirun reads it: a host on each line, with the number of ranks that it has room for.
//
//   node1 slots=4    # Open MPI
//   node2:4          # MPICH
//   node3            # one

struct Host {
  std::string name;
  int64_t slots = 1;
};

// Throws InputError that names `what` and the line.
std::vector<Host> parse_hosts(std::string_view text, const std::string& what);
int64_t count_slots(const std::vector<Host>& hosts);

}  // namespace tessera
