// `train --trace`: each rank keeps a log of its last steps, and at the end rank 0 makes two files of all of them.
//
//   trace.json     the timeline, for ui.perfetto.dev (app/trace/timeline.h)
//   report.json    what `tessera report` needs beside it: model, plan and schedule, bytes by axis and operation, peaks
#pragma once
#include <optional>
#include <string>
#include <vector>

#include "app/trace/rank_log.h"
#include "app/training.h"
#include "parallel/comm/trace.h"
#include "parallel/mesh.h"
#include "train/trainer.h"
#include "train/usage.h"

namespace tessera {

// "rank 3 (pp 1, dp 0, tp 1)": axes of one rank are left out.
std::string name_of_rank(const std::vector<MeshAxis>& axes, const std::vector<int>& at, int64_t rank);

class RunTrace {
 public:
  // Of this rank; keeps nothing, and get() is null, where the options do not say --trace. Must outlive the trainer.
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
