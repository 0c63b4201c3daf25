// The command `train`: the data, the run's folder, and the ranks.
#include <fmt/format.h>

#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "app/attention_choice.h"
#include "app/commands.h"
#include "app/device.h"
#include "app/plan.h"
#include "app/step_graph.h"
#include "app/tokenizer_choice.h"
#include "app/training.h"
#include "models/sample.h"
#include "tensor/cpu/amx.h"
#include "tensor/cpu/dnnl_matmul.h"
#include "tensor/cpu/vectorize.h"
#include "tensor/error.h"

namespace tessera {
namespace {

constexpr int64_t kSampleTokens = 300;

Dataset dataset_of(const TrainOptions& o, bool quiet) {
  const std::string usual = o.model.starts_with("gpt2") ? "bpe" : "char";
  Dataset dataset = dataset_for(o.data, tokenizer_choice(o.tokenizer, usual, quiet));
  gpt_config(o, dataset.tokenizer->vocab_size());  // refuses a vocabulary that is too small
  return dataset;
}

// Refuses a text that is too short.
Sequences sequences_for(const TrainOptions& o, const Dataset& dataset) {
  return sequences_of(dataset, sizes_of(o).context, o.batch, static_cast<uint64_t>(o.seed));
}

int train_rank(const Run& run, Communicator& world) {
  return run.options.dp_mode == "ps-async" ? train_asynchronously(run, world) : train_in_steps(run, world);
}

// Rank 0's text on every rank.
std::string from_rank_0(Communicator& world, const std::string& text) {
  const ArenaPtr arena = make_arena();
  const Tensor size = Tensor::of<int64_t>(std::vector<int64_t>{static_cast<int64_t>(text.size())}, {1}, arena);
  world.broadcast(size, 0);
  const Tensor letters = Tensor::zeros({size.item<int64_t>()}, DType::int32, arena);
  if (world.rank() == 0) std::copy(text.begin(), text.end(), letters.data<int32_t>());
  world.broadcast(letters, 0);
  const std::vector<int32_t> all = letters.to_vector<int32_t>();
  return {all.begin(), all.end()};
}

// Each process opens the data for itself, after rank 0 has made what is missing.
int train_under_mpi(const TrainOptions& o) {
  int status = 0;
  launch(launch_options(o), [&](Communicator& world) {
    std::optional<Dataset> dataset;
    std::optional<RunDirectory> directory;
    if (world.rank() == 0) {
      dataset = dataset_of(o, o.quiet);
      sequences_for(o, *dataset);
      directory.emplace(o);
    }
    const std::string path = from_rank_0(world, directory ? directory->path().string() : "");
    if (!directory) {
      dataset = dataset_of(o, true);
      directory.emplace(std::filesystem::path(path));
    }
    const Sequences sequences = sequences_for(o, *dataset);
    status = train_rank({o, *dataset, sequences, *directory}, world);
  });
  return status;
}

// Rows of logits that do not begin at multiples of 16 bytes are read element by element, by us and by cuBLASLt. Empty
// where they do; and of a run that goes on, whose vocabulary is what it is.
std::string vocab_hint(const TrainOptions& o, int64_t vocab) {
  constexpr int64_t kVector = 16, kRound = 64;
  const int64_t parts = axes_of(o).tp, row = parts * kVector / size_of(dtype_named(o.dtype)), round = parts * kRound;
  if (vocab % row == 0 || o.resume) return "";
  return fmt::format(
      "a vocabulary of {} does not divide by {}, which makes a GPU slow at the head and the loss; --vocab "
      "{} pads it",
      vocab, row, (vocab + round - 1) / round * round);
}

// The model, the data and the plan.
void introduce(TrainOutput& output, const Run& run, const Beginning& b) {
  const TrainOptions& o = run.options;
  const Dataset& d = run.dataset;
  output.message(describe_model(o, b.model));
  output.message(fmt::format("{}: {} characters of training text as {} tokens ({}), {} tokens held out", d.source,
                             short_number(static_cast<double>(d.train_bytes)),
                             short_number(static_cast<double>(d.train.size())), d.tokenizer->kind(),
                             short_number(static_cast<double>(d.val.size()))));
  output.message(fmt::format("{} on {}, {} of each ({}); the run is written to {}", b.steps, describe_plan(o),
                             cpu::threads() == 1 ? "one thread" : fmt::format("{} threads", cpu::threads()),
                             o.device == "cuda"                    ? describe_device()
                             : o.dtype == "bf16" && cpu::has_amx() ? "our own products on AMX tiles"
                                                                   : cpu::matmul_library(),
                             run.directory.path().string()));
  if (o.device == "cuda") {
    output.message(describe_attention(o));
    const std::string why = no_graph_because(o, static_cast<int>(ranks_of(o)));
    output.message(why.empty() ? "CUDA graph: on (a step is captured once and launched again)"
                               : fmt::format("CUDA graph: off ({})", why));
    if (const std::string hint = vocab_hint(o, b.model.config.vocab); !hint.empty()) output.message(hint);
  }
  if (o.device == "cpu" && o.dtype == "bf16" && !cpu::has_bfloat16_matmul())
    output.message("bf16 is emulated: this machine has no AVX-512, so products are made in fp32 of rounded inputs");
}

}  // namespace

std::unique_ptr<TrainOutput> begin_output(const Run& run, const Beginning& b) {
  run.directory.write_config(run.options);
  auto output = std::make_unique<TrainOutput>(run.options, run.directory.path(), b.done);
  for (const std::filesystem::path& path : run.directory.removed())
    output->message("removed what a killed run had left half-written: " + path.string());
  for (const std::string& why : b.passed_over) output->message("passed over a checkpoint: " + why);
  introduce(*output, run, b);
  if (run.options.resume)
    output->message(b.done > 0 ? fmt::format("going on after step {}", b.done)
                               : "no checkpoint was saved yet: beginning at step 1");
  return output;
}

void say_stopped(const Run& run, int64_t step, TrainOutput& output) {
  output.message(run.options.no_save ? fmt::format("stopped after step {}; nothing was saved (--no-save)", step)
                                     : fmt::format("stopped after step {}; tessera train --resume --out {} goes on",
                                                   step, run.directory.path().string()));
}

void check_steps_done(const Run& run, int64_t done) {
  if (run.options.steps < done)
    throw Error(fmt::format("--steps: expected at least the {} that {} has done, found {}", done,
                            run.directory.path().string(), run.options.steps));
}

std::string sample_of_saved(const Run& run, const GptConfig& config) {
  if (run.options.format == "json" || run.options.no_save) return "";
  std::vector<std::string> passed_over;
  Gpt model(config);
  model.materialize(0, rank_arena(run.options.device, 0), dtype_named(run.options.dtype), DType::float32);
  load_model(model, find_checkpoint(run.directory.path(), passed_over));
  std::vector<int32_t> written;
  const std::vector<int32_t> prompt(1, run.dataset.val[0]);
  const SampleOptions options{.temperature = 0.8,
                              .seed = static_cast<uint64_t>(run.options.seed),
                              .vocab = run.dataset.tokenizer->vocab_size()};
  sample(model, prompt, kSampleTokens, options, [&](int32_t token) {
    written.push_back(token);
    return true;
  });
  return run.dataset.tokenizer->decode(written);
}

int run_train(const TrainOptions& o) {
  choose_kernels(o);
  if (backend_of(o) == Backend::mpi) return train_under_mpi(o);
  const Dataset dataset = dataset_of(o, o.quiet);
  const Sequences sequences = sequences_for(o, dataset);
  const RunDirectory directory(o);
  int status = 0;
  launch(launch_options(o), [&](Communicator& world) {
    const int mine = train_rank({o, dataset, sequences, directory}, world);
    if (world.rank() == 0) status = mine;
  });
  return status;
}

}  // namespace tessera
