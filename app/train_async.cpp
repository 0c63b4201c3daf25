// An asynchronous run: workers that push when they are ready, servers that apply at once.
//
// Each worker makes --steps steps of batch / ranks sequences, so the run sees as many sequences as a synchronous one,
// in `ranks` times as many updates. What is shown as a step is as many pushes as there are workers.
#include <fmt/format.h>

#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "app/evaluate.h"
#include "app/flops.h"
#include "app/plan.h"
#include "app/signals.h"
#include "app/trainer.h"
#include "app/training.h"
#include "optim/lr_schedule.h"
#include "parallel/async_server.h"

namespace tessera {
namespace {

using Clock = std::chrono::steady_clock;

class AsyncRun {
 public:
  AsyncRun(const Run& run, Communicator& world)
      : run_(run),
        o_(run.options),
        world_(world),
        axis_(world.split(0, world.rank(), "dp")),
        arena_(make_arena()),
        model_(gpt_config(o_, run.sequences.vocab)),
        schedule_{.lr = o_.lr, .min_lr = o_.min_lr.value_or(o_.lr / 10), .warmup = o_.warmup, .steps = o_.steps},
        server_(model_, *axis_, arena_, data_options(o_), async_options()) {}

  int execute();

 private:
  AsyncOptions async_options();
  double worker_step(int worker, int64_t step);
  void show(TrainOutput& output, const AppliedPush& push);
  std::vector<NamedTensor> whole_state();
  int finish(TrainOutput* output, const AsyncSummary& summary);

  const Run& run_;
  const TrainOptions& o_;
  Communicator& world_;
  std::unique_ptr<Communicator> axis_;
  ArenaPtr arena_;
  Gpt model_;
  LrSchedule schedule_;
  AsyncServer server_;
  int64_t shown_ = 0;  // steps
  double losses_ = 0;  // of the pushes since
  int64_t pushes_ = 0;
  Clock::time_point last_ = Clock::now();
};

AsyncOptions AsyncRun::async_options() {
  const int ranks = axis_->size();
  return {.steps = o_.steps,
          .staleness = o_.staleness,
          .clip = o_.clip,
          .optimizer =
              [this](const std::vector<FlatUnit>& units) {
                return make_optimizer(o_.optimizer, units, optimizer_options(o_));
              },
          .lr = [this, ranks](int64_t applied) { return schedule_.at(applied / ranks); },
          .record = o_.record.value_or(""),
          .replay = o_.replay.value_or("")};
}

// The mean loss of this worker's sequences of a step, and its gradient.
double AsyncRun::worker_step(int worker, int64_t step) {
  const int64_t size = o_.batch / (axis_->size() * o_.microbatches), context = model_.config.context;
  const int64_t tokens = size * o_.microbatches * context;
  model_.clear_gradients();
  double sum = 0;
  for (int64_t m = 0; m < o_.microbatches; ++m) {
    const int64_t first = (worker * o_.microbatches + m) * size;
    const Tensor ids = Tensor::empty({size, context}, DType::int32, arena_),
                 targets = Tensor::empty({size, context}, DType::int32, arena_);
    run_.sequences.load(step, first, size, ids.data<int32_t>(), targets.data<int32_t>());
    model_.set_step({.seed = static_cast<uint64_t>(o_.seed), .step = step, .first_sequence = first, .training = true});
    const Loss loss = model_.loss(ids, targets, 1.0 / static_cast<double>(tokens));
    backward(loss.mean);
    sum += loss.loss_sum;
  }
  model_.settle_gradients();
  return sum / static_cast<double>(tokens);
}

void AsyncRun::show(TrainOutput& output, const AppliedPush& push) {
  losses_ += push.loss;
  if (++pushes_ < axis_->size()) return;
  const auto now = Clock::now();
  const double seconds = std::chrono::duration<double>(now - last_).count();
  last_ = now;
  StepReport report;
  report.step = ++shown_;
  report.loss = losses_ / static_cast<double>(pushes_);
  report.lr = push.lr;
  report.grad_norm = push.grad_norm;
  report.step_ms = seconds * 1e3;
  report.tokens_per_s = static_cast<double>(o_.batch * model_.config.context) / seconds;
  output.step(report);
  losses_ = 0;
  pushes_ = 0;
}

std::vector<NamedTensor> AsyncRun::whole_state() {
  std::vector<std::string> kinds =
      o_.optimizer == "sgd" ? std::vector<std::string>{} : std::vector<std::string>{"m", "v"};
  if (o_.optimizer == "sgd" && o_.momentum != 0) kinds = {"momentum"};
  if (o_.dtype == "bf16") kinds.emplace_back("master");
  const std::vector<Module::Unit> layout = model_.layout();
  std::vector<NamedTensor> out;
  for (const std::string& kind : kinds)
    for (size_t u = 0; u < layout.size(); ++u) {
      Tensor mine;
      if (server_.optimizer())
        for (const NamedTensor& t : server_.optimizer()->state())
          if (t.name == layout[u].name + "." + kind) mine = t.tensor;
      const Tensor whole = server_.gather(u, mine);
      if (world_.rank() != 0) continue;
      for (const Slot& slot : layout[u].slots)
        out.push_back({slot.name + "." + kind, whole.narrow(0, slot.begin, slot.shape.numel()).reshape(slot.shape)});
    }
  return out;
}

int AsyncRun::finish(TrainOutput* output, const AsyncSummary& summary) {
  const std::vector<NamedTensor> state = whole_state();
  const int64_t at_once = o_.batch / (o_.microbatches * axis_->size());
  if (output) {
    RunDirectory::Whole whole{{}, state, shown_, world_.size(), "ps-async"};
    for (const Module::Named& p : model_.parameters()) whole.values.push_back({p.name, p.parameter->var.value()});
    run_.directory.save(whole, model_.config, o_, run_.dataset);
  }
  const bool stopped = world_.max(interrupted()) > 0;
  if (stopped) return 128 + static_cast<int>(interrupted() != 0 ? interrupted() : 15);
  model_.set_step({});
  const auto forward = [&](const Tensor& ids, const Tensor& targets) { return model_.loss(ids, targets, 1).loss_sum; };
  const double loss = mean_loss({.forward = forward,
                                 .context = model_.config.context,
                                 .at_once = at_once,
                                 .turn = axis_->rank(),
                                 .turns = axis_->size(),
                                 .arena = arena_},
                                *axis_, run_.dataset.val);
  const RunUsage usage = usage_of(world_, {&world_, axis_.get()}, arena_);
  if (!output) return 0;
  output->eval(shown_, {loss, run_.dataset.bits_per_byte(loss)});
  output->message(
      fmt::format("{} updates; a worker was at most {} steps ahead of the slowest, and a gradient at most {} "
                  "updates old",
                  summary.applied, summary.most_ahead, summary.most_behind));
  output->summary({.steps = shown_,
                   .tokens_per_step = o_.batch * model_.config.context,
                   .flops_per_token = flops_per_token(model_),
                   .strategy = "ps-async",
                   .backend = std::string(world_.kind()),
                   .usage = usage,
                   .arena = arena_,
                   .sample = o_.format == "json" ? "" : sample_of_saved(run_, model_.config)});
  return 0;
}

int AsyncRun::execute() {
  std::unique_ptr<TrainOutput> output;
  if (world_.rank() == 0) {
    run_.directory.write_config(o_);
    output = std::make_unique<TrainOutput>(o_, run_.directory.path(), 0);
    introduce(*output, run_, model_,
              fmt::format("{} asynchronous steps of {} tokens", o_.steps, o_.batch * model_.config.context));
    output->message("it is validated and saved at its end only: before, workers and servers are at no common step");
  }
  const auto step = [&](int worker, int64_t clock) -> std::optional<double> {
    if (interrupted() != 0) return std::nullopt;
    return worker_step(worker, clock);
  };
  const AsyncSummary summary = server_.run(step, [&](const AppliedPush& push) {
    if (output) show(*output, push);
  });
  return finish(output.get(), summary);
}

}  // namespace

int train_asynchronously(const Run& run, Communicator& world) { return AsyncRun(run, world).execute(); }

}  // namespace tessera
