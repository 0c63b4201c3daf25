// The log of one rank at the end of a run with --trace, and how rank 0 gathers the logs of all ranks.
#pragma once
#include "app/train/train.h"

namespace tessera {

struct RankLog {
  std::string host;
  double origin = 0;       // zero of the trace's times, on the host's clock
  double meeting = 0;      // the host's clock when all ranks met at the end
  std::vector<int> cores;  // that the rank may run on
  int threads = 1;
  std::array<int64_t, kCategories> peaks = {};  // most bytes of each category at one time
  std::vector<TraceEvent> events;
  std::vector<TraceStep> steps;
  std::vector<TraceMemory> memory;
};

// Describes the machine and the memory of this rank; the trace's part of the log is empty.
RankLog describe_rank(const Arena& arena);

// All ranks' logs on rank 0, nothing elsewhere. Every rank calls it; they meet in it.
std::vector<RankLog> gather_logs(Communicator& world, RankLog own);

// Offsets of the ranks' trace times: with them added, all times lie on one clock that begins with the first thing
// noted. Ranks of one host share a clock; where there are several hosts, they are taken to have met at one time.
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
Processors processor_names(const std::vector<RankLog>& logs);

// `train --trace`: each rank keeps a log of its last steps, and at the end rank 0 makes two files of all of them.
//
//   trace.json     the timeline, for ui.perfetto.dev (app/trace/timeline.h)
//   report.json    what `tessera report` needs beside it: model, plan and schedule, bytes by axis and operation, peaks

// "rank 3 (pp 1, dp 0, tp 1)": axes of one rank are left out.
std::string name_of_rank(const std::vector<MeshAxis>& axes, const std::vector<int>& at, int64_t rank);

class RunTrace {
 public:
  // Traces this rank; keeps nothing, and get() is null, where the options do not say --trace. Must outlive the trainer.
  RunTrace(const TrainOptions& options, Communicator& world);
  ~RunTrace();
  RunTrace(const RunTrace&) = delete;
  RunTrace& operator=(const RunTrace&) = delete;

  Trace* get() { return trace_ ? &*trace_ : nullptr; }
  // The log ends here: what ranks tell each other about the run is not part of it.
  void stop(Trainer& trainer);
  // After stop(). Every rank calls it, rank 0 writes. Returns whether there was anything to write. Throws OutputError.
  bool write(const Run& run, Trainer& trainer, const RunUsage& usage);

 private:
  Communicator& world_;
  std::optional<Trace> trace_;
  RankLog log_;
};

}  // namespace tessera
