// A run's folder has one writer at a time, who holds the file `lock` in it. The system gives a lock back when a process
// ends, however that ends.
#pragma once
#include "app/options.h"
#include "parallel/async/push_log.h"
#include "train/checkpoint/directory.h"
#include "train/trainer.h"

namespace tessera {

// True while a name still leads to the file that was opened under it.
bool is_at(const std::filesystem::path& file, int descriptor);

class RunLock {
 public:
  // Throws Error (usage) naming the process that writes to the folder. Where the file system has no locks, note() says
  // so.
  explicit RunLock(const std::filesystem::path& run);
  ~RunLock();
  RunLock(const RunLock&) = delete;
  RunLock& operator=(const RunLock&) = delete;

  // Throws OutputError when the folder is not where it was: removed, moved, or another one in its place; and where
  // there are no locks, when another run has begun to write to it.
  void check() const;
  // Tells a user what is unusual about the lock; mostly empty.
  const std::string& note() const { return note_; }

  // Whether a process holds the lock of a folder.
  static bool is_held(const std::filesystem::path& run);
  // The words of a folder's lock about who holds it; they differ between any two. Throws InputError.
  static std::string read(const std::filesystem::path& run);

 private:
  std::filesystem::path run_;
  std::string text_, note_;
  int fd_ = -1;
};

// The files that a run leaves on disk, and how it is picked up again.
//
//   config.toml     the options, resolved: `--config` of it, or `--resume --out`, means the same run
//   lock            says which process writes here
//   metrics.jsonl   one record per step and validation; events.out.tfevents.* hold the same for TensorBoard
//   checkpoints/    step-N, each with model and optimizer (safetensors, one tensor per parameter), config and
//                   tokenizer, so that one folder is enough to write text or to go on; of an asynchronous run also the
//                   order of its pushes, and what workers had pulled inside a replay

// The last actions of the ranks of a run that failed (parallel/comm/trace.h).
inline constexpr const char* kFlightFile = "flight.json";

// A new folder runs/DATE-TIME. Throws OutputError.
std::filesystem::path new_run_folder();

class RunDirectory {
 public:
  // The folder of --out, or runs/DATE-TIME, made when it is missing, and locked for this process (app/run/directory.h).
  // Throws Error (usage) when it holds a run already and the options do not say --resume, and the other way round, and
  // when another process writes to it; OutputError when it cannot be made or written.
  explicit RunDirectory(const TrainOptions& options);
  // The same folder, as another process of the same run sees it.
  explicit RunDirectory(std::filesystem::path made) : path_(std::move(made)) {}

  const std::filesystem::path& path() const { return path_; }
  std::filesystem::path checkpoints() const { return path_ / "checkpoints"; }

  // Files that a killed run had left half-written here, removed when this one began.
  const std::vector<std::filesystem::path>& removed() const { return removed_; }
  // For the head of a run: what is unusual about the folder; mostly empty.
  std::string note() const { return lock_ ? lock_->note() : ""; }
  // Before something is written. Throws OutputError when the folder is no longer the one that was locked.
  void check() const {
    if (lock_) lock_->check();
  }

  void write_config(const TrainOptions& options) const;
  // A checkpoint that has options and tokenizer; the caller adds tensors. Throws OutputError.
  std::unique_ptr<NewCheckpoint> begin_checkpoint(int64_t step, const TrainOptions& options,
                                                  const Dataset& dataset) const;
  // Loads the newest checkpoint that is whole; `passed_over` says why newer ones were not. A run that was killed before
  // its first checkpoint begins again: false. Every rank calls it. Throws InputError when there are only damaged ones,
  // and Error (usage) naming each key in which the run differs from the one that was saved.
  bool resume(Trainer& trainer, const TrainOptions& options, const Dataset& dataset,
              std::vector<std::string>& passed_over) const;
  // The same without loading: the checkpoint and what it says of the run; nothing where there is none yet.
  struct Saved {
    std::filesystem::path path;
    int64_t steps = 0, updates = 0;
    double losses = 0;
  };
  std::optional<Saved> saved(const ModelConfig& config, const TrainOptions& options, const Dataset& dataset,
                             std::vector<std::string>& passed_over) const;

 private:
  std::filesystem::path path_;
  std::unique_ptr<RunLock> lock_;
  std::vector<std::filesystem::path> removed_;
};

// The files of a checkpoint (train/checkpoint/state.h).
inline constexpr const char *kModel = "model", *kOptimizer = "optimizer";

// Facts about a run that the manifest of its checkpoint states.
struct SavedRun {
  int64_t steps = 0, updates = 0;
  int ranks = 1;
  std::string_view strategy = {};
  double losses = 0;  // only for an asynchronous run: the sum in the step that has begun
};
std::string about(const SavedRun& run, const ModelConfig& config, const TrainOptions& options, const Dataset& dataset);
// The differences between the run that a checkpoint is of (Checkpoint::about) and this one (a JSON object), one text
// for each key of `now`. `what` names the checkpoint. Throws InputError when it does not say which run it is of.
std::vector<std::string> differences(const std::string& about, const std::string& now, const std::string& what);
// The checkpoint that a path names: a checkpoint itself, `best` or `latest` beside them, or the newest of a run
// directory that has no infinities or NaNs. Throws InputError.
Checkpoint find_checkpoint(const std::filesystem::path& from, std::vector<std::string>& passed_over);
// The order of an asynchronous run's pushes, which its checkpoints hold where all of it is known: `pushes.txt`. Throws
// InputError when it is none, and Error (usage) when its workers were at different steps, which only a run of as many
// `ranks` and `servers` goes on with; 0: a run that is not asynchronous.
std::optional<PushLog> saved_order(const std::filesystem::path& checkpoint, int ranks, int servers);
std::set<std::string> tensor_names(LanguageModel& model);  // names of its parameters
// Reads the parameters of a materialised model. Throws InputError.
void load_model(LanguageModel& model, const Checkpoint& checkpoint);

}  // namespace tessera
