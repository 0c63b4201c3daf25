// The command `train`: one loop from data to a run directory.
#include <fmt/format.h>

#include <csignal>

#include "app/commands.h"
#include "app/plan.h"
#include "app/run_directory.h"
#include "app/signals.h"
#include "app/tokenizer_choice.h"
#include "app/train_output.h"
#include "models/sample.h"
#include "tensor/cpu/amx.h"
#include "tensor/cpu/dnnl_matmul.h"
#include "tensor/cpu/vectorize.h"
#include "tensor/error.h"

namespace tessera {
namespace {

constexpr int64_t kSampleTokens = 300;

std::string sample_text(Gpt& model, const Dataset& dataset, int64_t seed) {
  std::vector<int32_t> written;
  const std::vector<int32_t> prompt(1, dataset.val[0]);
  const SampleOptions options{
      .temperature = 0.8, .seed = static_cast<uint64_t>(seed), .vocab = dataset.tokenizer->vocab_size()};
  sample(model, prompt, kSampleTokens, options, [&](int32_t token) {
    written.push_back(token);
    return true;
  });
  return dataset.tokenizer->decode(written);
}

// The model as it was saved last: no rank needs to hold the whole of it while it is trained.
std::string sample_of_saved(const RunDirectory& run, Trainer& trainer, const Dataset& dataset, const TrainOptions& o) {
  std::vector<std::string> passed_over;
  Gpt model(trainer.model().config);
  model.materialize(0, make_arena(), dtype_named(o.dtype), DType::float32);
  load_model(model, find_checkpoint(run.path(), passed_over));
  return sample_text(model, dataset, o.seed);
}

void introduce(TrainOutput& output, const TrainOptions& o, Trainer& trainer, const Dataset& d,
               const RunDirectory& run) {
  output.message(describe_model(o, trainer.model()));
  output.message(fmt::format("{}: {} characters of training text as {} tokens ({}), {} tokens held out", d.source,
                             short_number(static_cast<double>(d.train_bytes)),
                             short_number(static_cast<double>(d.train.size())), d.tokenizer->kind(),
                             short_number(static_cast<double>(d.val.size()))));
  output.message(fmt::format(
      "{} steps of {} tokens on {}, {} of each ({}); the run is written to {}", o.steps, trainer.tokens_per_step(),
      describe_plan(o), cpu::threads() == 1 ? "one thread" : fmt::format("{} threads", cpu::threads()),
      o.dtype == "bf16" && cpu::has_amx() ? "our own products on AMX tiles" : cpu::matmul_library(),
      run.path().string()));
  if (o.dtype == "bf16" && !cpu::has_bfloat16_matmul())
    output.message("bf16 is emulated: this machine has no AVX-512, so products are made in fp32 of rounded inputs");
}

// True at every `every`-th step; the last step is the caller's.
bool due(int64_t step, int64_t every) { return every > 0 && step % every == 0; }

// What the ranks of one process share, all of it read only but for the run's folder, which rank 0 writes.
struct Run {
  const TrainOptions& options;
  const Dataset& dataset;
  const Sequences& sequences;
  const RunDirectory& directory;
};

// The steps of one rank. Returns the exit status; only rank 0 has an output.
int train_steps(const Run& run, Trainer& trainer, TrainOutput* output) {
  const TrainOptions& o = run.options;
  const auto save = [&] { run.directory.save(trainer, o, run.dataset); };
  const auto evaluate = [&] {
    const double loss = trainer.mean_loss(run.dataset.val);
    if (output) output->eval(trainer.steps_done(), {loss, run.dataset.bits_per_byte(loss)});
  };
  while (trainer.steps_done() < o.steps) {
    const StepReport report = trainer.step(interrupted() != 0);
    if (output) output->step(report);
    if (report.stop) {
      save();
      if (output)
        output->message(fmt::format("stopped after step {}; tessera train --resume --out {} goes on", report.step,
                                    run.directory.path().string()));
      return 128 + (interrupted() != 0 ? interrupted() : SIGTERM);
    }
    if (report.step == o.steps) break;
    if (due(report.step, o.eval_every)) evaluate();
    if (due(report.step, o.save_every)) save();
  }
  save();
  evaluate();
  return 0;
}

int train_rank(const Run& run, Communicator& world) {
  const TrainOptions& o = run.options;
  Trainer trainer(o, run.sequences, world);
  std::vector<std::string> passed_over;
  if (o.resume) run.directory.resume(trainer, o, run.dataset, passed_over);
  if (o.steps < trainer.steps_done())
    throw Error(fmt::format("--steps: expected at least the {} that {} has done, found {}", trainer.steps_done(),
                            run.directory.path().string(), o.steps));
  world.barrier();  // everybody has read what there is before anything is written
  if (world.rank() != 0) {
    const int status = train_steps(run, trainer, nullptr);
    usage_of(trainer);
    return status;
  }
  run.directory.write_config(o);
  TrainOutput output(o, run.directory.path(), trainer.steps_done());
  for (const std::filesystem::path& path : run.directory.removed())
    output.message("removed what a killed run had left half-written: " + path.string());
  for (const std::string& why : passed_over) output.message("passed over a checkpoint: " + why);
  introduce(output, o, trainer, run.dataset, run.directory);
  if (o.resume)
    output.message(trainer.steps_done() > 0 ? fmt::format("going on after step {}", trainer.steps_done())
                                            : "no checkpoint was saved yet: beginning at step 1");
  const int status = train_steps(run, trainer, &output);
  const RunUsage usage = usage_of(trainer);
  if (status != 0) return status;
  const std::string sample = o.format == "json" ? "" : sample_of_saved(run.directory, trainer, run.dataset, o);
  output.summary(trainer, usage, sample, run.directory.path());
  return 0;
}

}  // namespace

int run_train(const TrainOptions& o) {
  const std::string usual = o.model.starts_with("gpt2") ? "bpe" : "char";
  const Dataset dataset = dataset_for(o.data, tokenizer_choice(o.tokenizer, usual, o.quiet));
  gpt_config(o, dataset.tokenizer->vocab_size());  // refuses a vocabulary that is too small
  const Sequences sequences =
      sequences_of(dataset, sizes_of(o).context, o.batch, static_cast<uint64_t>(o.seed));  // refuses a short text
  const RunDirectory directory(o);
  int status = 0;
  launch(launch_options(o), [&](Communicator& world) {
    const int mine = train_rank({o, dataset, sequences, directory}, world);
    if (world.rank() == 0) status = mine;
  });
  return status;
}

}  // namespace tessera
