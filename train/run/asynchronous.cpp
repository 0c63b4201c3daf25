// Asynchronous runs: workers push gradients when they are ready, and servers apply them immediately. A reported step
// consists of one push per worker on average. To save or stop, workers wait until all have completed the same number of
// steps.
//
// Checkpoints contain parameters and optimizer state as full tensors, as in any run; the order of all pushes; and, in a
// replay, whose workers are at different steps, the parameters that they pulled for their next step.
#include <algorithm>
#include <array>
#include <chrono>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/bad_input.h"
#include "data/safetensors.h"
#include "train/async/trainer.h"
#include "train/run/trainer.h"

namespace tessera {
namespace {

constexpr const char* kPulled = "pulled";

void write_tensors(const std::vector<NamedTensor>& tensors, const std::filesystem::path& file,
                   const std::map<std::string, std::string>& metadata) {
  std::vector<TensorBytes> bytes;
  for (const NamedTensor& t : tensors) bytes.push_back(as_bytes(t.name, t.tensor));
  write_safetensors(file, bytes, metadata);
}

class AsynchronousTrainer final : public RunTrainer {
 public:
  AsynchronousTrainer(const RunSetup& setup, Communicator& world)
      : setup_(setup), config_(setup.config), world_(world), trainer_(setup.config, setup.sequences, world) {}

  LanguageModel& full_model() override { return trainer_.model(); }
  int64_t steps_done() const override { return step_; }
  bool complete() override { return trainer_.server().complete(); }

  bool resume(std::vector<std::string>& passed_over) override {
    const auto from = setup_.directory.saved(trainer_.model().config, config_, setup_.dataset, passed_over);
    if (!from) return false;
    AsyncServer& server = trainer_.server();
    Communicator& axis = trainer_.axis();
    const std::optional<PushLog> order = saved_order(from->path, axis.size(), static_cast<int>(config_.plan.servers));
    server.resume(from->steps, order);
    if (server.optimizer()) {
      const SavedTensors model(from->path, kModel), state(from->path, kOptimizer);
      trainer_.read(model.tensors(), state.tensors(), from->updates);
    }
    if (server.holds(axis.rank())) {
      if (!SavedTensors::are_in(from->path, kPulled))
        bad_usage(
            "`replay`: in {}, worker {} has pulled parameters that are not in {}; expected the record that was "
            "replayed when the checkpoint was saved",
            config_.plan.replay, axis.rank(), from->path.string());
      trainer_.read_pulled(SavedTensors(from->path, kPulled).tensors());
    }
    step_ = shown_ = from->steps;
    if (!order) return true;
    pushes_ = std::ssize(order->servers[0]) - step_ * order->workers;
    losses_ = from->losses;
    return true;
  }
  void begin_with(const FullTensors& weights) override { trainer_.begin_with(weights); }
  StepRequest advance(int64_t until, const Hooks& hooks) override {
    const bool saves = !config_.run.no_save;
    AsyncServer& server = trainer_.server();
    server.run(until, {.step = [&](int worker, int64_t clock) { return trainer_.worker_step(worker, clock); },
                       .on_push = [&](const AppliedPush& push) { show(push, hooks); },
                       .wants_stop = [&] { return hooks.stops() || (saves && hooks.saves()); }});
    step_ = server.steps();
    unsaved_ = true;
    if (world_.max(hooks.stops() ? 1 : 0) > 0) return StepRequest::stop;
    return step_ < until ? StepRequest::save : StepRequest::none;
  }
  std::string finish() override {
    const AsyncSummary summary = trainer_.server().finish();
    return fmt::format(
        "{} updates; at most {} steps between the fastest and the slowest worker, gradient staleness at most {} "
        "updates",
        summary.applied, summary.max_ahead, summary.max_behind);
  }
  std::optional<double> mean_loss(const Rows& split, const std::function<bool()>& stop) override {
    return trainer_.mean_loss(split, stop);
  }
  RunUsage usage() override { return run_usage(world_, {&world_, &trainer_.axis()}, trainer_.arena()); }
  void save(Saving) override {
    if (config_.run.no_save || !std::exchange(unsaved_, false)) return;
    const AsyncTensors all = trainer_.gather();
    const std::optional<PushLog> order = trainer_.server().order();
    if (world_.rank() > 0) return;
    const int64_t updates = trainer_.server().optimizer()->steps();
    for (const std::vector<NamedTensor>* tensors : {&all.values, &all.state})
      for (const NamedTensor& t : *tensors) check_finite(t.name, t.tensor, step_);
    const std::unique_ptr<NewCheckpoint> made = setup_.directory.begin_checkpoint(step_, setup_.toml(), setup_.dataset);
    write_tensors(all.values, made->path() / "model.safetensors", {});
    write_tensors(all.state, made->path() / "optimizer.safetensors", {{"steps", std::to_string(updates)}});
    if (order) write_file(made->path() / "pushes.txt", to_string(*order));
    if (!all.pulled.empty()) write_tensors(all.pulled, made->path() / "pulled.safetensors", {});
    const SavedRun saved{
        .steps = step_, .updates = updates, .ranks = world_.size(), .strategy = "ps-async", .losses = losses_};
    made->finish(about(saved, trainer_.model().config, config_, setup_.dataset), static_cast<size_t>(config_.run.keep));
  }

 private:
  using Clock = std::chrono::steady_clock;

  void show(const AppliedPush& push, const Hooks& hooks) {
    losses_ += push.loss;
    if (++pushes_ < trainer_.axis().size()) return;
    const auto now = Clock::now();
    const double seconds = std::chrono::duration<double>(now - last_).count();
    last_ = now;
    StepReport report;
    report.step = ++shown_;
    report.loss = losses_ / static_cast<double>(pushes_);
    report.lr = push.lr;
    report.grad_norm = push.grad_norm;
    set_time(report, seconds, tokens_per_step(config_, setup_.sequences));
    hooks.report(report);
    losses_ = 0;
    pushes_ = 0;
  }

  const RunSetup& setup_;
  const TrainConfig& config_;
  Communicator& world_;
  AsyncTrainer trainer_;
  int64_t step_ = 0;  // completed by all workers, or in a replay their mean
  bool unsaved_ = false;
  // On rank 0: last reported step, and the pushes and losses of the current one.
  int64_t shown_ = 0, pushes_ = 0;
  double losses_ = 0;
  Clock::time_point last_ = Clock::now();
};

}  // namespace

std::unique_ptr<RunTrainer> make_async_run_trainer(const RunSetup& setup, Communicator& world) {
  return std::make_unique<AsynchronousTrainer>(setup, world);
}

}  // namespace tessera
