// The entries of what the commands can be told, and their values in configuration files and messages.
#include "app/options.h"

#include "app/report/report.h"
#include "data/config_file.h"
#include "data/files.h"
#include "planner/case.h"

namespace tessera {

constexpr std::array<std::string_view, 5> kChatTemplateNames = {"auto", "chatml", "llama3", "alpaca", "none"};
static constexpr const auto& value_names(ChatTemplate) { return kChatTemplateNames; }

namespace {

constexpr double kMaxSteps = 1e12;
constexpr const char* kFrom = "run directory, a checkpoint in one, a Hugging Face or PEFT folder, or a model of llm.c";
constexpr const char* kBase =
    "model beside which the adapters were trained: a folder or a run; default: the one that they name";
constexpr const char* kFormat = "format of standard output";
constexpr const char* kSpecial = "names of special tokens in the data are these tokens, and not text";
constexpr const char* kNoBos = "leaves out the tokens that the tokenizer itself puts before and behind a text";

// The fields of a run that are about this program and not about what is trained.
void add_data_and_tuning(Settings& s, TrainOptions& o) {
  s.group("Model");
  s.add(o.model, {"model", "sizes of a known model"}).of(preset_names());
  s.group("Data");
  s.add(o.data, {"data",
                 "austen, tinyshakespeare, a text file (.gz and .zst too), a token file of llm.c, a folder or "
                 "'pattern*' of them, a folder made by `tessera data`, or examples for fine-tuning, "
                 "FILE.jsonl, 'a*.jsonl,b.jsonl' or a folder of such files; or a mixture: A=0.7,B=0.3, or a .json or "
                 ".toml file of names and weights"});
  s.add(o.held.file, {"val_data", "a text or a file of examples to validate on, in place of `val_share`"});
  s.add(o.held.share, {"val_share", "share of `data` that is held out for validation", {0, 1, true}});
  s.add(o.tokenizer,
        {"tokenizer",
         "char, bytes, bpe, bpe-N of at most N tokens (bpe: 50257), or a folder with tokenizer.json, or vocab.json and "
         "merges.txt; default: char for nano and mini models, bpe for others"});
  s.add(o.add_tokens,
        {"add_tokens",
         "special tokens that the tokenizer gets besides its own; a model of `init` gets a row for each that its table "
         "has none for"})
      .a("TOKEN,TOKEN");
  s.add(o.end, {"end", "special token that ends a text, in place of the tokenizer's own"}).a("TOKEN");
  s.add(o.shuffle, {"shuffle",
                    "reads each window of a text once in an epoch, in a random order, as it is for shards and "
                    "mixtures; without it windows begin at random places"})
      .for_identity(IdentityRole::unless_usual);
  s.group("Fine-tuning");
  s.add(o.init, {"init",
                 "starts from the weights, sizes and tokenizer of a run, a checkpoint, a Hugging Face folder or a "
                 "model of llm.c"});
  s.add(o.base, {"base", kBase});
  s.add(o.adapter_base, {"adapter_base"}).for_programs();
  s.add(o.base_hash, {"base_hash"}).for_programs();
  s.add(o.chat_template, {"template",
                          "text around the turns of an example; auto: chatml for messages, alpaca for instructions, "
                          "none for the rest"});
  s.add(o.train_on, {"train_on", "part of an example that counts in the loss"}).of("responses|all");
  s.add(o.pack, {"pack", "puts several examples into one sequence; none of them sees another"});
  s.add(o.skip_bad, {"skip_bad", "skips and counts lines that are no example or have nothing to learn"});
  s.add(o.map, {"map", "other names of an example's keys, for example prompt=question,completion=answer"})
      .a("FIELD=KEY,FIELD=KEY");
  s.add(o.roles, {"roles", "roles of names that messages have, for example developer=system,bot=assistant"})
      .a("NAME=ROLE,NAME=ROLE");
  s.add(o.no_bos, {"no_bos", kNoBos});
  s.add(o.special, {"special", kSpecial});
}

void add_files(Settings& s, TrainOptions& o) {
  s.group("Files");
  s.add(o.out, {"out", "run directory (settings, metrics, TensorBoard events, checkpoints); default: runs/DATE-TIME"})
      .of_call();
  s.add(o.save_every,
        {"save_every", "steps between checkpoints, or epochs, as 0.25e; 0: only the last", {0, kMaxSteps}})
      .or_share(o.save_share, 'e');
  s.add(o.keep, {"keep", "newest checkpoints to keep; the best by validation is kept too", {1, 1e6}});
  s.add(o.check_replicas,
        {"check_replicas",
         "steps between checks that the copies of several ranks are equal; every save checks too; 0: no others",
         {0, kMaxSteps}});
  s.add(o.eval_every,
        {"eval_every", "steps between validations, or epochs, as 0.25e; 0: only the last", {0, kMaxSteps}})
      .or_share(o.eval_share, 'e');
  s.add(o.patience, {"patience", "ends a run after so many validations without a better loss; 0: never", {0, 1e6}});
  s.add(o.no_save,
        {"no_save", "writes no checkpoint, not even the last: for measurements; such a run cannot be resumed"});
  s.add(o.no_eval, {"no_eval", "makes no validation, not even the last"});
  s.add(o.resume, {"resume", "continue the run in `out` from its newest checkpoint"}).of_call();
  s.add(o.config,
        {"config", "file of lines KEY = VALUE with the same keys; an option of the command line wins over its key"})
      .of_call();
  s.group("Restarts");
  s.add(o.restarts,
        {"restarts", "starts a run that fails again from its newest checkpoint, so many times at most", {0, 1e6}})
      .of_call();
  s.add(o.launch, {"launch",
                   "words in front of each start, such as \"mpirun -n {ranks}\" or \"srun -n {ranks}\"; default: none, "
                   "ranks are threads"})
      .of_call();
  s.add(o.hostfile, {"hostfile",
                     "hosts and their slots, as mpirun reads them, read before each start: with fewer slots than ranks "
                     "there are fewer data ranks, and more micro-batches on each"})
      .of_call();
  s.group("Output");
  s.add(o.format, {"format", kFormat}).of("text|json").of_call();
  s.add(o.quiet, {"quiet", "prints no progress, and no sample of text at the end"}).of_call();
  s.add(o.trace, {"trace", "writes a timeline into the run directory; `tessera report` draws it"}).of_call();
  s.add(o.trace_steps, {"trace_steps", "with `trace`: how many of the last steps are kept", {1, 1e6}}).of_call();
  s.add(o.dump, {"dump",
                 "writes what each layer gives in this step, and its gradient, whole whatever the plan: "
                 "dump_STEP.safetensors, of train in the run directory; steps count from 1; 0: none",
                 {0, kMaxSteps}})
      .of_call();
}

// Keys of a run's config.toml that are no options: facts about the base of its adapters.
constexpr std::array<std::string_view, 2> kFacts = {"adapter-base", "base-hash"};
bool is_in_files(const Setting& s) { return s.field.in_words || std::ranges::count(kFacts, s.word()) > 0; }

template <class Chosen>
Args values(TrainOptions o, const Chosen& chosen) {
  Args out;
  for (const Setting& s : field_descriptors(o)) {
    if (!is_in_files(s) || !chosen(s.field) || (s.field.open && !o.gives(s.field.name))) continue;
    if (std::string value = s.written(); !value.empty()) out.emplace_back(s.word(), std::move(value));
  }
  return out;
}

}  // namespace

Settings field_descriptors(TrainOptions& o) {
  constexpr std::array<std::string_view, 9> groups = {"Model",        "Data",  "Fine-tuning", "Plan",  "Place",
                                                      "Optimisation", "Files", "Restarts",    "Output"};
  Settings s;
  add_data_and_tuning(s, o);
  s.group("Plan").add(
      o.ranks,
      {"ranks", "number of ranks; default: 2 if the batch can be halved; under mpirun those of the job", {1, 1024}});
  s.group("Place")
      .add(o.rank, {"rank", "with `rendezvous`: which of `ranks` this process is, from 0", {0, 1023}})
      .of_call();
  s.add(field_descriptors(o.sizes)).add(field_descriptors(o.optim)).add(field_descriptors(o.plan));
  add_files(s, o);
  s.group("Optimisation");
  s.add(o.epochs, {"epochs", "passes through `data`, in place of `steps`; a part of one too, as 0.5", {0, 1e6}});
  s.sort(groups);
  s.move("epochs", "steps");
  s.move("microbatches", "batch");
  s.move("shuffle", "microbatches");
  s.move("rank", "rendezvous");
  return s;
}

Settings field_descriptors(VerifyOptions& o) {
  Settings s;
  s.group("Defect");
  s.add(o.defect, {"defect",
                   "plants a known defect in the plan, and says what broke and why: its name, random (by `seed`), or "
                   "list"})
      .a("the name of a defect, random or list");
  s.add(o.hide, {"hide", "keeps the defect's name until the end"});
  s.group("Placements");
  s.add(o.placements,
        {"placements", "no plan, but a part of a block: the file says its ranks and how each tensor lies on them"})
      .a("a file");
  return s;
}

Settings field_descriptors(GenerateOptions& o) {
  Settings s;
  s.add(o.from, {"FROM", kFrom}).by_place();
  s.add(o.prompts, {"prompt", "text to continue; may be given several times [a new line]"}).many();
  s.add(o.prompts_file, {"prompts", "file with a prompt on each line"}).a("a file");
  s.add(o.chat, {"chat",
                 "each line of standard input is the next turn of one conversation: on a terminal as it is typed, "
                 "through a pipe line by line"});
  s.add(o.chat_template, {"template",
                          "text around a prompt; auto: the model's own, also where none is said with `chat` or "
                          "`system`"});
  s.add(o.system, {"system", "what the conversation says first, as the system"});
  s.add(o.tokens, {"tokens", "tokens to write", {1, 1e9}});
  s.add(o.temperature,
        {"temperature", "0 takes the likeliest token, 1 samples by the probabilities of the model", {0, 100}});
  s.add(o.top_k, {"top_k", "samples among the k likeliest tokens only; 0: among all", {0, 1e9}});
  s.add(o.top_p, {"top_p", "samples among the likeliest tokens that together have this probability", {1e-9, 1}});
  s.add(o.min_p,
        {"min_p", "samples among tokens with at least this share of the probability of the likeliest", {0, 1}});
  s.add(o.repetition_penalty, {"repetition_penalty",
                               "makes tokens that were read or written before less likely; 1: does nothing",
                               {0.01, 100}});
  s.add(o.seed, {"seed", "seed of the samples", {0, 9e18}});
  s.add(o.stop, {"stop", "text that ends the writing and is not shown; may be given several times"}).many();
  s.add(o.ignore_end, {"ignore_end", "goes on after a token that ends a text"});
  s.add(o.special, {"special", "names of special tokens in a prompt are these tokens, and not text"});
  s.add(o.no_bos, {"no_bos", kNoBos});
  s.add(o.format, {"format", kFormat}).of("text|json");
  return s;
}

Settings field_descriptors(EvaluateOptions& o) {
  Settings s;
  s.add(o.from, {"FROM", kFrom}).by_place();
  return s;
}

Settings field_descriptors(DatasetOptions& o) {
  Settings s;
  s.add(o.sources, {"SOURCE",
                    "austen, tinyshakespeare, a text file, documents as FILE.jsonl (.gz and .zst too), or llm.c's "
                    "token file; several, or a 'pattern*', become one dataset",
                    {1}})
      .by_place();
  s.add(o.tokenizer, {"tokenizer",
                      "char, bytes, bpe, bpe-N of at most N tokens, or a folder with tokenizer.json, or vocab.json and "
                      "merges.txt [char]"})
      .a("a tokenizer");
  s.add(o.vocab, {"vocab", "largest number of tokens of a bpe tokenizer that is trained", {256, 1e9}});
  s.add(o.shard_tokens, {"shard_tokens", "writes several files of so many tokens each; 0: one file", {0, 1e12}});
  s.add(o.special, {"special", kSpecial});
  s.add(o.out, {"out", "folder to make; default for one source: in the cache, which TESSERA_CACHE names"})
      .a("a folder to make");
  return s;
}

Settings field_descriptors(ReportOptions& o) {
  Settings s;
  s.add(o.runs,
        {"RUN",
         "run directory of a run with `trace`; one of two runs may lack a trace; or a JSON file of `tessera "
         "bench`, or a 'pattern*.json' of several; with `figure` and no run: the plan of the options below, one "
         "of which may have several values: 1f1b,zb-h1",
         {0, 2}})
      .by_place();
  s.add(o.format, {"format", "a file, or text on standard output"}).of("html|text");
  s.add(o.figure, {"figure", "one picture"}).of(report::kFigures);
  s.add(o.svg, {"svg", "form of the picture: one SVG file"});
  s.add(o.out, {"out", "file to write; default: a name in RUN, or standard output for a plan"}).a("a file to write");
  return s;
}

Settings field_descriptors(BenchOptions& o) {
  Settings s;
  s.add(o.table, {"table", "prints one aligned table of each group, when all rows have run"});
  s.add(o.model, {"model", "the model of strategy and schedule rows, and no other rows"}).of(preset_names());
  s.add(o.ranks,
        {"ranks", "only rows of so many ranks, for example 1,2; default: 2, 4 and, of collectives, 8", {1, 64}});
  s.add(o.bytes,
        {"bytes",
         "only collectives, of these sizes: FROM:TO:FACTOR, as 8:128M:2, or one size; K, M, G: 1024, 1024^2, .."})
      .a("FROM:TO:FACTOR, as 8:128M:2");
  s.add(o.dtype, {"dtype", "only rows of this type"}).of("fp32|bf16");
  s.add(o.device, {"device", "where rows run"});
  return s;
}

Settings field_descriptors(PlanOptions& o) {
  Settings s;
  s.group("Planning");
  s.add(o.hardware, {"hardware",
                     "hardware of the ranks: a name such as h100 or a100-80, a TOML file, or this (this machine, "
                     "measured)"})
      .a("the name of a machine, this, or a file");
  s.add(o.software, {"software", "software that trains: tessera, megatron, deepspeed, fsdp, or a TOML file"})
      .a("the name of a program, or a file");
  s.add(o.memory_gb, {"memory", "GB that a rank may use; default: all that the hardware has", {1e-3, 1e6}});
  s.add(o.ep, {"ep",
               "expert-parallel ranks: they share out the experts of a model; they are cut out of `dp` x `cp`",
               {1, 1e6}});
  s.add(o.top, {"top", "number of plans to show", {1, 1000}});
  s.add(o.html, {"html", "writes the answer to this file, as one page for any browser"}).a("a file");
  s.add(o.cases, {"cases", "JSONL file of models, plans and machines: one prediction for each line"}).a("a file");
  s.add(o.measure, {"measure",
                    "runs these plans of the ranking here, for example 1,2,3, and compares prediction and measurement",
                    {1, 1000}});
  s.add(o.calibrate, {"calibrate", "measures this machine again and keeps the result"});
  s.add(o.format, {"format", kFormat}).of("text|json");
  return s;
}

Settings field_descriptors(CheckpointOptions& o, CheckpointOptions::Way way) {
  using Way = CheckpointOptions::Way;
  const auto at = static_cast<size_t>(way);
  constexpr std::array<std::string_view, 5> from = {"folder with config.json and model.safetensors, or shards of it",
                                                    "run directory, or a checkpoint in one",
                                                    "run directory, or a checkpoint in one",
                                                    "run directory, a checkpoint in one, or a Hugging Face folder",
                                                    "run directory, checkpoint, or Hugging Face folder"},
                                            out = {"run to make", "folder to make", "run to make", "folder to make"};
  Settings s;
  s.add(o.from, {"FROM", from.at(at)}).by_place();
  if (way != Way::reshard && way != Way::quantize) s.add(o.base, {"base", kBase}).a("a folder");
  if (way != Way::inspect) s.add(o.out, {"out", out.at(at)}).a("a folder to make");
  if (way == Way::import || way == Way::write)
    s.add(o.dtype, {"dtype", "type of the stored tensors (default: unchanged)"}).of("fp32|bf16");
  if (way == Way::import)
    s.add(o.tokenizer, {"tokenizer", "bytes, or a tokenizer's folder; default: the folder's own"}).a("a tokenizer");
  if (way == Way::write)
    s.add(o.merge, {"merge", "adds adapters to the weights; default: writes the adapters alone, as PEFT does"});
  if (way != Way::quantize) return s;
  s.add(o.method, {"method", "gptq, or rtn: each weight to the nearest value, to compare with"}).of("gptq|rtn");
  s.add(o.bits, {"bits", "of a weight"}).of("4");
  s.add(o.group, {"group", "inputs whose weights share a scale, a divisor of every layer's; -1: all", {-1, 1e9}});
  s.add(o.calibrate, {"calibrate", "text, tokens or examples like those that the model is to read; not needed by rtn"})
      .a("a text, a token file or examples");
  s.add(o.windows, {"windows", "of the context's length, spread over the calibration data", {1, 1e9}});
  return s;
}

Settings field_descriptors(ExploreOptions& o) {
  Settings s;
  s.add(o.port, {"port", "port of 127.0.0.1; default: 8421, or any free one if that is taken", {0, 65535}});
  return s;
}

Settings field_descriptors(LabOptions& o, LabOptions::Way way) {
  using Way = LabOptions::Way;
  Settings s;
  const Bounds places = way == Way::check ? Bounds{0, 1} : Bounds{};
  if (way != Way::list)
    s.add(o.exercise, {"N", "number or name of an exercise, or of a puzzle: p1", places}).by_place();
  if (way == Way::start) s.add(o.folder, {"DIR", "folder to make"}).by_place();
  if (way != Way::check) return s;
  s.add(o.folder, {"DIR", "folder of lab start; of a puzzle also the file", places}).by_place();
  s.add(o.all, {"all", "check a class: a folder with a folder of each learner"}).a("a folder");
  s.add(o.format, {"format", kFormat}).of("text|json");
  return s;
}

TrainOptions verify_defaults() {
  TrainOptions o;
  o.optim.steps = 20;
  o.optim.warmup = 2;
  o.optim.lr = 3e-3;
  o.sizes.dropout = 0.1;
  o.plan.timeout = 60;
  o["attention"] = "own";  // a row has its bits in any batch, which cuDNN does not promise
  o.plan.deterministic = true;
  return o;
}

TrainOptions plan_defaults() {
  TrainOptions o;
  o.optim.dtype = DType::bfloat16;
  return o;
}

bool PlanOptions::gives(std::string_view option) const {
  return std::ranges::any_of(words, [&](const auto& w) { return w.first == option; });
}

bool is_searched(std::string_view option) {
  planner::Layout layout;
  const Settings predicted = planner::field_descriptors(layout);
  return option == "ranks" || option == "cp-mode" || (option != "ep" && predicted.find_word(option));
}

bool is_of_plan(const Setting& s) {
  return s.field.group == "Model" || s.field.name == "batch" || is_searched(s.word());
}

void set_option(TrainOptions& o, std::string_view name, const std::string& text) {
  const Settings all = field_descriptors(o);
  const Setting* s = all.find_word(name);
  if (!s) bad_usage("--{}: there is no such option", name);
  s->read(fmt::format("--{}", name), text);
  o.given.emplace(s->field.name);
  // Two options may stand for each other: the one said last holds, over the one of a file.
  if (name == "steps") forget(o, {"epochs"});
  if (name == "epochs") o.given.erase("steps");
  if (name == "val-share") forget(o, {"val_data"});
}

void TrainOptions::OptionRef::say(const std::string& text) const {
  std::string word(name);
  std::ranges::replace(word, '_', '-');
  set_option(options, word, text);
}

void forget(TrainOptions& o, const std::vector<std::string_view>& names) {
  TrainOptions usual;
  const Settings all = field_descriptors(o), others = field_descriptors(usual);
  for (const std::string_view name : names) {
    all.at(name).assign(others.at(name));
    o.given.erase(std::string(name));
  }
}

void apply_config_file(TrainOptions& options, const std::string& path) { apply_config(options, read_file(path), path); }

void apply_config(TrainOptions& o, std::string_view file, const std::string& path) {
  const Settings all = field_descriptors(o);
  std::vector<std::string> known;
  for (const Setting& s : all)
    if (s.field.in_file && is_in_files(s)) known.push_back(s.word());
  ErrorList found;
  for (const ConfigEntry& entry : read_config(file, path))
    found.check([&] {
      const std::string where = fmt::format("{}: {}", entry.where, entry.key);
      if (std::ranges::find(known, entry.key) == known.end())
        bad_usage("{}: unknown key{}", where, did_you_mean(entry.key, known));
      const Setting& s = *std::ranges::find(all, entry.key, &Setting::word);
      if (s.is_text() && !entry.text) bad_usage("{}: expected a string, found '{}'", where, entry.value);
      s.read(where, s.is_text() || (s.field.share && entry.text) ? *entry.text : entry.value);
      o.given.emplace(s.field.name);
    });
  found.raise();
}

Args config_values(const TrainOptions& options) {
  return values(options, [](const Field& f) { return f.in_file; });
}

Args all_values(const TrainOptions& options) {
  return values(options, [](const Field& f) { return f.name != "format" && f.name != "quiet" && f.name != "config"; });
}

std::string to_toml(const TrainOptions& options) {
  std::string out;
  for (const auto& [key, value] : config_values(options)) out += fmt::format("{} = {}\n", key, value);
  return out;
}

std::string with_options(const std::string& message) {
  static const std::set<std::string> known = [] {
    TrainOptions run;
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

void throw_with_options(const Error& error) {
  std::vector<std::string> messages = error_messages(error);
  for (std::string& message : messages) message = with_options(message);
  if (messages.size() == 1) throw Error(messages.front(), error.status());
  throw Errors(messages, error.status());
}

// Whether a text has a name in it that is no part of a word.
static bool has_name(std::string_view text, const std::string& name) {
  const auto is_letter = [&](size_t at) {
    return at < text.size() && std::isalnum(static_cast<uint8_t>(text[at])) != 0;
  };
  for (size_t at = text.find(name); at != std::string_view::npos; at = text.find(name, at + 1))
    if ((at == 0 || !is_letter(at - 1)) && !is_letter(at + name.size())) return true;
  return false;
}

void throw_of_option(std::string_view option, const std::string& path, const InputError& error) {
  const std::string words = with_options(error.what());
  if (path.empty() || words.starts_with("--") || !has_name(words, one_line(path))) throw InputError(words);
  bad_input("--{}: {}", option, words);
}

}  // namespace tessera
