// The command `checkpoint`: import, export, inspect, reshard and quantize models.
#include <fmt/ranges.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <system_error>
#include <vector>

#include "app/commands.h"
#include "app/dataset.h"
#include "app/inference.h"
#include "app/output.h"
#include "app/pretrained.h"
#include "app/report/table.h"
#include "app/resolve.h"
#include "data/json_rows.h"
#include "data/tokenizer/described.h"
#include "hub/folder.h"
#include "hub/peft.h"
#include "train/quantize/layers.h"
#include "train/run/run_directory.h"

namespace tessera {

namespace fs = std::filesystem;
namespace {

// Creates the folder atomically: `fill` writes into an adjacent temporary folder, which is then renamed. Throws
// OutputError naming --out if the name exists.
void make_model_folder(const std::string& out, const std::function<void(const fs::path& made)>& fill) {
  fs::path folder = fs::absolute(out).lexically_normal();
  if (!folder.has_filename()) folder = folder.parent_path();
  const auto refuse = [&] {
    throw OutputError(fmt::format("--out: {} already exists; expected a new directory", folder.string()));
  };
  if (is_there(folder)) refuse();
  make_directories(folder.parent_path());
  const TemporaryDirectory temporary(folder);
  const fs::path made = temporary.path() / "model";
  make_directories(made);
  fill(made);
  std::error_code error;
  fs::rename(made, folder, error);
  if (error && is_there(folder)) refuse();
  if (error) throw OutputError(fmt::format("cannot create {}: {}", folder.string(), error.message()));
}

bool is_qwen2_tokenizer(const Tokenizer& tokenizer) {
  return tokenizer.files().at("tokenizer_config.json").find("\"Qwen2Tokenizer") != std::string::npos;
}

// Writes the tokenizer in Hugging Face format, with `turn_ends` added to its generation settings, and copies its token
// ids to an existing config.json. Unset ids are null, because a missing key means the model family's default.
void write_tokenizer(const fs::path& folder, const Tokenizer& tokenizer, const std::vector<int32_t>& turn_ends = {}) {
  nlohmann::json settings = nlohmann::json::parse(tokenizer.generation_config());
  std::vector<int32_t> ends = generation_ends(tokenizer);
  for (const int32_t token : turn_ends)
    if (std::ranges::find(ends, token) == ends.end()) settings["eos_token_id"] = (ends.push_back(token), ends);
  for (const auto& [name, text] : tokenizer.files())
    write_file(folder / name, name == "generation_config.json" ? settings.dump(2) + "\n" : text);
  const fs::path model = folder / "config.json";
  if (!is_there(model)) return;
  nlohmann::ordered_json config = nlohmann::ordered_json::parse(read_file(model));
  if (config["model_type"] == "qwen2" && !is_qwen2_tokenizer(tokenizer))
    say_notes(
        {"AutoTokenizer in transformers 5 replaces the rules of every qwen2 folder with those of Qwen2's own "
         "tokenizer; "
         "load the tokenizer of this folder with PreTrainedTokenizerFast.from_pretrained()"});
  for (const char* const key : {"bos_token_id", "eos_token_id", "pad_token_id"})
    config[key] = settings.value(key, nlohmann::json());
  write_file(model, config.dump(2) + "\n");
}

void write_tensor_file(const fs::path& file, const SavedTensors& saved, const std::vector<SavedSlice>& shards,
                       std::map<std::string, std::string> about, bool full) {
  std::vector<TensorBytes> listed;
  for (const SavedSlice& p : shards) {
    const DType dtype = saved.at(p.name).dtype;
    listed.push_back({p.name,
                      dtype,
                      full ? std::vector<int64_t>(p.full_shape.begin(), p.full_shape.end()) : std::vector{p.count},
                      {}});
  }
  about.erase("format");
  if (full)
    about.erase("parts");
  else
    about["parts"] = describe_parts(shards);
  std::vector<std::byte> bytes;
  const auto shard_bytes = [&](size_t i) -> std::span<const std::byte> {
    const SavedSlice& p = shards[i];
    const int64_t element = element_size(listed[i].dtype);
    const TensorReader read = saved.reader(p.name);
    bytes.resize(static_cast<size_t>(p.count * element));
    for_each_run(p.full_shape, p.shard, p.begin, p.begin + p.count, [&](int64_t here, int64_t begin, int64_t count) {
      read(begin, std::span(bytes).subspan(static_cast<size_t>((here - p.begin) * element),
                                           static_cast<size_t>(count * element)));
    });
    return bytes;
  };
  stream_safetensors(file, listed, shard_bytes, about);
}

std::vector<std::vector<SavedSlice>> full_tensor_parts(const SavedTensors& saved) {
  std::vector<SavedSlice> all;
  for (const auto& [name, tensor] : saved.all()) {
    const Shape shape(tensor.shape);
    all.push_back({.name = name, .full_shape = shape, .count = shape.numel()});
  }
  return {all};
}

// DiLoCo replicas have separate states, so their number must not change.
void check_replicas_stay(const Plan& before, const Plan& after) {
  if (before.dp_mode == DataMode::diloco && before.dp != after.dp)
    bad_usage(
        "--dp: each data rank of --dp-mode diloco has a separate state; expected {}, the number of data ranks of the "
        "run, got {}",
        before.dp, after.dp);
}

// Writes the newest checkpoint of FROM as a new run: a file per rank of the layout or, without layout options, full
// tensors. One tensor is in memory at a time.
void reshard(const CheckpointOptions& o) {
  std::vector<std::string> passed_over;
  const Checkpoint from = find_checkpoint(o.from, passed_over);
  TypedOptions run;
  apply_config_file(run, (from.path / "config.toml").string());
  const Plan before = resolve(run).plan;
  if (!o.layout.empty()) {  // the options specify the complete layout; nothing is taken from the run's layout
    forget(run, {"ranks", "dp", "tp", "pp", "cp", "chunks", "shard_ranks", "zero", "schedule", "servers"});
  }
  for (const auto& [name, text] : o.layout) set_option(run, name, text);
  run.run.out = o.out;
  run.run.resume = false;
  TrainConfig job = resolve(run);
  if (const Plan& p = job.plan; run.optim.batch % (p.dp * p.microbatches) != 0)
    bad_usage("--dp: {} data ranks x {} micro-batches do not divide the batch of {}, {} sequences", p.dp,
              p.microbatches, o.from, run.optim.batch);
  check(run, job);
  check_replicas_stay(before, job.plan);
  if (job.model.vocab == 0) job.model.vocab = Tokenizer::open_folder(from.path)->vocab_size();
  job.model = model_config(job, job.model.vocab);
  const RunDirectory directory(job.run);
  NewCheckpoint made(directory.checkpoints(), from.step);
  size_t files = 0;
  for (const char* stem : {kModel, kOptimizer}) {
    if (!SavedTensors::are_in(from.path, stem)) continue;
    const SavedTensors saved(from.path, stem);
    const bool full = o.layout.empty();
    const auto ranks = full ? full_tensor_parts(saved) : slices_of_ranks(job, stem == kOptimizer);
    std::set<std::string> names;
    for (const auto& shards : ranks)
      for (const SavedSlice& p : shards) names.insert(p.name);
    saved.expect_no_others(names);
    for (size_t r = 0; r < ranks.size(); ++r, ++files)
      write_tensor_file(made.path() / (full ? fmt::format("{}.safetensors", stem) : part_name(stem, r, ranks.size())),
                        saved, ranks[r], saved.files()[0]->metadata(), full);
  }
  for (const char* name : {"tokenizer.json", "pushes.txt", "pulled.safetensors"})
    if (is_there(from.path / name)) fs::copy_file(from.path / name, made.path() / name);
  write_file(made.path() / "config.toml", to_toml(run));
  directory.write_config(to_toml(run));
  made.finish(from.about, 1);
  print(fmt::format("{} resharded to {} in {} files\n", one_line(from.path.string()), one_line(o.out), files));
}

std::string group_rows(int64_t group) { return group > 0 ? fmt::format("groups of {}", group) : "rows"; }

// Other programs' kernels read this many codes at once.
constexpr int64_t kMultiple = 32;

// Runs before quantization, which may take hours.
void check_multiples(const ModelConfig& config) {
  const std::unique_ptr<LanguageModel> model = make_model(config);
  std::set<std::string> names;
  for (int64_t i = 0; i < config.layers; ++i)
    for (Linear* l : model->layer(i).all<Linear>()) names.insert(l->parameter(l->weight).name);
  hub_config(config, DType::float32);  // throws if no hub family fits
  for (const HubTensor& t : hub_tensors(config))
    for (const HubTensor::Slice& slice : t.slices)
      if (names.contains(t.name) && (slice.rows % kMultiple != 0 || t.shape[1] % kMultiple != 0))
        bad_usage("{} has shape ({}, {}); GPTQ files require multiples of {}", slice.name, slice.rows, t.shape[1],
                  kMultiple);
}

void report_layer(const QuantizedWeight& weight, bool is_measured) {
  std::string line = fmt::format("{} ({}, {})", weight.name, weight.matrix.rows, weight.matrix.columns);
  if (is_measured) line += fmt::format(": {:.3g}% relative squared error of its output", 100 * weight.error);
  say_above_progress(line);
}

void quantize(const CheckpointOptions& o) {
  const bool by_gptq = o.method == "gptq";
  if (by_gptq && o.calibrate.empty())
    throw Error("--calibrate: required by --method gptq; expected data similar to the model's inputs");
  for (const auto& [name, value] : o.layout)
    if ((name == "template" || name == "train-on" || name == "skip-bad" || name == "map" || name == "roles") &&
        !names_examples(o.calibrate))
      bad_usage("--{}: requires --calibrate FILE.jsonl, got {}", name,
                o.calibrate.empty() ? "none" : "--calibrate " + one_line(o.calibrate));
  Args args = o.layout;
  args.emplace_back("dtype", "fp32");
  if (!o.calibrate.empty()) args.emplace_back("data", o.calibrate);
  const Inference model = open_inference(o.from, args);
  const Pretrained& from = model.from;
  if (from.config.lora.rank > 0)
    bad_usage("{}: expected a model without adapters; see checkpoint export --merge", one_line(o.from));
  if (from.gptq) bad_usage("{}: expected a model that is not quantized, got a quantized model", one_line(o.from));
  check_multiples(from.config);
  EvaluationText text;
  if (!o.calibrate.empty()) text = evaluation_text(o.calibrate, *model.tokenizer, example_options(model.run.config));
  for (const std::string& note : text.notes) say(note);
  const QuantizeOptions options{.method = by_gptq ? Rounding::gptq : Rounding::nearest,
                                .group = o.group,
                                .windows = o.windows,
                                .at_once = model.run.config.optim.batch};
  make_model_folder(o.out, [&](const std::filesystem::path& made) {
    HubWeights weights{.dtype = from.dtype, .tensors = from.tensors, .stored = from.dtype, .gptq = {.group = o.group}};
    launch(launch_options("checkpoint", model.run, model.run.config.plan), [&](Communicator& world) {
      const std::unique_ptr<Trainer> shard = inference_trainer(model, world);
      for (QuantizedWeight& w :
           quantize_layers(shard->state().model(), text.rows.get(), options,
                           [&](const QuantizedWeight& one) { report_layer(one, text.rows != nullptr); }))
        weights.codes.emplace(w.name, std::move(w.matrix));
    });
    write_hub_folder(made, from.config, weights);
    write_tokenizer(made, *model.tokenizer);
  });
  print(fmt::format("{} quantized to {}: 4-bit layers in {}, by {}\n", one_line(o.from), one_line(o.out),
                    group_rows(o.group), by_gptq ? "GPTQ" : "rounding to nearest"));
}

DType stored_in(const CheckpointOptions& o, DType found) {
  if (o.dtype) return *o.dtype == "bf16" ? DType::bfloat16 : DType::float32;
  return found == DType::bfloat16 ? found : DType::float32;
}

// One tensor is in memory at a time.
void write_model(const fs::path& file, const Pretrained& from, DType dtype) {
  const std::unique_ptr<LanguageModel> model = make_model(from.config);
  std::vector<const Parameter*> all;
  for (const Module::Unit& unit : model->layout())
    for (const Slot& slot : unit.slots) all.push_back(slot.parameter);
  std::vector<TensorBytes> listed;
  for (const Parameter* p : all) {
    const Shape shape = p->stored();
    listed.push_back({p->name, p->stored_dtype(dtype), {shape.begin(), shape.end()}, {}});
  }
  std::vector<std::byte> bytes;
  stream_safetensors(file, listed, [&](size_t i) {
    const Shape shape = all[i]->stored();
    bytes.resize(static_cast<size_t>(shape.numel() * element_size(listed[i].dtype)));
    from.tensors(all[i]->name, listed[i].dtype, shape)(0, bytes);
    return std::span<const std::byte>(bytes);
  });
}

void import_model(const CheckpointOptions& o) {
  if (!is_hub_folder(o.from) && !is_peft_folder(o.from))
    bad_input("{}: config.json is missing; expected a Hugging Face folder{}", o.from, foreign_in(o.from));
  const Pretrained from = open_pretrained(o.from, o.base);
  say_notes(from.notes);
  const std::unique_ptr<Tokenizer> tokenizer =
      o.tokenizer ? make_tokenizer({.name = *o.tokenizer}, o.from) : Tokenizer::open_folder(from.tokenizer());
  const DType dtype = stored_in(o, from.dtype);
  TypedOptions run;
  take_model(run, from.config);
  run.optim.dtype = dtype == DType::bfloat16 ? DType::bfloat16 : DType::float32;
  run.run.out = o.out;
  if (!from.base.empty()) {
    const KnownBase base = known_base(from, o.from);
    if (from.merged.empty()) run.run.init = run.run.adapter_base = base.path, run.run.base_hash = base.hash;
  }
  const RunDirectory directory(run.run);
  NewCheckpoint made(directory.checkpoints(), 0);
  write_file(made.path() / "config.toml", to_toml(run));
  write_file(made.path() / "tokenizer.json", tokenizer->to_json());
  write_model(made.path() / "model.safetensors", from, dtype);
  directory.write_config(to_toml(run));
  made.finish(nlohmann::json{{"run", {{"imported_from", one_line(o.from)}}}}.dump(), 1);
  print(fmt::format("{} imported to {}; use it with tessera generate {} or train --init {}\n", one_line(o.from),
                    one_line(o.out), one_line(o.out), one_line(o.out)));
}

// transformers selects the tokenizer of a qwen2 model by model type, and biases on only q, k and v imply this type.
// With another tokenizer, the model is written as llama, whose additional attention output bias is zero.
void leave_qwen2(Pretrained& from, const Tokenizer& tokenizer) {
  ModelConfig& c = from.config;
  if (c.family != Family::llama || !c.qkv_bias || c.proj_bias || c.qk_norm || c.window > 0 || c.experts.count > 0 ||
      is_qwen2_tokenizer(tokenizer))
    return;
  const std::set<std::string> names = tensor_names(*make_model(c));
  c.proj_bias = true;
  from.tensors = [all = from.tensors, names](const std::string& name, DType dtype, const Shape& shape) -> TensorReader {
    if (names.contains(name)) return all(name, dtype, shape);
    return [](int64_t, std::span<std::byte> to) { std::ranges::fill(to, std::byte{0}); };
  };
}

void write_folder(const fs::path& folder, const CheckpointOptions& o, const Pretrained& from, DType dtype,
                  const KnownBase& base) {
  const bool adapted = from.config.lora.rank > 0;
  if (adapted && o.merge)
    write_hub_folder(folder, merged(from.config), {dtype, merged(from.config, from.tensors), DType::float32});
  else if (adapted)
    write_peft_folder(folder, from.config, dtype, from.tensors, base.path, base.hash);
  else
    write_hub_folder(folder, from.config, {dtype, from.tensors, from.dtype});
}

// The tokens that end an answer in the model's training template.
Asked answer_markers(const Pretrained& from, const Tokenizer& tokenizer) {
  const bool has_own = from.chat_template == ChatTemplate::automatic && !tokenizer.chat_template().empty();
  if (!has_own && jinja_source(from.chat_template).empty()) return {};
  try {
    return ask({}, {.style = from.chat_template}, tokenizer);
  } catch (const Error&) {  // an unsupported template was not used for training
    return {};
  }
}

void export_model(const CheckpointOptions& o) {
  Pretrained from = open_pretrained(o.from, o.base);
  say_notes(from.notes);
  if (!o.merge && !from.merged.empty())
    bad_input("{}: adapters of this kind can only be exported with --merge", from.merged);
  if (o.merge && from.config.lora.rank == 0 && from.merged.empty())
    bad_usage("--merge: requires adapters, but {} has none", one_line(o.from));
  const std::unique_ptr<Tokenizer> tokenizer = Tokenizer::open_folder(from.tokenizer());
  const DType dtype = stored_in(o, from.dtype);
  const bool names_base = is_peft_folder(o.from) || (from.config.lora.rank > 0 && !o.merge);
  const KnownBase base = names_base ? known_base(from, o.from) : KnownBase();
  TrainConfig run;
  const bool is_run = is_there(from.path / "config.toml"), trained = is_run && from.path.filename() != "step-0";
  if (is_run) apply_config_file(run, (from.path / "config.toml").string());
  if (trained && !run.run.init) leave_qwen2(from, *tokenizer);
  const std::string_view jinja = jinja_source(from.chat_template);  // takes precedence over the tokenizer's template
  const Asked answer = trained ? answer_markers(from, *tokenizer) : Asked();
  if (jinja.empty() && from.chat_template != ChatTemplate::automatic && !tokenizer->chat_template().empty())
    say_notes({"the tokenizer's chat template differs from the one used in training; it is exported unchanged"});
  for (const std::string& stop : answer.stops)
    say_notes({fmt::format(
        "a turn ends with the text {}, which is not a single token: set it as a stop string in other programs",
        one_line(stop))});
  make_model_folder(o.out, [&](const fs::path& made) {
    write_folder(made, o, from, dtype, base);
    write_tokenizer(made, *tokenizer, answer.ends);
    if (!jinja.empty()) write_file(made / "chat_template.jinja", jinja);
  });
  const bool dequantized = from.config.quantize.codec != Codec::none && o.merge;
  print(fmt::format("{} exported to {} in {}{}\n", one_line(o.from), one_line(o.out), to_string(dtype),
                    dequantized ? "; 4-bit weights were dequantized and merged with the adapters" : ""));
}

void inspect(const CheckpointOptions& o) {
  const Pretrained from = open_pretrained(o.from, o.base);
  say_notes(from.notes);
  const ModelConfig& c = from.config;
  std::vector<HubTensor> all = hub_tensors(c);
  if (c.lora.rank > 0)
    for (const PeftTensor& t : peft_tensors(c))
      all.push_back({.name = t.ours, .shape = t.shape, .slices = {{t.theirs, t.shape[0]}}});
  int64_t parameters = 0;
  report::Table tensors{.id = "tensors", .columns = {{""}, {"", false, 15}, {"", false, 1}}, .indent = 2};
  for (const HubTensor& t : all) {
    parameters += t.shape.numel();
    tensors.columns[0].width = std::max(tensors.columns[0].width, t.name.size() + 1);
    std::vector<std::string> theirs;
    for (const HubTensor::Slice& slice : t.slices) theirs.push_back(slice.name);
    tensors.rows.push_back(
        {{t.name, t.shape.str(), fmt::format("{}{}", fmt::join(theirs, " | "), t.transposed ? ", transposed" : "")}});
  }
  print(fmt::format(
            "{}\n{}: {} layers, {} heads, {} key-value heads of {} channels, {} channels, {}{} hidden, context {}, "
            "vocabulary {}{}\n{} parameters in {}{}\n\n",
            one_line(from.path.string()), value_name(c.family), c.layers, c.heads, c.all_heads().key, c.head_size(),
            c.channels, c.experts.count > 0 ? fmt::format("{} experts of ", c.experts.count) : "", c.hidden(),
            c.context, c.vocab, c.tied ? ", tied embeddings" : "", format_si(static_cast<double>(parameters)),
            to_string(from.dtype),
            from.gptq ? fmt::format(", 4-bit layers in {} (GPTQ)", group_rows(from.gptq->group)) : "") +
        as_text(tensors));
}

}  // namespace

int run(const CheckpointOptions& o) {
  using Subcommand = CheckpointOptions::Action;
  if (o.action == Subcommand::import) import_model(o);
  if (o.action == Subcommand::write) export_model(o);
  if (o.action == Subcommand::inspect) inspect(o);
  if (o.action == Subcommand::reshard) reshard(o);
  if (o.action == Subcommand::quantize) quantize(o);
  return 0;
}

}  // namespace tessera
