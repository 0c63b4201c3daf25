// What one rank has to say at the end of a run with --trace, and how rank 0 comes by what all of them have.
#pragma once
#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "parallel/comm/communicator.h"
#include "parallel/comm/trace.h"
#include "tensor/arena.h"

namespace tessera {

struct RankLog {
  std::string host;
  double origin = 0;       // of the trace's times, on the host's clock
  double meeting = 0;      // the host's clock when all ranks met at the end
  std::vector<int> cores;  // that the rank may run on
  int threads = 1;
  std::array<int64_t, kCategories> peaks = {};  // most bytes of each category at one time
  std::vector<TraceEvent> events;
  std::vector<TraceStep> steps;
  std::vector<TraceMemory> memory;
};

// What the rank knows of its machine and its memory; the trace's part is empty.
RankLog describe_rank(const Arena& arena);

// All ranks' logs on rank 0, nothing elsewhere. Every rank calls it; they meet in it.
std::vector<RankLog> gather_logs(Communicator& world, RankLog own);

// What to add to a rank's trace times so that all ranks' lie on one clock that begins with the first thing noted. Ranks
// of one host share a clock; where there are several hosts, they are taken to have met at one time.
struct Alignment {
  std::vector<double> add;  // for each rank
  std::string words;        // how, for people
};
Alignment align(const std::vector<RankLog>& logs);

// Cores of the host where ranks have the fewest for their threads, and whether those are fewer than the threads.
struct Processors {
  int64_t cores = 0, threads = 0;
  bool shared() const { return threads > cores; }
};
Processors processors_of(const std::vector<RankLog>& logs);

}  // namespace tessera
