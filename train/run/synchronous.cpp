// Runs whose ranks step together: DDP, ZeRO, parameter servers with synchronous steps, and DiLoCo.
#include <fmt/format.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "base/bad_input.h"
#include "parallel/comm/trace.h"
#include "train/run/run_trainer.h"
#include "train/run/saver.h"

namespace tessera {
namespace {

std::set<std::string> tensor_names(const std::vector<FullTensor>& tensors) {
  std::set<std::string> names;
  for (const FullTensor& t : tensors) names.insert(t.name);
  return names;
}

// Each independent DiLoCo replica has its own state, so the number of replicas must not change.
void check_replicas_saved(const SavedTensors& state, const DataStrategy& strategy, const std::string& what) {
  std::set<std::string> copies;  // the first has no suffix; empty for other strategies
  for (const auto& [name, tensor] : state.all()) {
    if (name.ends_with(".common")) copies.insert("");
    if (const size_t at = name.find(".value.replica"); at != std::string::npos) copies.insert(name.substr(at));
  }
  const int saved = static_cast<int>(copies.size());
  const int wanted = strategy.layout().local_updates ? strategy.copies() : 0;
  if (saved == wanted) return;
  bad_usage("`resume`: {} is a checkpoint of {}; expected {}", what,
            saved == 0 ? "synchronous data parallelism" : fmt::format("{} independent DiLoCo replicas", saved),
            saved == 0 ? "`dp_mode` ddp" : fmt::format("`dp_mode` diloco `dp` {}", saved));
}

class SynchronousTrainer final : public RunTrainer {
 public:
  SynchronousTrainer(const RunSetup& setup, Communicator& world)
      : setup_(setup), trainer_(setup.config, setup.sequences, world, setup.trace), saver_(setup, state_) {}

  LanguageModel& full_model() override { return state_.full_model(); }
  int64_t steps_done() const override { return state_.steps_done(); }
  bool complete() override { return steps_done() >= setup_.config.optim.steps; }
  Trainer* synchronous() override { return &trainer_; }

  bool resume(std::vector<std::string>& passed_over) override {
    const auto from = setup_.directory.saved(full_model().config, setup_.config, setup_.dataset, passed_over);
    if (!from) return false;
    saved_order(from->path, 0, 0);
    const SavedTensors model(from->path, kModel), state(from->path, kOptimizer);
    model.expect_no_others(tensor_names(list_values(state_)));
    check_replicas_saved(state, state_.strategy(), from->path.string());
    state.expect_no_others(tensor_names(list_state(state_)));
    read_values(state_.strategy().resident_units(), model.tensors());
    read_state(state_, state.tensors());
    state_.set_done(from->steps, from->updates);
    return true;
  }
  void begin_with(const FullTensors& weights) override {
    tessera::begin_with(state_.strategy().resident_units(), state_.optimizer(), weights);
  }
  StepRequest advance(int64_t, const Hooks& hooks) override {
    if (setup_.trace) setup_.trace->begin_step(state_.steps_done() + 1);
    const StepReport report = trainer_.step(hooks.stops()   ? StepRequest::stop
                                            : hooks.saves() ? StepRequest::save
                                                            : StepRequest::none);
    if (setup_.trace) setup_.trace->end_step();
    if (state_.groups.world.rank() == 0) {
      if (const std::string why = trainer_.step_record().given_up; captures_ && !why.empty()) {
        hooks.message(fmt::format("CUDA graph: off (a step could not be captured: {})", why));
        captures_ = false;
      }
      hooks.report(report);
    }
    saver_.poll();
    return report.request;
  }
  std::optional<double> mean_loss(const Rows& split, const std::function<bool()>& stop) override {
    return trainer_.mean_loss(split, stop);
  }
  void validated(double loss) override { saver_.validated(loss); }
  void save(Saving how) override { how == Saving::background ? saver_.begin() : saver_.save(); }
  RunUsage usage() override { return run_usage(state_.groups.world, state_.communicators(), state_.arena); }

 private:
  const RunSetup& setup_;
  Trainer trainer_;
  TrainState& state_ = trainer_.state();
  Saver saver_;
  bool captures_ = true;  // no failed capture reported yet
};

}  // namespace

std::unique_ptr<RunTrainer> make_run_trainer(const RunSetup& setup, Communicator& world) {
  if (setup.config.plan.dp_mode == DataMode::ps_async) return make_async_run_trainer(setup, world);
  return std::make_unique<SynchronousTrainer>(setup, world);
}

}  // namespace tessera
