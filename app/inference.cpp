// The configuration of inference, from a model and options.
#include "app/inference.h"

#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>

#include "app/memory.h"
#include "app/output.h"
#include "app/resolve.h"
#include "hub/peft.h"
#include "train/check.h"

namespace tessera {
namespace {

// No random initialization, because all values are loaded.
std::unique_ptr<LanguageModel> make_frozen(const ModelConfig& config) {
  std::unique_ptr<LanguageModel> model = make_model(config);
  model->freeze();
  for (Parameter* p : model->parameters()) p->init = Init::zeros();
  return model;
}

}  // namespace

Inference open_inference(const std::string& from, const Args& args) {
  Inference out;
  const auto base = std::ranges::find(args, "base", [](const auto& arg) { return arg.first; });
  out.from = open_pretrained(from, base == args.end() ? Base() : Base(base->second));
  if (is_peft_folder(from) && !out.from.base_hash.empty()) known_base(out.from, from);
  out.tokenizer = Tokenizer::open_folder(out.from.tokenizer());
  TypedOptions run;
  run.optim.dtype = out.from.dtype == DType::bfloat16 ? DType::bfloat16 : DType::float32;
  run.data.source = "";
  for (const auto& [name, text] : args) set_option(run, name, text);
  const bool no_axes = !run.ranks && !run.is_set("dp") && !run.is_set("tp") && !run.is_set("pp") && !run.is_set("cp");
  if (no_axes && !has_processes(resolve(run).plan)) run.ranks = 1;  // instead of the size of an MPI job
  take_model(run, out.from.config);
  if (!out.from.merged.empty() && run.model.quantize.codec != Codec::none)
    bad_usage("--quantize: expected none for a model with merged adapters ({}), got {}", out.from.merged,
              value_name(run.model.quantize.codec));
  if (out.from.dtype == DType::bfloat16 && !run.is_set("dtype"))
    out.from.notes.push_back(one_line(out.from.path.string()) +
                             ": stored and computed in bf16; use --dtype fp32 to compute in fp32");
  say_notes(out.from.notes);
  if (run.optim.dtype == DType::float64)
    throw Error("--dtype: fp64 is supported only by tessera verify; expected fp32 or bf16");
  constexpr int64_t kSequences = 4;  // sequences per rank and batch
  TrainConfig config = resolve(run);
  if (!run.is_set("batch")) config.optim.batch = kSequences * config.plan.dp;
  check_trainer(config);
  config.make = make_frozen;
  check_memory_for_inference(config);
  out.run = {std::move(config), run.own, run.set};
  return out;
}

std::unique_ptr<Trainer> inference_trainer(const Inference& inference, Communicator& world) {
  const TrainConfig& job = inference.run.config;
  auto shard = std::make_unique<Trainer>(
      job, synthetic_sequences(job.model.vocab, job.model.context, job.optim.batch, 0), world);
  read_values(shard->state().strategy().resident_units(), first_weights(inference.from, job.model));
  world.barrier();
  return shard;
}

}  // namespace tessera
