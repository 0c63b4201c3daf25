// The trainer of a run: ranks that step together (train/trainer.h), or asynchronous workers and parameter servers
// (train/async/trainer.h). Checkpoints of either contain full tensors, so any layout resumes them.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/error.h"
#include "train/checkpoint/full_state.h"
#include "train/config_file.h"
#include "train/run/run_directory.h"
#include "train/trainer.h"
#include "train/usage.h"

namespace tessera {

// All referenced objects must outlive the run.
struct RunSetup {
  const TrainConfig& config;
  const RunDirectory& directory;  // one per process; processes without the lock construct it from the path
  const Sequences& sequences;
  // For validations, the checkpoints' tokenizer, and the comparison of data when a run is resumed; null: none of them.
  const Dataset* dataset = nullptr;
  // Initial weights; empty: sampled from the seed. Not called if a checkpoint is resumed.
  std::function<FullTensors(const ModelConfig& model)> weights = {};
  Trace* trace = nullptr;
  const FieldNames* set = nullptr;                           // as in to_toml()
  std::string toml() const { return to_toml(config, set); }  // text of config.toml
};

class RunTrainer : NotCopied {
 public:
  struct Hooks {
    std::function<bool()> stops, saves;                    // this rank's requests; calling `saves` resets it
    std::function<void(const StepReport& report)> report;  // of every step, on rank 0
    std::function<void(const std::string& line)> message;  // on rank 0
  };
  virtual ~RunTrainer() = default;

  virtual LanguageModel& full_model() = 0;
  virtual int64_t steps_done() const = 0;
  virtual bool complete() = 0;
  // The trainer of a synchronous run; null if the run is asynchronous.
  virtual Trainer* synchronous() { return nullptr; }

  // The following are collective.

  // Loads the newest complete checkpoint; returns false if the run has none yet. `passed_over` and errors as for
  // RunDirectory::saved().
  virtual bool resume(std::vector<std::string>& passed_over) = 0;
  virtual void begin_with(const FullTensors& weights) = 0;
  // Trains until all ranks have completed the same number of steps, at most `until`. Returns the strongest request of
  // any rank.
  virtual StepRequest advance(int64_t until, const Hooks& hooks) = 0;
  // Called once, after the last step or a stop. Returns a summary of the updates' staleness, or an empty string.
  virtual std::string finish() { return ""; }
  // Mean loss over all targets of a split; nullopt if a rank requests a stop.
  virtual std::optional<double> mean_loss(const Rows& split, const std::function<bool()>& stop) = 0;
  // Records the validation loss after the current step, to retain the best checkpoint.
  virtual void validated(double) {}
  // Saves a checkpoint before returning, or begins to save it if the plan allows this in the background.
  enum class Saving : uint8_t { complete, background };
  virtual void save(Saving how) = 0;
  // Memory and communication of all ranks so far.
  virtual RunUsage usage() = 0;
};

// `setup` must outlive the result.
std::unique_ptr<RunTrainer> make_run_trainer(const RunSetup& setup, Communicator& world);
std::unique_ptr<RunTrainer> make_async_run_trainer(const RunSetup& setup, Communicator& world);

}  // namespace tessera
