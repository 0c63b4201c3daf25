// Descriptors of all options, and their values in configuration files and messages.
#include "app/options.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "app/report/report.h"
#include "base/files.h"
#include "planner/case.h"

namespace tessera {

namespace {

constexpr const char* kFrom = "run directory, checkpoint, Hugging Face or PEFT folder, or llm.c model";
constexpr const char* kFormat = "format of standard output";

}  // namespace

Settings field_descriptors(TypedOptions& options) { return field_descriptors(options, options.own); }

Settings field_descriptors(TrainConfig& config, TrainOptions& o) {
  Settings s = field_descriptors(config);
  s.add("Place", {{"rank", &o.rank, "rank of this process with `rendezvous`, from 0 to `ranks` - 1",
                   Field{.range = {0, 1023}, .in_file = false}}});
  s.add("Files", {{"config", &o.config, "configuration file with KEY = VALUE lines; command-line options override it",
                   Field{.in_file = false}}});
  s.add("Restarts", {{"restarts", &o.restarts,
                      "maximum number of automatic restarts of a failed run, each from its newest checkpoint",
                      Field{.range = {0, 1e6}, .in_file = false}},
                     {"launch", &o.launch,
                      "launcher command that starts the ranks, such as \"mpirun -n {ranks}\" or \"srun -n {ranks}\" "
                      "[none: ranks are threads]",
                      Field{.in_file = false}},
                     {"hostfile", &o.hostfile,
                      "host file in mpirun's format, read before each start; with fewer slots than ranks, the run "
                      "continues with fewer data ranks and more micro-batches per rank",
                      Field{.in_file = false}}});
  s.add("Output",
        {{"format", &o.format, kFormat, Field{.choices = "text|json", .in_file = false}},
         {"quiet", &o.quiet, "print neither progress nor the final text sample", Field{.in_file = false}},
         {"trace", &o.trace, "write a timeline to the run directory for `tessera report`", Field{.in_file = false}},
         {"trace_steps", &o.trace_steps, "number of steps at the end of the run that `trace` records",
          Field{.range = {1, 1e6}, .in_file = false}}});
  s.move("rank", "rendezvous");
  s.move("config", "resume");
  s.move("dump", "trace_steps");
  return s;
}

Settings field_descriptors(VerifyOptions& o) {
  Settings s;
  s.add("Fault injection", {{"defect", &o.defect,
                             "inject a fault into the plan and diagnose the failed checks: the name of a fault, random "
                             "(selected by `seed`), or list, which lists all faults",
                             Field{.expected = "the name of a fault, random or list"}},
                            {"hide", &o.hide, "hide the name of the injected fault until the end"}});
  s.add("Placements", {{"placements", &o.placements,
                        "verify a block with the placements, number of ranks and sizes in this file instead of a plan",
                        Field{.expected = "a file"}}});
  return s;
}

Settings field_descriptors(GenerateOptions& o) {
  return {
      {"FROM", &o.from, kFrom, Field{.place = true}},
      {"prompt", &o.prompts, "text to continue; may be repeated [a new line]", Field{.repeated = true}},
      {"prompts", &o.prompts_file, "file with one prompt per line", Field{.expected = "a file"}},
      {"chat", &o.chat,
       "treat each line of standard input (a terminal or a pipe) as the next turn of one conversation"},
      {"template", &o.chat_template,
       "chat template of the prompt; auto: the model's own, the default with `chat` or `system`"},
      {"system", &o.system, "system message at the start of the conversation"},
      {"tokens", &o.tokens, "maximum number of tokens to generate", Field{.range = {1, 1e9}}},
      {"temperature", &o.temperature,
       "sampling temperature: 0 selects the most likely token, 1 samples from the model's distribution",
       Field{.range = {0, 100}}},
      {"top_k", &o.top_k, "sample from the k most likely tokens; 0: from all", Field{.range = {0, 1e9}}},
      {"top_p", &o.top_p,
       "nucleus sampling: sample from the smallest set of most likely tokens with this total probability",
       Field{.range = {1e-9, 1}}},
      {"min_p", &o.min_p, "sample from tokens with at least this fraction of the highest probability",
       Field{.range = {0, 1}}},
      {"repetition_penalty", &o.repetition_penalty,
       "penalty for tokens that occur in the prompt or the generated text; 1: none", Field{.range = {0.01, 100}}},
      {"seed", &o.seed, "seed of the sampling RNG", Field{.range = {0, 9e18}}},
      {"stop", &o.stop, "stop string: ends generation and is not printed; may be repeated", Field{.repeated = true}},
      {"ignore_end", &o.ignore_end, "ignore EOS: continue generating after the end token"},
      {"special", &o.special, "encode the names of special tokens in a prompt as special tokens rather than as text"},
      {"no_bos", &o.no_bos, kNoBosHelp},
      {"format", &o.format, kFormat, Field{.choices = "text|json"}}};
}

Settings field_descriptors(EvaluateOptions& o) { return {{"FROM", &o.from, kFrom, Field{.place = true}}}; }

Settings field_descriptors(DatasetOptions& o) {
  return {{"SOURCE", &o.sources,
           "austen, tinyshakespeare, a text file, documents in FILE.jsonl (both optionally .gz or .zst), or an llm.c "
           "token file; several sources or a 'pattern*' are combined into one dataset",
           Field{.range = {1}, .place = true}},
          {"tokenizer", &o.tokenizer,
           "char, bytes, bpe, bpe-N with at most N tokens, or a directory with tokenizer.json (or both vocab.json and "
           "merges.txt) [char]",
           Field{.expected = "a tokenizer"}},
          {"vocab", &o.vocab, "maximum vocabulary size of a new bpe tokenizer", Field{.range = {256, 1e9}}},
          {"shard_tokens", &o.shard_tokens, "tokens per output file; 0: a single file", Field{.range = {0, 1e12}}},
          {"special", &o.special, kSpecialHelp},
          {"out", &o.out, "output directory [for a single source: in the cache directory, TESSERA_CACHE]",
           Field{.expected = "a new directory"}}};
}

Settings field_descriptors(ReportOptions& o) {
  return {{"RUN", &o.runs,
           "run directory of a run recorded with `trace` (of two runs, one may lack a trace); or a JSON file written "
           "by `tessera bench`, or a 'pattern*.json' of several; without a run, `figure` draws the plan given by the "
           "options below, one of which may list several values, such as 1f1b,zb-h1",
           Field{.range = {0, 2}, .place = true}},
          {"format", &o.format, "output: an HTML file, or text on standard output", Field{.choices = "html|text"}},
          {"figure", &o.figure, "figure to produce instead of the full report", Field{.choices = report::kFigures}},
          {"svg", &o.svg, "write the figure as an SVG file"},
          {"out", &o.out, "output file [a file in RUN; for a plan: standard output]",
           Field{.expected = "a file to write"}}};
}

Settings field_descriptors(BenchOptions& o) {
  return {{"table", &o.table, "print one aligned table per group after all benchmarks have run"},
          {"model", &o.model, "model of the strategy and schedule benchmarks; no others are run",
           Field{.choices = preset_names()}},
          {"ranks", &o.ranks,
           "run only benchmarks with these numbers of ranks, such as 1,2 [2 and 4; for collectives also 8]",
           Field{.range = {1, 64}}},
          {"bytes", &o.bytes,
           "run only collectives of these sizes: FROM:TO:FACTOR, such as 8:128M:2, or one size; K, M, G: 1024, 1024^2, "
           "1024^3",
           Field{.expected = "FROM:TO:FACTOR, such as 8:128M:2"}},
          {"dtype", &o.dtype, "run only benchmarks with this dtype", Field{.choices = "fp32|bf16"}},
          {"device", &o.device, "device on which the benchmarks run"}};
}

Settings field_descriptors(PlanOptions& o) {
  Settings s;
  s.add("Planning",
        {{"hardware", &o.hardware,
          "hardware of the ranks: a name such as h100 or a100-80, a TOML file, or this (this machine, measured)",
          Field{.expected = "the name of a machine, this, or a file"}},
         {"software", &o.software, "training software: tessera, megatron, deepspeed, fsdp, or a TOML file",
          Field{.expected = "the name of a program, or a file"}},
         {"memory", &o.memory_gb, "GB that a rank may use [all memory of the hardware]", Field{.range = {1e-3, 1e6}}},
         {"ep", &o.ep, "expert-parallel group size; groups of `dp` x `cp` ranks shard the experts of every layer",
          Field{.range = {1, 1e6}}},
         {"top", &o.top, "number of plans to show", Field{.range = {1, 1000}}},
         {"html", &o.html, "write the result to this HTML file", Field{.expected = "a file"}},
         {"cases", &o.cases, "JSONL file of models, plans and machines; prints one prediction per line",
          Field{.expected = "a file"}},
         {"measure", &o.measure,
          "run these plans of the ranking on this machine, such as 1,2,3, and compare predictions with measurements",
          Field{.range = {1, 1000}}},
         {"calibrate", &o.calibrate, "measure this machine again and store the result"},
         {"format", &o.format, kFormat, Field{.choices = "text|json"}}});
  return s;
}

Settings field_descriptors(CheckpointOptions& o, CheckpointOptions::Action action) {
  using Subcommand = CheckpointOptions::Action;
  const auto at = static_cast<size_t>(action);
  constexpr std::array<std::string_view, 5>
      from = {"Hugging Face folder: config.json and model.safetensors, possibly in shards",
              "run directory or checkpoint", "run directory or checkpoint",
              "run directory, checkpoint or Hugging Face folder", "run directory, checkpoint or Hugging Face folder"},
      out = {"new run directory", "new directory", "new run directory", "new directory"};
  Settings s;
  s.add({"FROM", &o.from, from.at(at), Field{.place = true}});
  if (action != Subcommand::reshard && action != Subcommand::quantize)
    s.add({"base", &o.base, kBaseHelp, Field{.expected = "a Hugging Face folder or a run"}});
  if (action != Subcommand::inspect) s.add({"out", &o.out, out.at(at), Field{.expected = "a new directory"}});
  if (action == Subcommand::import || action == Subcommand::write)
    s.add({"dtype", &o.dtype, "dtype of the stored tensors (default: unchanged)", Field{.choices = "fp32|bf16"}});
  if (action == Subcommand::import)
    s.add({"tokenizer", &o.tokenizer, "bytes, or a tokenizer directory [the model's own]",
           Field{.expected = "a tokenizer"}});
  if (action == Subcommand::write)
    s.add({"merge", &o.merge,
           "merge adapters into the weights; by default, only the adapters are written, in PEFT format"});
  if (action != Subcommand::quantize) return s;
  s.add({},
        {{"method", &o.method, "gptq, or rtn (round to nearest) as a baseline", Field{.choices = "gptq|rtn"}},
         {"bits", &o.bits, "bits per weight", Field{.choices = "4"}},
         {"group", &o.group, "group size: input features per scale; must divide the input size of every layer; -1: all",
          Field{.range = {-1, 1e9}}},
         {"calibrate", &o.calibrate,
          "calibration text, tokens or examples, similar to the model's inputs; required by gptq",
          Field{.expected = "a text file, a token file or examples"}},
         {"windows", &o.windows,
          "number of calibration windows, each of the model's context length, spread over the data",
          Field{.range = {1, 1e9}}}});
  return s;
}

Settings field_descriptors(AuditOptions& o) {
  return {
      {"PATH", &o.paths,
       "the recording of a step: a directory of rank_*.safetensors, or a dump; then its reference: the Hugging Face "
       "folder of the model before the step, or another recording, whose repetitions in repeat_* measure rounding "
       "errors. Without a reference, only replicas, norm and update are checked",
       Field{.range = {1, 2}, .place = true}},
      {"html", &o.html,
       "write a page to this HTML file, with figures of tensors by layers; colour: error over tolerance",
       Field{.expected = "a file"}},
      {"svg", &o.svg, "write the figures to this SVG file", Field{.expected = "a file"}},
      {"format", &o.format, kFormat, Field{.choices = "text|json"}}};
}

Settings field_descriptors(ExploreOptions& o) {
  return {{"port", &o.port, "port on 127.0.0.1 [8421, or any free port if it is in use]", Field{.range = {0, 65535}}}};
}

Settings field_descriptors(LabOptions& o, LabOptions::Action action) {
  using Subcommand = LabOptions::Action;
  Settings s;
  const Bounds places = action == Subcommand::check ? Bounds{0, 1} : Bounds{};
  if (action != Subcommand::list)
    s.add({"N", &o.exercise, "number or name of an exercise or puzzle, such as p1",
           Field{.range = places, .place = true}});
  if (action == Subcommand::start) s.add({"DIR", &o.directory, "directory to create", Field{.place = true}});
  if (action != Subcommand::check) return s;
  s.add({}, {{"DIR", &o.directory, "directory created by `lab start`, or the file of a puzzle",
              Field{.range = places, .place = true}},
             {"all", &o.all, "grade a class: a directory with one subdirectory per learner",
              Field{.expected = "a directory"}},
             {"format", &o.format, kFormat, Field{.choices = "text|json"}}});
  return s;
}

TypedOptions verify_defaults() {
  TypedOptions o;
  o.optim.steps = 20;
  o.optim.warmup = 2;
  o.optim.lr = 3e-3;
  o.model.dropout = 0.1;
  o.plan.timeout = 60;
  o["attention"] = "own";  // cuDNN does not guarantee that a row's result is independent of the batch
  o.plan.deterministic = true;
  return o;
}

TypedOptions plan_defaults() {
  TypedOptions o;
  o.optim.dtype = DType::bfloat16;
  return o;
}

bool is_searched(std::string_view option) {
  planner::Layout layout;
  const Settings predicted = planner::field_descriptors(layout);
  return option == "ranks" || option == "cp-mode" || (option != "ep" && predicted.find_word(option));
}

bool is_of_plan(const Setting& s) { return s.field.group == "Model" || s.name == "batch" || is_searched(s.word()); }

void set_option(TypedOptions& o, std::string_view name, const std::string& text) {
  const Settings all = field_descriptors(o);
  const Setting* s = all.find_word(name);
  if (!s) bad_usage("--{}: unknown option", name);
  s->read(fmt::format("--{}", name), text);
  o.set.emplace(s->name);
  // `steps` and `epochs` are mutually exclusive: the last one set wins, even over the configuration file.
  if (name == "steps") forget(o, {"epochs"});
  if (name == "epochs") o.set.erase("steps");
  if (name == "val-share") forget(o, {"val_data"});
}

void TypedOptions::OptionRef::say(const std::string& text) const {
  std::string word(name);
  std::ranges::replace(word, '_', '-');
  set_option(options, word, text);
}

void forget(TypedOptions& o, const std::vector<std::string_view>& names) {
  TypedOptions defaults;
  const Settings all = field_descriptors(o), others = field_descriptors(defaults);
  for (const std::string_view name : names) {
    all.at(name).assign(others.at(name));
    o.set.erase(std::string(name));
  }
}

Args config_values(const TypedOptions& o) { return config_values(o, &o.set); }
std::string to_toml(const TypedOptions& o) { return to_toml(o, &o.set); }

void apply_config_file(TypedOptions& o, const std::string& path) { apply_config(o, read_file(path), path); }

void apply_config(TypedOptions& o, std::string_view file, const std::string& path) {
  o.set.merge(apply_config(static_cast<TrainConfig&>(o), file, path));
}

Args all_values(const TrainCommand& command) {
  TrainCommand c = command;
  return values(c.config, &c.set, field_descriptors(c.config, c.options),
                [](const Setting& s) { return s.name != "format" && s.name != "quiet" && s.name != "config"; });
}

std::string with_options(const std::string& message) {
  static const std::set<std::string> known = [] {
    TypedOptions run;
    std::set<std::string> names{"hardware", "software", "defect", "figure", "group"};  // of other commands
    for (const Setting& s : field_descriptors(run))
      if (s.field.in_words) names.insert(s.word());
    return names;
  }();
  std::string out;
  size_t at = 0;
  for (size_t open; (open = message.find('`', at)) != std::string::npos;) {
    const size_t close = message.find('`', open + 1);
    if (close == std::string::npos) break;
    std::string name = message.substr(open + 1, close - open - 1);
    std::ranges::replace(name, '_', '-');
    const bool ours = known.contains(name);
    out += message.substr(at, open - at) + (ours ? "--" + name : "`");
    at = ours ? close + 1 : open + 1;
  }
  return out + message.substr(at);
}

// Matches complete words only.
static bool has_name(std::string_view text, const std::string& name) {
  const auto is_letter = [&](size_t at) {
    return at < text.size() && std::isalnum(static_cast<uint8_t>(text[at])) != 0;
  };
  for (size_t at = text.find(name); at != std::string_view::npos; at = text.find(name, at + 1))
    if ((at == 0 || !is_letter(at - 1)) && !is_letter(at + name.size())) return true;
  return false;
}

void throw_for_option(std::string_view option, const std::string& path, const InputError& error) {
  const std::string message = with_options(error.what());
  if (path.empty() || message.starts_with("--") || !has_name(message, one_line(path))) throw InputError(message);
  bad_input("--{}: {}", option, message);
}

}  // namespace tessera
