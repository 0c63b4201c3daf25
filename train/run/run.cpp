// The life cycle of a run.
#include "train/run/run.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <system_error>

#include "train/checkpoint/full_state.h"
#include "train/dump.h"
#include "train/run/signals.h"

namespace tessera {
namespace {

// Whether an action with this interval is due; the last step is handled by the caller.
bool due(int64_t step, int64_t every) { return every > 0 && step % every == 0; }

}  // namespace

Run::Run(const RunSetup& setup, Communicator& world, RunObserver* observer)
    : setup_(setup),
      config_(setup.config),
      world_(world),
      observer_(observer ? *observer : none_),
      trainer_(make_run_trainer(setup_, world)) {
  if (config_.run.epochs || config_.run.save_fraction != 0 || config_.run.eval_fraction != 0)
    throw FieldError(config_.run.epochs               ? "epochs"
                     : config_.run.save_fraction != 0 ? "save_every"
                                                      : "eval_every",
                     "expected steps, got epochs; resolve_epochs() converts them");
  check_dump(config_, config_.run.dump);
  const bool resumed = config_.run.resume && trainer_->resume(passed_over_);
  if (setup.weights && !resumed) trainer_->begin_with(setup.weights(trainer_->full_model().config));
  if (const int64_t done = trainer_->steps_done(); config_.optim.steps < done)
    throw FieldError("steps", fmt::format("expected at least {}, the steps completed in {}; got {}", done,
                                          setup_.directory.path().string(), config_.optim.steps));
  world.barrier();  // all ranks must read the checkpoint before anything is written
}

Run::~Run() = default;

void Run::begin() {
  if (!is_first()) return;
  setup_.directory.write_config(setup_.toml());
  std::error_code none;
  std::filesystem::remove(setup_.directory.path() / kFlightFile, none);  // left by an earlier failure of this run
  metrics_.emplace(setup_.directory.path(), trainer_->steps_done());
  observer_.begin({.model = trainer_->full_model(),
                   .done = trainer_->steps_done(),
                   .tokens_per_step = tokens_per_step(config_, setup_.sequences),
                   .has_common_steps = trainer_->synchronous() != nullptr,
                   .passed_over = passed_over_});
  if (!trainer_->synchronous() && !config_.run.no_eval)
    observer_.message(
        "the run is validated only at the end, because workers and servers have a common step only when saving");
}

RunTrainer::Hooks Run::hooks() {
  return {.stops = [this] { return stops_ || SignalRequests::stop() != 0 || observer_.wants_stop(); },
          .saves = [this] { return SignalRequests::take_save() || observer_.wants_save(); },
          .report =
              [this](const StepReport& report) {
                setup_.directory.check();
                observer_.step(report, metrics_->step(report));
                if (report.step == config_.run.dump)
                  observer_.message(fmt::format("wrote the dump of step {} (`dump`)", report.step));
              },
          .message = [this](const std::string& line) { observer_.message(line); }};
}

// Returns false if stopped.
bool Run::validate() {
  const int64_t step = trainer_->steps_done();
  if (config_.run.no_eval || !setup_.dataset || validated_ == step) return true;
  const auto stop = hooks().stops;
  const std::optional<Validation> found =
      compute_validation(*setup_.dataset, trainer_->full_model().config.context,
                         [&](const Rows& rows) { return trainer_->mean_loss(rows, stop); });
  if (!found) return false;
  validated_ = step;
  trainer_->validated(found->loss);
  if (is_first()) {
    const std::string record = metrics_->validation(step, *found);
    observer_.validated(step, *found, record);
  }
  return true;
}

// Rank 0's record includes validations before the resume.
bool Run::improves() {
  const int64_t patience = config_.run.patience;
  return patience == 0 || world_.max(is_first() ? metrics_->validations_since_best() : 0) < patience;
}

void Run::begin_dump() {
  const int64_t step = config_.run.dump;
  if (step > trainer_->steps_done())
    trainer_->synchronous()->dump(step, setup_.directory.path());
  else if (is_first() && step > 0)
    observer_.message(fmt::format("step {} was already completed; its dump is not written again (`dump`)", step));
}

RunResult Run::result(bool stopped, bool in_validation) const {
  return {.steps = trainer_->steps_done(), .stopped = stopped, .in_validation = in_validation, .note = note_};
}

RunResult Run::train() {
  begin();
  const RunConfig& c = config_.run;
  Trainer* const together = trainer_->synchronous();
  const RunTrainer::Hooks with = hooks();
  int64_t done = trainer_->steps_done();
  // If the previous run was stopped between a step and its validation, validates first.
  if (c.resume && together && done > 0 && done < config_.optim.steps && due(done, c.eval_every) &&
      world_.max(is_first() && !metrics_->has_validation(done) ? 1 : 0) > 0 && !validate())
    return result(true, true);
  begin_dump();
  bool continues = improves();
  while (continues && !trainer_->complete()) {
    const bool saves = c.save_every > 0 && !c.no_save;
    const int64_t next_save = saves ? (done / c.save_every + 1) * c.save_every : config_.optim.steps;
    const StepRequest request = trainer_->advance(std::min(next_save, config_.optim.steps), with);
    done = trainer_->steps_done();
    if (request == StepRequest::stop) {
      save();
      trainer_->finish();
      return result(true);
    }
    if (trainer_->complete()) break;
    if (request == StepRequest::save) {
      save();
      if (is_first()) observer_.saved(done);
    }
    if (together && due(done, c.eval_every)) {
      if (!validate()) {
        save();
        return result(true, true);
      }
      continues = improves();
    }
    if (together && due(done, c.check_replicas)) check_replicas(together->state());
    if (saves && done >= next_save) trainer_->save(RunTrainer::Saving::background);
  }
  save();
  if (!continues && is_first())
    observer_.message(fmt::format("{} validations without improvement (`patience`): stopping after step {} of {}",
                                  c.patience, done, config_.optim.steps));
  note_ = trainer_->finish();
  const bool ended = validate();
  return result(!ended, !ended);
}

}  // namespace tessera
