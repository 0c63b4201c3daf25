// A run directory has one writer, which locks its file `lock`; the kernel releases the lock when the process ends for
// any reason.
#pragma once

#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "data/dataset.h"
#include "parallel/async/push_log.h"
#include "train/checkpoint/directory.h"
#include "train/config.h"

namespace tessera {

// Whether the path still refers to the open file.
bool is_at(const std::filesystem::path& file, int descriptor);

class RunLock {
 public:
  // Throws Error (usage) naming the current writer. note() reports a file system without locks.
  explicit RunLock(const std::filesystem::path& run);
  ~RunLock();
  RunLock(const RunLock&) = delete;
  RunLock& operator=(const RunLock&) = delete;

  // Throws OutputError if the directory was removed, moved or replaced, or, without lock support, if another run has
  // started to write to it.
  void check() const;
  const std::string& note() const { return note_; }

  static bool is_held(const std::filesystem::path& run);
  // The lock holder's description, unique to each process. Throws InputError.
  static std::string read(const std::filesystem::path& run);

 private:
  std::filesystem::path run_;
  std::string text_, note_;
  int fd_ = -1;
};

// The files of a run:
//   config.toml     the resolved options: `--config` with this file and `--resume --out` specify the same run
//   lock            identifies the writer
//   metrics.jsonl   one record per step and validation; events.out.tfevents.* has the same data for TensorBoard
//   checkpoints/    step-N, each with model and optimizer (safetensors, one tensor per parameter), config and
//                   tokenizer, sufficient to generate text or resume; for an asynchronous run also the push order and,
//                   inside a replay, the parameters that workers had pulled

// The last operations of a failed run's ranks (parallel/comm/trace.h).
inline constexpr const char* kFlightFile = "flight.json";

// Throws OutputError.
std::filesystem::path new_run_directory();

class RunDirectory {
 public:
  // Creates (if necessary) and locks `out`, or runs/DATE-TIME. Throws Error (usage) if the directory contains a run
  // without `resume` or has another writer; InputError if it contains no run with `resume`; OutputError if it cannot be
  // written.
  explicit RunDirectory(const RunConfig& config);
  // For another process of the same run.
  explicit RunDirectory(std::filesystem::path made) : path_(std::move(made)) {}

  const std::filesystem::path& path() const { return path_; }
  std::filesystem::path checkpoints() const { return path_ / "checkpoints"; }

  // Incomplete files of a killed run.
  const std::vector<std::filesystem::path>& removed() const { return removed_; }
  std::string note() const { return lock_ ? lock_->note() : ""; }
  // Must precede every write. Throws OutputError if the directory is no longer the locked one.
  void check() const {
    if (lock_) lock_->check();
  }

  void write_config(const std::string& toml) const;
  // Contains the configuration and the tokenizer of `dataset` (null: none); the caller adds tensors. Throws
  // OutputError.
  std::unique_ptr<NewCheckpoint> begin_checkpoint(int64_t step, const std::string& toml, const Dataset* dataset) const;
  // The newest complete checkpoint of a run of `model`, without reading its tensors; nullopt if there is none yet.
  // `passed_over` receives the reasons for skipping newer ones. Throws InputError if all checkpoints are damaged, and
  // Error (usage) naming each key in which the run differs from the saved one.
  struct Saved {
    std::filesystem::path path;
    int64_t steps = 0, updates = 0;
    double losses = 0;
  };
  std::optional<Saved> saved(const ModelConfig& model, const TrainConfig& config, const Dataset* dataset,
                             std::vector<std::string>& passed_over) const;

 private:
  std::filesystem::path path_;
  std::unique_ptr<RunLock> lock_;
  std::vector<std::filesystem::path> removed_;
};

inline constexpr const char *kModel = "model", *kOptimizer = "optimizer";

struct SavedRun {
  int64_t steps = 0, updates = 0;
  int ranks = 1;
  std::string_view strategy = {};
  double losses = 0;  // asynchronous runs: sum over the current step
};
// A manifest's description of the run, for differences(). `dataset` may be null.
std::string about(const SavedRun& run, const ModelConfig& model, const TrainConfig& config, const Dataset* dataset);
// One message per key of `now`, a JSON object, whose value differs from the saved run's (Checkpoint::about). `what`
// names the checkpoint. Throws InputError if the manifest does not identify its run.
std::vector<std::string> differences(const std::string& about, const std::string& now, const std::string& what);
// Rejects checkpoints of a diverged run. Throws InputError naming file and tensor.
void check_checkpoint_finite(const Checkpoint& checkpoint);
// The push order of an asynchronous run; nullopt without `pushes.txt`. `ranks` and `servers` describe the current run;
// 0 if it is not asynchronous. Throws InputError if the file is malformed, and Error (usage) if its workers were at
// different steps and the numbers of ranks or servers have changed.
std::optional<PushLog> saved_order(const std::filesystem::path& checkpoint, int ranks, int servers);
// Throws InputError. The model must be materialized.
void load_model(LanguageModel& model, const Checkpoint& checkpoint);

}  // namespace tessera
