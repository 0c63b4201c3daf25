// Logs of ranks, gathered on rank 0.
#pragma once
#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "app/train/output.h"

namespace tessera {

struct RankLog {
  std::string host;
  double origin = 0;      // start of the trace
  double clock_sync = 0;  // final barrier
  std::vector<int> cores;
  int threads = 1;
  std::array<int64_t, kCategories> peaks = {};
  std::vector<TraceEvent> events;
  std::vector<TraceStep> steps;
  std::vector<TraceMemory> memory;
};

// This rank's machine and memory, without events.
RankLog describe_rank(const Arena& arena);

// Collective: empty except on rank 0.
std::vector<RankLog> gather_logs(Communicator& world, RankLog own);

// Offsets that convert trace times to one clock, which starts at the first event. Ranks of a host share its clock;
// clocks of different hosts are aligned at the final barrier.
struct Alignment {
  std::vector<double> add;
  std::string text;
};
Alignment align(const std::vector<RankLog>& logs);

// The host with the fewest cores per thread; `shared`: oversubscribed.
struct CoreUsage {
  int64_t cores = 0, threads = 0;
  bool shared() const { return threads > cores; }
};
CoreUsage count_cores(const std::vector<RankLog>& logs);

// `train --trace`: every rank logs its last steps; rank 0 writes trace.json, the timeline for ui.perfetto.dev
// (app/trace/timeline.cpp), and report.json with model, plan, schedule, bytes by axis and operation, and peaks for
// `tessera report`.

// "rank 3 (pp 1, dp 0, tp 1)"; axes of size 1 are omitted.
std::string name_of_rank(const std::vector<MeshAxis>& axes, const std::vector<int>& at, int64_t rank);

class RunTrace {
 public:
  // Without --trace, get() is null. Must outlive the trainer.
  RunTrace(const TrainOptions& options, Communicator& world);
  ~RunTrace();
  RunTrace(const RunTrace&) = delete;
  RunTrace& operator=(const RunTrace&) = delete;

  Trace* get() { return trace_ ? &*trace_ : nullptr; }
  // Ends the log before run statistics are exchanged.
  void stop(TrainState& train);
  // Collective, after stop(); rank 0 writes the files. Returns whether tracing was enabled. Throws OutputError.
  bool write(const TrainCall& call, TrainState& train, const RunUsage& usage);

 private:
  Communicator& world_;
  std::optional<Trace> trace_;
  RankLog log_;
};

}  // namespace tessera
