// Synchronous and asynchronous training loops, and their checkpoints.
#include <system_error>
#include <tuple>

#include "app/make_job.h"
#include "app/plan/plan.h"
#include "app/run/pretrained.h"
#include "app/signals.h"
#include "app/trace/timeline.h"
#include "app/train/train.h"
#include "models/sample.h"
#include "tensor/cpu/vectorize.h"
#include "train/async/trainer.h"
#include "train/device.h"

namespace tessera {

namespace fs = std::filesystem;

namespace {

constexpr const char* kPulled = "pulled";

bool is_ready(const std::future<void>& f) { return f.wait_for(std::chrono::seconds(0)) == std::future_status::ready; }

SafetensorsLayout tensor_layout(const std::vector<FullTensor>& tensors,
                                const std::map<std::string, std::string>& about) {
  std::vector<TensorBytes> listed;
  for (const FullTensor& t : tensors) listed.push_back({t.name, t.dtype, {t.shape.begin(), t.shape.end()}, {}});
  return safetensors_layout(listed, about);
}

void report_stop(const Run& run, int64_t step, bool validating, TrainOutput& output) {
  const std::string where = fmt::format("stopped {}after step {}", validating ? "during the validation " : "", step);
  if (run.options.no_save) return output.message(where + "; nothing was saved (--no-save)");
  output.message(fmt::format("{}{}; tessera train --resume --out {} resumes", where,
                             validating ? ", which was saved" : "", run.directory.path().string()));
}

void report_save(const Run& run, int64_t step, TrainOutput& output) {
  output.message(fmt::format("SIGUSR1: {} after step {}{}", run.options.no_save ? "nothing saved" : "saved", step,
                             run.options.no_save ? " (--no-save)" : ""));
}

// Throws Error (usage) if a resumed run is already past its last step.
void check_steps_done(const Run& run, int64_t done) {
  if (run.options.optim.steps < done)
    bad_usage("--steps: expected at least {}, the steps completed in {}; got {}", done, run.directory.path().string(),
              run.options.optim.steps);
}

// Each rank writes its shards of parameters and optimizer state to their offsets in shared files, so no rank needs
// memory for full tensors, and the files do not depend on the layout.
//
//   begin()    rank 0 creates the files; every rank copies its shards and writes the copy in the background
//   poll()     after each step: when all ranks have written, rank 0 completes the checkpoint, also in the background
//   finish()   waits for completion
//
// All are collective and rethrow write errors. With --offload, begin() copies nothing, because a copy needs the memory
// that offloading saves, and returns when the checkpoint is complete.
class Saver {
 public:
  // Both must outlive the saver. Inactive with --no-save.
  Saver(const Run& run, Trainer& trainer) : run_(run), trainer_(trainer) {}
  // Removes incomplete checkpoints.
  ~Saver() {
    for (std::future<void>* f : {&writing_, &finishing_})
      if (f->valid()) f->wait();
  }
  Saver(const Saver&) = delete;
  Saver& operator=(const Saver&) = delete;

  // Throws Error for values that are not finite and for replicas that differ between ranks (train/checkpoint/state.h).
  void begin() {
    if (!saves_in_background(run_.options)) return save();
    open(true);
    writing_ = std::async(std::launch::async, [this] { write(); });
  }
  void poll() {
    if (finishing_.valid() && is_ready(finishing_)) made();
    if (!under_way_) return;
    if (writing_.valid() && is_ready(writing_)) writing_.get();
    Communicator& world = trainer_.world();
    const OpCounts before = world.counts();
    const bool all = world.max(writing_.valid() ? 1 : 0) == 0;
    world.reset_counts(before);
    if (all) all_written();
  }
  void finish() {
    if (under_way_) {
      if (writing_.valid()) writing_.get();
      Communicator& world = trainer_.world();
      const OpCounts before = world.counts();
      world.barrier();
      world.reset_counts(before);
      all_written();
    }
    if (finishing_.valid()) made();
  }
  void save() {
    if (run_.options.no_save) return;
    open(false);
    write();
    finish();
  }
  // Records the current step's validation loss, to retain the best checkpoint.
  void validated(double loss) {
    if (trainer_.world().rank() > 0 || run_.options.no_save) return;
    judged_ = {trainer_.steps_done(), loss};
    name_best();
  }

 private:
  struct File {
    SharedFile file;
    std::map<std::string, int64_t> begins;  // in bytes
    std::vector<TensorSlice> slices;
  };
  void open(bool copied) {
    finish();
    Communicator& world = trainer_.world();
    const bool first = world.rank() == 0;
    const std::vector<TensorSlice> values = own_values(trainer_), state = own_state(trainer_);
    for (const auto& slices : {values, state})
      for (const TensorSlice& h : slices) check_finite(h.name, h.part, trainer_.steps_done());
    check_replicas(trainer_);
    const OpCounts before = world.counts();
    if (first) {
      new_ = run_.directory.begin_checkpoint(trainer_.steps_done(), run_.options, run_.dataset);
      about_ = about({.steps = trainer_.steps_done(),
                      .updates = trainer_.updates_done(),
                      .ranks = world.size(),
                      .strategy = trainer_.strategy().name()},
                     trainer_.full_model().config, run_.options, run_.dataset);
    }
    const auto layouts = {
        std::tuple("model.safetensors", tensor_layout(list_values(trainer_), {}), &values),
        std::tuple("optimizer.safetensors",
                   tensor_layout(list_state(trainer_), {{"steps", std::to_string(trainer_.updates_done())}}), &state)};
    if (first)
      for (const auto& [name, layout, slices] : layouts)
        SharedFile::create(new_->path() / name, layout.header, layout.size);
    const std::filesystem::path path = broadcast_text(world, first ? new_->path().string() : "", 0);
    world.reset_counts(before);
    for (const auto& [name, layout, slices] : layouts) {
      files_.push_back({SharedFile(path / name), layout.begins, *slices});
      if (copied)
        for (TensorSlice& h : files_.back().slices)
          h.part = h.part.device() == Device::cpu ? h.part.clone() : h.part.on_host();
    }
    under_way_ = true;
  }
  void write() const {
    for (const File& f : files_) {
      for (const TensorSlice& h : f.slices) {
        const Tensor here = h.part.on_host();
        const int64_t element = element_size(here.dtype()), begin = f.begins.at(h.name);
        for_each_run(*h.parameter, h.begin, h.begin + here.numel(), [&](int64_t local, int64_t offset, int64_t count) {
          f.file.write(begin + offset * element,
                       {here.raw() + (local - h.begin) * element, static_cast<size_t>(count * element)});
        });
      }
      f.file.flush();
    }
  }
  void all_written() {
    under_way_ = false;
    files_.clear();
    if (!new_) return;
    finishing_ =
        std::async(std::launch::async, [this] { new_->finish(about_, static_cast<size_t>(run_.options.keep)); });
  }
  void made() {
    finishing_.get();
    saved_ = new_->step();
    new_.reset();
    name_best();
  }
  void name_best() {
    if (saved_ != judged_.step) return;
    const std::filesystem::path directory = run_.directory.checkpoints();
    const std::optional<BestCheckpoint> best = best_checkpoint(directory);
    if (!best || judged_.val_loss < best->val_loss) write_best(directory, judged_);
  }

  const Run& run_;
  Trainer& trainer_;
  bool under_way_ = false;  // a rank is still writing
  std::vector<File> files_;
  std::future<void> writing_;  // valid until this rank has finished writing
  // on rank 0:
  std::unique_ptr<NewCheckpoint> new_;
  std::string about_;
  std::future<void> finishing_;
  int64_t saved_ = -1;  // step of the newest checkpoint
  BestCheckpoint judged_ = {.step = -1};
};

// The caller handles the last step.
bool due(int64_t step, int64_t every) { return every > 0 && step % every == 0; }

// Returns the exit status; `output` is null except on rank 0.
int train_steps(const Run& run, Trainer& trainer, TrainOutput* output, Trace* trace) {
  const TrainOptions& o = run.options;
  Saver saver(run, trainer);
  int64_t validated = -1;  // step
  const auto evaluate = [&] {
    if (o.no_eval || validated == trainer.steps_done()) return true;
    const auto stop = [] { return interrupted() != 0; };
    const std::optional<Validation> found =
        compute_validation(run.dataset, trainer.full_model().config.context,
                           [&](const Rows& rows) { return trainer.mean_loss(rows, stop); });
    if (!found) return false;
    validated = trainer.steps_done();
    saver.validated(found->loss);
    if (output) output->eval(trainer.steps_done(), *found);
    return true;
  };
  const auto stopped = [&](bool validating) {
    if (output) report_stop(run, trainer.steps_done(), validating, *output);
    return status_of_interruption();
  };
  // If the previous run was stopped between a step and its validation, validates first.
  if (o.resume && trainer.steps_done() > 0 && trainer.steps_done() < o.optim.steps &&
      due(trainer.steps_done(), o.eval_every) &&
      trainer.world().max(output && !output->has_validation(trainer.steps_done()) ? 1 : 0) > 0 && !evaluate())
    return stopped(true);
  const auto improves = [&] {  // rank 0's record includes validations before the resume
    return o.patience == 0 || trainer.world().max(output ? output->validations_since_best() : 0) < o.patience;
  };
  if (o.dump > trainer.steps_done())
    trainer.dump(o.dump, run.directory.path());
  else if (output && o.dump > 0)
    output->message(fmt::format("step {} was already completed; its dump is not written again (--dump)", o.dump));
  bool captures = true;  // no failed capture reported yet
  bool continues = improves();
  while (continues && trainer.steps_done() < o.optim.steps) {
    if (trace) trace->begin_step(trainer.steps_done() + 1);
    const StepReport report = trainer.step(interrupted() != 0    ? StepRequest::stop
                                           : take_save_request() ? StepRequest::save
                                                                 : StepRequest::none);
    if (trace) trace->end_step();
    if (output && captures && !trainer.step_record().given_up.empty()) {
      output->message(fmt::format("CUDA graph: off (a step could not be captured: {})",
                                  with_options(trainer.step_record().given_up)));
      captures = false;
    }
    if (output) {
      run.directory.check();
      output->step(report);
      if (report.step == o.dump) output->message(fmt::format("wrote the dump of step {} (--dump)", o.dump));
    }
    saver.poll();
    if (report.request == StepRequest::stop) {
      saver.save();
      return stopped(false);
    }
    if (report.step == o.optim.steps) break;
    if (report.request == StepRequest::save) {
      saver.save();
      if (output) report_save(run, report.step, *output);
    }
    if (due(report.step, o.eval_every)) {
      if (!evaluate()) {
        saver.save();
        return stopped(true);
      }
      continues = improves();
    }
    if (due(report.step, o.check_replicas)) check_replicas(trainer);
    if (due(report.step, o.save_every)) saver.begin();
  }
  saver.save();
  if (!continues && output)
    output->message(fmt::format("{} validations without improvement (--patience): stopping after step {} of {}",
                                o.patience, trainer.steps_done(), o.optim.steps));
  return evaluate() ? 0 : stopped(true);
}

std::optional<double> predict_step_time(const Run& run, Trainer& trainer) {
  const auto machine = cached_machine_here();
  if (!machine || run.dataset.has_examples()) return {};  // steps have different lengths
  Job job = run.job;
  job.model = trainer.full_model().config;
  job.plan.threads_per_rank = cpu::threads();
  return predicted_step(*machine, job);
}

constexpr int64_t kSampleTokens = 300;

// Uses the newest checkpoint, because no rank may have enough memory for the full model during training. Empty with
// --format json, --quiet and --no-save; truncated by a signal.
std::string sample_text(const Run& run, const ModelConfig& config) {
  if (run.options.json() || run.options.no_save || run.options.quiet) return "";
  std::vector<std::string> passed_over;
  const std::unique_ptr<LanguageModel> model = build_model(run.job.make, config);
  const Plan& plan = run.job.plan;  // except its kernels: decoding token by token uses Tessera's own
  model->freeze();                  // avoids memory for gradients
  model->materialize(0, rank_arena(plan.device, 0), run.job.optim.dtype, DType::float32);
  load_model(*model, find_checkpoint(run.directory.path(), passed_over));
  StreamDecoder text(*run.dataset.tokenizer, StreamDecoder::Broken::escaped);
  std::string written;
  const std::vector<int32_t> prompt = run.dataset.prompt();
  const SampleOptions options{.temperature = 0.7,
                              .top_p = 0.9,
                              .seed = static_cast<uint64_t>(run.options.optim.seed),
                              .vocab = run.dataset.tokenizer->vocab_size()};
  sample(*model, prompt, kSampleTokens, options, [&](int32_t token) {
    written += text.add(token);
    return interrupted() == 0;
  });
  written += text.end();
  return run.dataset.val_examples ? written : complete_sentences(written);
}

void write_summary(const Run& run, LanguageModel& model, TrainOutput::Facts facts, TrainOutput& output) {
  const ModelConfig& c = model.config;
  const int64_t row = facts.tokens_per_step / run.job.optim.batch;  // rows of examples are shorter than the context
  facts.flops_per_token = model.training_flops() - 12 * static_cast<double>(c.layers) * c.keys() *
                                                       static_cast<double>(c.attended() - std::min(c.attended(), row));
  facts.rank_peak_flops = measured_peak_flops(run.job.optim.dtype, facts.arena);
  facts.no_graph = with_options(no_graph_because(run.job, run.options.trace, run.dataset.has_examples()));
  facts.sample = sample_text(run, model.config);
  output.summary(facts);
}

void write_tensors(const std::vector<NamedTensor>& tensors, const fs::path& file,
                   const std::map<std::string, std::string>& metadata) {
  std::vector<TensorBytes> bytes;
  for (const NamedTensor& t : tensors) bytes.push_back(as_bytes(t.name, t.tensor));
  write_safetensors(file, bytes, metadata);
}

// Workers push gradients when they are ready, and servers apply them at once. A reported step consists of one push per
// worker on average. To save or stop, workers wait until all have completed the same number of steps.

class AsyncRun {
 public:
  AsyncRun(const Run& run, Communicator& world)
      : run_(run), o_(run.options), world_(world), trainer_(run.job, run.sequences, world) {}

  int execute() {
    std::vector<std::string> passed_over;
    const bool resumed = o_.resume && resume(passed_over);
    if (o_.init && !resumed)
      trainer_.begin_with(first_weights(open_pretrained(*o_.init, o_.base), trainer_.model().config));
    check_steps_done(run_, step_);
    world_.barrier();  // all ranks must read the checkpoint before anything is written
    begin(passed_over);
    const bool ended = train();
    const AsyncSummary summary = trainer_.server().finish();
    const bool validated = !ended || o_.no_eval || validate();
    if (ended && validated) {
      finish(summary);
      return output_ && interrupted() != 0 ? status_of_interruption() : 0;
    }
    if (output_) report_stop(run_, step_, ended, *output_);
    return status_of_interruption();
  }

 private:
  using Clock = std::chrono::steady_clock;

  void show(const AppliedPush& push) {
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
    run_.directory.check();
    set_time(report, seconds, trainer_.tokens_per_step());
    output_->step(report);
    losses_ = 0;
    pushes_ = 0;
  }
  void begin(const std::vector<std::string>& passed_over) {
    if (world_.rank() > 0) return;
    const std::string steps =
        fmt::format("{} asynchronous steps of {} tokens", o_.optim.steps, trainer_.tokens_per_step());
    output_ = begin_output(run_, trainer_.model(), steps, step_, passed_over);
    if (!o_.no_eval)
      output_->message(
          "the run is validated only at the end, because workers and servers have no common step, except when saving");
  }
  bool train() {
    const AsyncServer::Hooks hooks{
        .step = [&](int worker, int64_t clock) { return trainer_.worker_step(worker, clock); },
        .on_push = [&](const AppliedPush& push) { show(push); },
        .wants_stop = [&] { return interrupted() != 0 || (!o_.no_save && take_save_request()); }};
    AsyncServer& server = trainer_.server();
    while (!server.complete()) {
      const bool saves = o_.save_every > 0 && !o_.no_save;
      const int64_t until = saves ? (step_ / o_.save_every + 1) * o_.save_every : o_.optim.steps;
      server.run(std::min(until, o_.optim.steps), hooks);
      step_ = server.steps();
      const bool stopped = world_.max(interrupted()) > 0;
      if (!o_.no_save) save();
      if (stopped) return false;
      if (output_ && step_ < std::min(until, o_.optim.steps)) report_save(run_, step_, *output_);
    }
    return true;
  }
  // Collective; rank 0 records the result. Returns false if stopped.
  bool validate() {
    const auto found = compute_validation(run_.dataset, trainer_.model().config.context, [&](const Rows& rows) {
      return trainer_.mean_loss(rows, [] { return interrupted() != 0; });
    });
    if (found && output_) output_->eval(step_, *found);
    return found.has_value();
  }
  void finish(const AsyncSummary& summary) {
    const RunUsage usage = run_usage(world_, {&world_, &trainer_.axis()}, trainer_.arena());
    if (!output_) return;
    output_->message(
        fmt::format("{} updates; at most {} steps between the fastest and the slowest worker, gradient staleness at "
                    "most {} updates",
                    summary.applied, summary.max_ahead, summary.max_behind));
    write_summary(run_, trainer_.model(),
                  {.steps = step_,
                   .tokens_per_step = trainer_.tokens_per_step(),
                   .strategy = "ps-async",
                   .usage = usage,
                   .arena = trainer_.arena()},
                  *output_);
  }

  // Checkpoints contain parameters and optimizer state as full tensors, as in any run; the order of all pushes; and, in
  // a replay, whose workers are at different steps, the parameters pulled for their next step.

  void save() {
    const std::vector<NamedTensor> values = trainer_.values(), state = trainer_.state(), pulled = trainer_.pulled();
    const std::optional<PushLog> order = trainer_.server().order();
    if (!output_) return;
    const int64_t updates = trainer_.server().optimizer()->steps();
    for (const auto& tensors : {values, state})
      for (const NamedTensor& t : tensors) check_finite(t.name, t.tensor, step_);
    const std::unique_ptr<NewCheckpoint> made = run_.directory.begin_checkpoint(step_, o_, run_.dataset);
    write_tensors(values, made->path() / "model.safetensors", {});
    write_tensors(state, made->path() / "optimizer.safetensors", {{"steps", std::to_string(updates)}});
    if (order) write_file(made->path() / "pushes.txt", to_string(*order));
    if (!pulled.empty()) write_tensors(pulled, made->path() / "pulled.safetensors", {});
    const SavedRun saved{
        .steps = step_, .updates = updates, .ranks = world_.size(), .strategy = "ps-async", .losses = losses_};
    made->finish(about(saved, trainer_.model().config, o_, run_.dataset), static_cast<size_t>(o_.keep));
  }
  // Returns false if there is no checkpoint yet.
  bool resume(std::vector<std::string>& passed_over) {
    const auto from = run_.directory.saved(trainer_.model().config, o_, run_.dataset, passed_over);
    if (!from) return false;
    AsyncServer& server = trainer_.server();
    Communicator& axis = trainer_.axis();
    const std::optional<PushLog> order = saved_order(from->path, axis.size(), static_cast<int>(o_.plan.servers));
    server.resume(from->steps, order);
    if (server.optimizer()) {
      const SavedTensors model(from->path, kModel), state(from->path, kOptimizer);
      trainer_.read(model.tensors(), state.tensors(), from->updates);
    }
    if (server.holds(axis.rank())) {
      if (!SavedTensors::are_in(from->path, kPulled))
        bad_usage(
            "--replay: in {}, worker {} has pulled parameters that are not in {}; expected the record that was "
            "replayed "
            "when the checkpoint was saved",
            o_.plan.replay, axis.rank(), from->path.string());
      trainer_.read_pulled(SavedTensors(from->path, kPulled).tensors());
    }
    step_ = shown_ = from->steps;
    if (!order) return true;
    pushes_ = std::ssize(order->servers[0]) - step_ * order->workers;
    losses_ = from->losses;
    return true;
  }

  const Run& run_;
  const TrainOptions& o_;
  Communicator& world_;
  AsyncTrainer trainer_;
  std::unique_ptr<TrainOutput> output_;  // on rank 0
  int64_t step_ = 0;                     // completed by all workers; in a replay their mean
  // On rank 0: last reported step; pushes and losses of the current one.
  int64_t shown_ = 0, pushes_ = 0;
  double losses_ = 0;
  Clock::time_point last_ = Clock::now();
};

}  // namespace

int train_in_steps(const Run& run, Communicator& world) {
  const TrainOptions& o = run.options;
  RunTrace trace(o, world);
  Trainer trainer(run.job, run.sequences, world, trace.get());
  std::vector<std::string> passed_over;
  const bool resumed = o.resume && run.directory.resume(trainer, o, run.dataset, passed_over);
  if (o.init && !resumed)
    begin_with(trainer.strategy().resident_units(), trainer.optimizer(),
               first_weights(open_pretrained(*o.init, o.base), trainer.full_model().config));
  check_steps_done(run, trainer.steps_done());
  world.barrier();  // all ranks must read the checkpoint before anything is written
  std::unique_ptr<TrainOutput> output;
  if (world.rank() == 0)
    output = begin_output(run, trainer.full_model(),
                          fmt::format("{} steps of {} tokens", o.optim.steps, trainer.tokens_per_step()),
                          trainer.steps_done(), passed_over);
  const int status = train_steps(run, trainer, output.get(), trace.get());
  trace.stop(trainer);
  const RunUsage usage = run_usage(world, trainer.communicators(), trainer.arena());
  const ExpertLoad experts = expert_load(trainer);
  const bool traced = trace.write(run, trainer, usage);
  if (!output) return status;
  if (traced)
    output->message(fmt::format("timeline written; show it with tessera report {}", run.directory.path().string()));
  if (status != 0) return status;
  write_summary(run, trainer.full_model(),
                {.steps = trainer.steps_done(),
                 .tokens_per_step = trainer.tokens_per_step(),
                 .strategy = std::string(trainer.strategy().name()),
                 .usage = usage,
                 .arena = trainer.arena(),
                 .graph = trainer.step_record(),
                 .predicted_s = predict_step_time(run, trainer),
                 .experts = experts},
                *output);
  return interrupted() != 0 ? status_of_interruption() : 0;
}

int train_asynchronously(const Run& run, Communicator& world) { return AsyncRun(run, world).execute(); }

}  // namespace tessera
