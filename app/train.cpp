// The command `train`: one loop from data to a run directory.
#include <fmt/format.h>

#include "app/commands.h"
#include "app/run_directory.h"
#include "app/signals.h"
#include "app/tokenizer_choice.h"
#include "app/train_output.h"
#include "models/sample.h"
#include "tensor/cpu/amx.h"
#include "tensor/cpu/dnnl_matmul.h"
#include "tensor/error.h"

namespace tessera {
namespace {

constexpr int64_t kSampleTokens = 300;

std::string sample_text(Trainer& trainer, const Dataset& dataset, int64_t seed) {
  std::vector<int32_t> written;
  const std::vector<int32_t> prompt(1, dataset.val[0]);
  const SampleOptions options{
      .temperature = 0.8, .seed = static_cast<uint64_t>(seed), .vocab = dataset.tokenizer->vocab_size()};
  sample(trainer.model(), prompt, kSampleTokens, options, [&](int32_t token) {
    written.push_back(token);
    return true;
  });
  return dataset.tokenizer->decode(written);
}

void introduce(TrainOutput& output, const TrainOptions& o, Trainer& trainer, const Dataset& d,
               const RunDirectory& run) {
  output.message(describe_model(o, trainer.model()));
  output.message(fmt::format("{}: {} characters of training text as {} tokens ({}), {} tokens held out", d.source,
                             short_number(static_cast<double>(d.train_bytes)),
                             short_number(static_cast<double>(d.train.size())), d.tokenizer->kind(),
                             short_number(static_cast<double>(d.val.size()))));
  output.message(fmt::format(
      "{} steps of {} tokens on {} threads ({}); the run is written to {}", o.steps, trainer.tokens_per_step(),
      cpu::threads(), o.dtype == "bf16" && cpu::has_amx() ? "our own products on AMX tiles" : cpu::matmul_library(),
      run.path().string()));
  if (o.dtype == "bf16" && !cpu::has_bfloat16_matmul())
    output.message("bf16 is emulated: this machine has no AVX-512, so products are made in fp32 of rounded inputs");
}

// True at every `every`-th step; the last step is the caller's.
bool due(int64_t step, int64_t every) { return every > 0 && step % every == 0; }

}  // namespace

int run_train(const TrainOptions& given) {
  if (given.threads_per_rank) cpu::set_threads(static_cast<int>(*given.threads_per_rank));
  const std::string usual = given.model.starts_with("gpt2") ? "bpe" : "char";
  const Dataset dataset = dataset_for(given.data, tokenizer_choice(given.tokenizer, usual, given.quiet));
  Trainer trainer(given, dataset);
  const RunDirectory run(given);
  std::vector<std::string> passed_over;
  if (given.resume) run.resume(trainer, given, dataset, passed_over);
  if (given.steps < trainer.steps_done())
    throw Error(fmt::format("--steps: expected at least the {} that {} has done, found {}", trainer.steps_done(),
                            run.path().string(), given.steps));
  run.write_config(given);
  TrainOutput output(given, run.path(), trainer.steps_done());
  for (const std::filesystem::path& path : run.removed())
    output.message("removed what a killed run had left half-written: " + path.string());
  for (const std::string& why : passed_over) output.message("passed over a checkpoint: " + why);
  introduce(output, given, trainer, dataset, run);
  if (given.resume)
    output.message(trainer.steps_done() > 0 ? fmt::format("going on after step {}", trainer.steps_done())
                                            : "no checkpoint was saved yet: beginning at step 1");

  const auto save = [&] { run.save(trainer, given, dataset); };
  while (trainer.steps_done() < given.steps) {
    const StepReport report = trainer.step();
    output.step(report);
    if (const int signal = interrupted()) {
      save();
      output.message(fmt::format("stopped after step {}; tessera train --resume --out {} goes on", report.step,
                                 run.path().string()));
      return 128 + signal;
    }
    if (report.step == given.steps) break;
    if (due(report.step, given.eval_every)) output.eval(report.step, trainer.validate());
    if (due(report.step, given.save_every)) save();
  }
  save();
  output.eval(trainer.steps_done(), trainer.validate());
  output.summary(trainer, given.format == "json" ? "" : sample_text(trainer, dataset, given.seed), run.path());
  return 0;
}

}  // namespace tessera
