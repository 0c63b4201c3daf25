// A training run with its files: resume, steps, validations, checkpoints, metrics, and stops on request. Synchronous
// ranks, DiLoCo's replicas and asynchronous parameter servers have the same life cycle.
//
//   const Dataset data = dataset_for("text.txt", {.name = "bytes"});
//   TrainConfig config{.optim = {.steps = 1000}, .plan = {.dp = 2}, .run = {.out = "runs/first", .save_every = 100}};
//   const Sequences sequences = make_sequences(data, config.model.context, config.optim.batch, 1337);
//   const RunDirectory directory(config.run);
//   launch(launch_options(config.plan), [&](Communicator& world) {
//     Run run({.config = config, .directory = directory, .sequences = sequences, .dataset = &data}, world);
//     run.train();
//   });
//
// The same program with `.resume = true`, under this plan or any other, continues from the newest checkpoint.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "train/run/metrics.h"
#include "train/run/run_trainer.h"

namespace tessera {

struct RunStart {
  LanguageModel& model;  // unsharded, without values
  int64_t done = 0;      // steps completed by earlier runs
  int64_t tokens_per_step = 0;
  bool has_common_steps = true;          // false: workers run asynchronously
  std::vector<std::string> passed_over;  // reasons for skipping newer checkpoints
};

// Callbacks for events, and requests of a program. Functions that return void are called on rank 0.
class RunObserver {
 public:
  virtual ~RunObserver() = default;
  // Polled on every rank between steps and during validations; one rank's request counts for all.
  virtual bool wants_stop() { return false; }
  virtual bool wants_save() { return false; }  // true only once per request

  virtual void begin(const RunStart&) {}
  // `record`: the line of metrics.jsonl.
  virtual void step(const StepReport& /*report*/, const std::string& /*record*/) {}
  virtual void validated(int64_t /*step*/, const Validation& /*found*/, const std::string& /*record*/) {}
  virtual void saved(int64_t /*step*/) {}               // a requested checkpoint
  virtual void message(const std::string& /*line*/) {}  // fields are in backticks
};

struct RunResult {
  int64_t steps = 0;           // completed, including those before a resume
  bool stopped = false;        // on request, before the end
  bool in_validation = false;  // stopped in a validation
  std::string note = {};       // staleness of an asynchronous run
};

class Run : NotCopied {
 public:
  // Builds the model and resumes the newest checkpoint if the configuration requests it. Collective: every rank of
  // `world` constructs one. Throws as Trainer and RunTrainer::resume() do, and FieldError if more steps are completed
  // than configured.
  Run(const RunSetup& setup, Communicator& world, RunObserver* observer = nullptr);
  ~Run();

  // Trains until the last step or a stop, or until validations no longer improve; saves the final state. Collective,
  // and called at most once.
  RunResult train();
  // Requests a stop after the current step; thread-safe, on any rank.
  void stop() { stops_ = true; }
  // Saves a checkpoint of the completed steps. Collective.
  void save() { trainer_->save(RunTrainer::Saving::complete); }
  // Memory and communication of all ranks so far. Collective.
  RunUsage usage() { return trainer_->usage(); }
  // Appends a record to metrics.jsonl, on rank 0 after train().
  void append(const std::string& record) { metrics_->write(record); }

  RunTrainer& trainer() { return *trainer_; }

 private:
  bool is_first() const { return world_.rank() == 0; }
  void begin();
  bool validate();
  bool improves();
  void begin_dump();
  RunResult result(bool stopped, bool in_validation = false) const;
  RunTrainer::Hooks hooks();

  const RunSetup setup_;
  const TrainConfig& config_;
  Communicator& world_;
  RunObserver none_;
  RunObserver& observer_;
  std::unique_ptr<RunTrainer> trainer_;
  std::vector<std::string> passed_over_;
  std::optional<Metrics> metrics_;  // on rank 0
  int64_t validated_ = -1;          // the last validated step
  std::string note_;
  std::atomic<bool> stops_ = false;
};

}  // namespace tessera
