// Options to a job, and weights into its parts.
#include "app/generate/inference.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <memory>
#include <string_view>

#include "app/example_options.h"
#include "app/job_of.h"
#include "app/options.h"
#include "app/output.h"
#include "app/progress.h"
#include "app/run/pretrained.h"
#include "tensor/error.h"

namespace tessera {

namespace {

// All values are read: none is drawn before.
std::unique_ptr<LanguageModel> make_frozen(const ModelConfig& config) {
  std::unique_ptr<LanguageModel> model = make_model(config);
  model->freeze();
  for (Parameter* p : model->parameters()) p->init = Init::zeros();
  return model;
}

}  // namespace

Inference open_inference(const std::string& from, const Words& words) {
  Inference out;
  out.from = open_pretrained(from);
  for (const std::string& why : out.from.passed_over)
    std::fputs((one_line("passed over a checkpoint: " + why) + "\n").c_str(), stderr);
  out.tokenizer = Tokenizer::open_folder(out.from.path);
  TrainOptions& run = out.run;
  run.optim.dtype = out.from.dtype == DType::bfloat16 ? DType::bfloat16 : DType::float32;
  run.data = "";
  for (const auto& [name, text] : words) set_option(run, name, text);
  if (!run.ranks && !run.gives("dp") && !run.gives("tp") && !run.gives("pp") && !run.gives("cp")) run.ranks = 1;
  take_model(run, out.from.config);
  if (run.optim.dtype == DType::float64) throw Error("--dtype: fp64 is for tessera verify; expected fp32 or bf16");
  if (out.tokenizer->vocab_size() > out.from.config.vocab)
    throw InputError(fmt::format("{}: the tokenizer has {} tokens, and the model's vocabulary {}",
                                 out.from.path.string(), out.tokenizer->vocab_size(), out.from.config.vocab));
  constexpr int64_t kSequences = 4;  // sequences of a rank, at once
  if (!run.gives("batch")) run.optim.batch = kSequences * job_of(run).plan.dp;
  try {
    check_sizes(job_of(run));
  } catch (const Error& e) {
    throw Error(with_options(e.what()), e.status());
  }
  check_plan(run);
  out.job = job_of(run);
  out.job.make = make_frozen;
  ask_for_inference(out.job);
  return out;
}

std::unique_ptr<Trainer> part_of(const Inference& inference, Communicator& world) {
  const Job& job = inference.job;
  auto part =
      std::make_unique<Trainer>(job, counted_sequences(job.model.vocab, job.model.context, job.optim.batch, 0), world);
  read_values(part->strategy().residents(), first_weights(inference.from, job.model));
  world.barrier();
  return part;
}

// The choice of a tokenizer.

namespace {

constexpr std::string_view kSized = "bpe-";  // with the most tokens behind it
constexpr double kLeastVocab = 256;          // tokens: one for each byte

}  // namespace

TokenizerChoice tokenizer_choice(const std::optional<std::string>& name, const std::string& otherwise, bool quiet) {
  std::error_code error;
  const auto progress = std::make_shared<Progress>(Progress::for_stderr(0, quiet));
  TokenizerChoice out{
      .name = name.value_or(""), .otherwise = otherwise, .progress = [progress](int64_t made, int64_t most) {
        progress->work(fmt::format("training a byte-level BPE tokenizer: {} of at most {} tokens", made, most));
      }};
  if (!name || *name == "char" || *name == "bytes" || *name == "bpe" || std::filesystem::is_directory(*name, error))
    return out;
  if (name->starts_with(kSized)) {
    out.name = "bpe";
    out.vocab_size = parse_integer("--tokenizer bpe-N", name->substr(kSized.size()), {kLeastVocab, 1e9});
    return out;
  }
  throw Error(fmt::format(
      "--tokenizer: expected char, bytes, bpe, bpe-N, or a folder with tokenizer.json, or vocab.json and merges.txt, "
      "found '{}'{}",
      *name, did_you_mean(*name, {"char", "bytes", "bpe"})));
}

}  // namespace tessera
