// A GPT from a plan to a resumed checkpoint. Read it from top to bottom; it uses the library alone.
//
//   train_gpt                               the demonstration in main(): stop, resume under another layout, compare
//   train_gpt FOLDER '{"dp": 2, "zero": 1}' trains in FOLDER under this plan, or continues the run there
//
// Ctrl-C saves and stops; the process may also be killed at any moment. The next start continues from the newest
// checkpoint, under any plan: with data and pipeline axes, the run is bitwise identical.
#include <tessera/tessera.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <limits>
#include <string>

namespace {

using namespace tessera;
namespace fs = std::filesystem;

// 1. The configuration: model, optimization, plan, data and files. Nothing else affects the run.
TrainConfig make_config(const fs::path& directory, const Plan& plan) {
  TrainConfig config{
      .model = {.family = Family::llama, .layers = 2, .heads = 4, .channels = 64, .context = 64, .tied = false},
      .optim = {.lr = 3e-3, .warmup = 10, .steps = 60, .batch = 8, .seed = 1},
      .plan = plan,
      .data = {.source = "tinyshakespeare", .held = {.fraction = 0.01}, .tokenizer = "char"},
      .run = {.out = directory.string(), .save_every = 5, .eval_every = 20}};
  config.plan.threads_per_rank = 1;  // more threads may change the summation order
  // A run directory is locked by its writer and never overwritten: an existing run must be continued explicitly.
  config.run.resume = fs::exists(directory / "config.toml");
  check(config);  // throws with the field and its nearest valid value, before anything is allocated
  return config;
}

// 2. The program's view of the run, and its request to stop, in addition to signals. `step` and `validated` are called
// only on rank 0; a request of one rank stops all.
class Observer final : public RunObserver {
 public:
  explicit Observer(int64_t last) : last_(last) {}
  bool wants_stop() override { return step_ + 1 >= last_; }  // sent with the next step
  void begin(const RunStart& start) override {
    std::printf("%.2fM parameters, %lld tokens per step, %lld steps done\n",
                static_cast<double>(start.model.parameter_count()) / 1e6, static_cast<long long>(start.tokens_per_step),
                static_cast<long long>(start.done));
  }
  void step(const StepReport& report, const std::string& /*record*/) override {
    step_ = report.step;
    if (step_ % 10 == 0) std::printf("step %2lld: loss %.4f\n", static_cast<long long>(step_), report.loss);
  }
  void validated(int64_t step, const Validation& found, const std::string& /*record*/) override {
    loss_ = found.loss;
    std::printf("step %2lld: validation loss %.17g\n", static_cast<long long>(step), loss_);
  }
  double loss() const { return loss_; }

 private:
  int64_t step_ = 0, last_;
  double loss_ = 0;
};

// 3. The run. Returns the last validation loss.
double train(const fs::path& directory, const Plan& plan, int64_t last = std::numeric_limits<int64_t>::max()) {
  const TrainConfig config = make_config(directory, plan);
  // The text is tokenized once and cached. Any rank can load any sequence, so the data order does not depend on the
  // layout.
  const Dataset data = dataset_for(config.data.source, {.name = *config.data.tokenizer}, config.data.held);
  const Sequences sequences =
      make_sequences(data, config.model.context, config.optim.batch, static_cast<uint64_t>(config.optim.seed));
  const RunDirectory run_directory(config.run);  // config.toml, metrics.jsonl, TensorBoard events, checkpoints/
  double loss = 0;
  launch(launch_options(config.plan), [&](Communicator& world) {  // runs on every rank, here a thread
    Observer observer(last);
    // Builds this rank's shard of the model, and reads it from the newest checkpoint, whatever its layout.
    Run run({.config = config, .directory = run_directory, .sequences = sequences, .dataset = &data}, world, &observer);
    // Per step: forward and backward by the pipeline's schedule, reduction of gradients, clipping, update; validations
    // and checkpoints when they are due. Checkpoints are written in the background, by all ranks into shared files.
    const RunResult result = run.train();
    if (world.rank() == 0) {
      loss = observer.loss();
      std::printf("%s after step %lld under %s\n", result.stopped ? "stopped" : "complete",
                  static_cast<long long>(result.steps), to_text(plan).c_str());
    }
  });
  return loss;
}

// 4. The same run twice: uninterrupted; and stopped after 23 steps, then resumed under another layout.
bool demonstrate(const fs::path& directory) {
  const Plan ddp{.dp = 2}, pipeline{.pp = 2, .microbatches = 2};
  const double undisturbed = train(directory / "undisturbed", ddp);
  train(directory / "resumed", ddp, 23);
  const double resumed = train(directory / "resumed", pipeline);
  std::printf("%s\n", undisturbed == resumed ? "the same loss, to the last bit" : "DIFFERENT");
  return undisturbed == resumed;
}

}  // namespace

int main(int argc, char** argv) {
  const SignalRequests signals;  // Ctrl-C stops a run after its step, with a checkpoint; SIGUSR1 saves one
  try {
    if (argc == 3) {
      train(argv[1], plan_from_json(argv[2]));
      return SignalRequests::stop() != 0 ? SignalRequests::exit_status() : 0;
    }
    const fs::path directory = fs::temp_directory_path() / ("train_gpt-" + std::to_string(::getpid()));
    const bool same = demonstrate(directory);
    fs::remove_all(directory);
    return SignalRequests::stop() != 0 ? SignalRequests::exit_status() : same ? 0 : 1;
  } catch (const Error& e) {  // names the field, the expected and the actual value
    std::fprintf(stderr, "train_gpt: %s\n", e.what());
    return static_cast<int>(e.status());
  }
}
