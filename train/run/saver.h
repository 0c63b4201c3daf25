// Saves checkpoints during a run. Each rank writes its shards of parameters and optimizer state to their offsets in
// shared files, so no rank needs memory for full tensors, and the files do not depend on the layout.
//
//   begin()    rank 0 creates the files; every rank copies its shards and writes the copy in the background
//   poll()     after each step: when all ranks have written, rank 0 completes the checkpoint, also in the background
//   finish()   waits for completion
//
// All are collective and rethrow write errors. If the optimizer or the parameters are offloaded, nothing is copied,
// since that would need the memory that offloading saves: begin() then returns when the checkpoint is complete.
#pragma once

#include <cstdint>
#include <future>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "base/error.h"
#include "train/checkpoint/directory.h"
#include "train/checkpoint/full_state.h"
#include "train/run/run_trainer.h"

namespace tessera {

class Saver : NotCopied {
 public:
  // Both must outlive the saver. Does nothing for a run that saves no checkpoints.
  Saver(const RunSetup& setup, TrainState& train) : run_(setup), train_(train) {}
  // Incomplete checkpoints are removed.
  ~Saver();

  // Throws Error for values that are not finite and for replicas that differ between ranks
  // (train/checkpoint/full_state.h).
  void begin();
  void poll();
  void finish();
  void save();
  void validated(double loss);

 private:
  // This rank's shards in one file.
  struct File {
    SharedFile file;
    std::map<std::string, int64_t> begins;  // offset of each tensor in bytes
    std::vector<TensorSlice> parts;
  };
  bool is_off() const { return run_.config.run.no_save; }
  void open(bool copied);
  void write() const;
  void all_written();
  void made();
  void name_best();

  const RunSetup& run_;
  TrainState& train_;
  bool pending_ = false;  // a rank is still writing
  std::vector<File> files_;
  std::future<void> writing_;  // valid until this rank has finished writing
  // on rank 0:
  std::unique_ptr<NewCheckpoint> new_;
  std::string about_;
  std::future<void> finishing_;
  int64_t saved_ = -1;  // steps of the newest checkpoint
  BestCheckpoint judged_ = {.step = -1};
};

}  // namespace tessera
