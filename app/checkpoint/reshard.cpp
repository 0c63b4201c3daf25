// A checkpoint's tensors, written again in other files.
#include "app/checkpoint/reshard.h"

#include <fmt/format.h>

#include <set>

#include "app/example_options.h"
#include "app/generate/inference.h"
#include "app/job_of.h"
#include "app/options.h"
#include "app/output.h"
#include "app/progress.h"
#include "app/run/directory.h"
#include "data/examples.h"
#include "data/jsonl.h"
#include "hub/folder.h"
#include "parallel/comm/launch.h"
#include "tensor/error.h"
#include "train/checkpoint/directory.h"
#include "train/checkpoint/state.h"
#include "train/quantize/layers.h"

namespace tessera {

namespace fs = std::filesystem;
namespace {

void write_file_of(const fs::path& file, const SavedTensors& saved, const std::vector<SavedPart>& parts,
                   std::map<std::string, std::string> about, bool whole) {
  std::vector<TensorBytes> listed;
  for (const SavedPart& p : parts) {
    const DType dtype = saved.at(p.name).dtype;
    listed.push_back(
        {p.name, dtype, whole ? std::vector<int64_t>(p.whole.begin(), p.whole.end()) : std::vector{p.count}, {}});
  }
  about.erase("format");
  if (whole)
    about.erase("parts");
  else
    about["parts"] = describe_parts(parts);
  std::vector<std::byte> bytes;
  const auto part = [&](size_t i) -> std::span<const std::byte> {
    const SavedPart& p = parts[i];
    const int64_t element = size_of(listed[i].dtype);
    const TensorReader read = saved.reader(p.name);
    bytes.resize(static_cast<size_t>(p.count * element));
    for_each_run(p.whole, p.shard, p.begin, p.begin + p.count, [&](int64_t here, int64_t begin, int64_t count) {
      read(begin, std::span(bytes).subspan(static_cast<size_t>((here - p.begin) * element),
                                           static_cast<size_t>(count * element)));
    });
    return bytes;
  };
  stream_safetensors(file, listed, part, about);
}

std::vector<std::vector<SavedPart>> whole_parts(const SavedTensors& saved) {
  std::vector<SavedPart> all;
  for (const auto& [name, tensor] : saved.all()) {
    const Shape shape(tensor.shape);
    all.push_back({.name = name, .whole = shape, .count = shape.numel()});
  }
  return {all};
}

// Ranks that train alone have a state each, which no other number of them could go on with.
void check_replicas_stay(const Plan& before, const Plan& after) {
  if (before.dp_mode == DataMode::diloco && before.dp != after.dp)
    throw Error(
        fmt::format("--dp: each data rank of --dp-mode diloco keeps a state of its own; expected {}, as many as "
                    "the run has, found {}",
                    before.dp, after.dp));
}

}  // namespace

void reshard(const CheckpointOptions& o) {
  std::vector<std::string> passed_over;
  const Checkpoint from = find_checkpoint(o.from, passed_over);
  TrainOptions run;
  apply_config_file(run, (from.path / "config.toml").string());
  const Plan before = job_of(run).plan;
  if (!o.layout.empty()) {  // which is a whole one, not a change of the run's
    forget(run, {"ranks", "dp", "tp", "pp", "cp", "chunks", "shard_ranks", "zero", "schedule", "servers"});
  }
  for (const auto& [name, text] : o.layout) set_option(run, name, text);
  run.out = o.out;
  run.resume = false;
  validate(run);
  Job job = job_of(run);
  check_replicas_stay(before, job.plan);
  job.model = model_config(job, Tokenizer::open_folder(from.path)->vocab_size());
  const RunDirectory directory(run);
  NewCheckpoint made(directory.checkpoints(), from.step);
  size_t files = 0;
  for (const char* stem : {kModel, kOptimizer}) {
    if (!SavedTensors::are_in(from.path, stem)) continue;
    const SavedTensors saved(from.path, stem);
    const bool whole = o.layout.empty();
    const auto ranks = whole ? whole_parts(saved) : parts_of_ranks(job, stem == kOptimizer);
    std::set<std::string> names;
    for (const auto& parts : ranks)
      for (const SavedPart& p : parts) names.insert(p.name);
    saved.expect_no_others(names);
    for (size_t r = 0; r < ranks.size(); ++r, ++files)
      write_file_of(made.path() / (whole ? fmt::format("{}.safetensors", stem) : part_name(stem, r, ranks.size())),
                    saved, ranks[r], saved.files()[0]->metadata(), whole);
  }
  for (const char* name : {"tokenizer.json", "pushes.txt", "pulled.safetensors"})
    if (std::error_code error; fs::exists(from.path / name, error)) fs::copy_file(from.path / name, made.path() / name);
  write_file(made.path() / "config.toml", to_toml(run));
  directory.write_config(run);
  made.finish(from.about, 1);
  print(fmt::format("{} is in {}, in {} files\n", one_line(from.path.string()), one_line(o.out), files));
}

// From a model to a folder.

namespace {

// Other programs' kernels read so many codes at once.
constexpr int64_t kMultiple = 32;

// Before hours of work.
void check_sizes(const ModelConfig& config) {
  const std::unique_ptr<LanguageModel> model = make_model(config);
  std::set<std::string> names;
  for (int64_t i = 0; i < config.layers; ++i)
    for (Linear* l : model->layer(i).all<Linear>()) names.insert(l->parameter(l->weight).name);
  hub_config(config, DType::float32);  // which says what the hub has no family for
  for (const HubTensor& t : hub_tensors(config))
    for (const HubTensor::Piece& piece : t.pieces)
      if (names.contains(t.name) && (piece.rows % kMultiple != 0 || t.shape[1] % kMultiple != 0))
        throw Error(fmt::format("{} is ({}, {}); expected multiples of {}, which is what GPTQ's files can hold",
                                piece.name, piece.rows, t.shape[1], kMultiple));
}

void say(const QuantizedWeight& weight, bool is_measured) {
  std::string line = fmt::format("{} ({}, {})", weight.name, weight.matrix.rows, weight.matrix.columns);
  if (is_measured) line += fmt::format(": {:.3g}% of its output's square lost", 100 * weight.error);
  say_above_progress(line);
}

}  // namespace

void quantize(const CheckpointOptions& o) {
  const bool by_gptq = o.method == "gptq";
  if (by_gptq && o.calibrate.empty())
    throw Error("--calibrate: expected a text like those that the model is to read; found none");
  for (const auto& [name, value] : o.layout)
    if ((name == "template" || name == "train-on" || name == "skip-bad") && !is_jsonl_name(o.calibrate))
      throw Error(fmt::format("--{}: goes with --calibrate FILE.jsonl, found {}", name,
                              o.calibrate.empty() ? "none" : "--calibrate " + one_line(o.calibrate)));
  Words words = o.layout;
  words.emplace_back("dtype", "fp32");
  if (!o.calibrate.empty()) words.emplace_back("data", o.calibrate);
  const Inference model = open_inference(o.from, words);
  const Pretrained& from = model.from;
  if (from.config.lora.rank > 0)
    throw Error(fmt::format("{}: it has adapters; expected a model without, as checkpoint export --merge makes",
                            one_line(o.from)));
  if (from.gptq) throw Error(fmt::format("{}: it is quantised already; expected one that is not", one_line(o.from)));
  check_sizes(from.config);
  EvaluationText text;
  if (!o.calibrate.empty()) text = evaluation_text(o.calibrate, *model.tokenizer, example_options(model.run));
  for (const std::string& note : text.notes) std::fputs((one_line(note) + "\n").c_str(), stderr);
  const QuantizeOptions options{.method = by_gptq ? Rounding::gptq : Rounding::nearest,
                                .group = o.group,
                                .windows = o.windows,
                                .at_once = model.run.optim.batch};
  make_model_folder(o.out, [&](const std::filesystem::path& made) {
    HubWeights weights{.dtype = from.dtype, .tensors = from.tensors, .stored = from.dtype, .gptq = {.group = o.group}};
    launch(ranks_of("checkpoint", model.run, model.job.plan), [&](Communicator& world) {
      const std::unique_ptr<Trainer> part = part_of(model, world);
      try {
        for (QuantizedWeight& w : quantize_layers(part->model(), text.rows.get(), options,
                                                  [&](const QuantizedWeight& one) { say(one, text.rows != nullptr); }))
          weights.codes.emplace(w.name, std::move(w.matrix));
      } catch (const FieldError& e) {
        throw Error(fmt::format("--{}: {}", e.field(), std::string(e.what()).substr(e.field().size() + 4)), e.status());
      }
    });
    write_hub_folder(made, from.config, weights);
    write_tokenizer(made, *model.tokenizer);
  });
  print(fmt::format("{} is in {}, its layers in 4 bits in groups of {}, by {}\n", one_line(o.from), one_line(o.out),
                    o.group, by_gptq ? "GPTQ" : "rounding to nearest"));
}

}  // namespace tessera
