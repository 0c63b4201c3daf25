// The commands' options: plain structs, and the entry of each of their fields (settings/setting.h). A model, its
// optimisation and a plan are described beside their structs, in models/ and train/.
#pragma once

#include "data/bad_input.h"
#include "data/jsonl.h"
#include "data/text.h"
#include "settings/setting.h"
#include "tensor/findings.h"
#include "train/job.h"

namespace tessera {

using Args = std::vector<std::pair<std::string, std::string>>;  // options: name, text

struct TrainOptions {
  std::string model = "gpt-nano";  // whose sizes stand where no others are given
  ModelConfig sizes = {};
  Optimisation optim = {};
  Plan plan = {};
  std::optional<int64_t> ranks, rank;
  // data
  std::string data = "austen";
  HeldOut held = {};
  std::optional<std::string> init, base, tokenizer;
  std::optional<std::string> adapter_base, base_hash;  // of a run with adapters: where their base is, and its hash
  std::string add_tokens, end;                         // of the tokenizer
  bool shuffle = false;
  // fine-tuning
  ChatTemplate chat_template = ChatTemplate::automatic;
  std::string train_on = "responses";
  bool pack = false, skip_bad = false, no_bos = false, special = false;
  std::string map, roles;  // other names of a row's keys, and of roles
  // files
  std::optional<std::string> out;
  int64_t save_every = 500, keep = 2, eval_every = 500;
  double save_share = 0, eval_share = 0;  // of an epoch, in place of those steps; 0: none
  std::optional<double> epochs;           // in place of optim.steps
  int64_t patience = 0;
  int64_t check_replicas = 0;
  bool no_save = false, no_eval = false;
  bool resume = false;
  int64_t restarts = 0;
  std::optional<std::string> launch, hostfile;
  std::optional<std::string> config;
  // output
  std::string format = "text";
  bool quiet = false;
  bool trace = false;
  int64_t trace_steps = 10;
  int64_t dump = 0;  // 0: no step

  std::set<std::string, std::less<>> given = {};  // names of the fields that somebody said
  bool gives(std::string_view name) const { return given.contains(name); }
  bool json() const { return format == "json"; }
  // An option as a user says it: o["dp"] = 2.
  struct OptionRef {
    TrainOptions& options;
    std::string_view name;
    template <class T>
    const T& operator=(const T& value) const {
      say(fmt::format("{}", value));
      return value;
    }
    void say(const std::string& text) const;
  };
  OptionRef operator[](std::string_view name) { return {*this, name}; }
};

// `verify` trains counted random tokens under a plan, beside one rank.
struct VerifyOptions {
  TrainOptions run;
  std::optional<std::string> defect = {};  // the name of one, "random" or "list"
  bool hide = false;
  std::optional<std::string> placements = {};  // a file
};
TrainOptions verify_defaults();
TrainOptions plan_defaults();

// Commands that use a model take a run directory, a checkpoint in one, or the folder of a model or of adapters.
struct GenerateOptions {
  std::string from;
  std::vector<std::string> prompts;         // empty: a new line
  std::optional<std::string> prompts_file;  // one on each line
  bool chat = false;                        // prompts are the turns of a conversation, from standard input
  ChatTemplate chat_template = ChatTemplate::none;
  std::optional<std::string> system;
  int64_t tokens = 300;
  double temperature = 0.8;
  int64_t top_k = 0;  // 0: all
  double top_p = 1, min_p = 0, repetition_penalty = 1;
  int64_t seed = 1337;
  std::vector<std::string> stop;  // texts
  bool ignore_end = false, special = false, no_bos = false;
  std::string format = "text";
  Args words;  // the plan's options
};

struct EvaluateOptions {
  std::string from;
  Args words;  // options of the data and of the plan
};

struct DatasetOptions {
  std::vector<std::string> sources;
  std::optional<std::string> tokenizer;
  int64_t vocab = 50257;  // tokens of a bpe tokenizer that is trained
  int64_t shard_tokens = 0;
  bool special = false;
  std::optional<std::string> out;
};

struct ReportOptions {
  std::vector<std::string>
      runs;  // run directories, or files of bench: one, or two to be compared; with a figure also none
  std::string format = "html";  // or "text", on standard output
  std::optional<std::string> figure, out;
  bool svg = false;
  Args words = {};  // options of a plan that is drawn where there is no run
};

struct BenchOptions {
  Device device = Device::cpu;
  std::optional<std::string> dtype, model, bytes;
  std::vector<int64_t> ranks;
  bool table = false;
  std::vector<std::string> words;  // for Google Benchmark
};

// `plan` takes the model, the batch and the layout as `train` does, and what they are for.
struct PlanOptions {
  TrainOptions run = plan_defaults();     // axes of any number of ranks, since none is started
  Args words = {};                        // the options of the run that were given
  std::optional<std::string> model_file;  // JSON: sizes, experts among them
  std::optional<std::string> hardware;
  std::string software = "tessera";
  std::optional<int64_t> ep;
  std::optional<double> memory_gb;
  int64_t top = 10;
  std::optional<std::string> html, cases;
  bool calibrate = false;             // this machine is measured again
  std::vector<int64_t> measure = {};  // numbers of the ranking
  std::string format = "text";

  bool gives(std::string_view option) const;
};

// `checkpoint`: models in, out, looked at, in parts, and in 4 bits.
struct CheckpointOptions {
  enum class Way { import, write, reshard, quantize, inspect };
  Way way = Way::inspect;
  std::string from;
  std::optional<std::string> base = {};  // where `from` is adapters
  std::string out;                       // import and reshard: a run; export and quantize: a folder
  bool merge = false;                    // export: adapters into the weights
  std::optional<std::string> dtype;      // default: as it is stored
  std::optional<std::string> tokenizer;  // import: where the folder has none
  Args layout;                           // reshard: the plan; quantize: options of its one rank
  // for quantize:
  std::string method = "gptq", bits = "4", calibrate;
  int64_t group = 128, windows = 128;
};

struct ExploreOptions {
  std::optional<int64_t> port;  // 0: any that is free
};

struct LabOptions {
  enum class Way { list, start, check, grade, answer };
  Way way = Way::list;
  std::string exercise, folder, all, format = "text";
};

Settings field_descriptors(TrainOptions& options);
Settings field_descriptors(VerifyOptions& options);  // those of no run
Settings field_descriptors(GenerateOptions& options);
Settings field_descriptors(EvaluateOptions& options);
Settings field_descriptors(DatasetOptions& options);
Settings field_descriptors(ReportOptions& options);
Settings field_descriptors(BenchOptions& options);
Settings field_descriptors(PlanOptions& options);
Settings field_descriptors(CheckpointOptions& options, CheckpointOptions::Way way);
Settings field_descriptors(ExploreOptions& options);
Settings field_descriptors(LabOptions& options, LabOptions::Way way);

// Whether `plan` takes the option of `train`, and whether it searches for its value where it is not given.
bool is_of_plan(const Setting& setting);
bool is_searched(std::string_view option);

// Sets the option of that name ("min-lr") from the words of the command line. Throws Error (usage) that names the
// option, what is expected and what was found.
void set_option(TrainOptions& options, std::string_view name, const std::string& text);
// The fields of these names are as if nobody had said them.
void forget(TrainOptions& options, const std::vector<std::string_view>& names);

// Applies a TOML file. Throws InputError when it cannot be read, and what apply_config() throws.
void apply_config_file(TrainOptions& options, const std::string& path);
// Applies the text of one that `path` names in messages (read_config() says what may stand there). Throws Error (usage)
// with line and column for a syntax error, an unknown key (with the nearest known one) or a value of the wrong type or
// range.
void apply_config(TrainOptions& options, std::string_view file, const std::string& path);
// The options as a TOML file that apply_config_file() reads back to the same values.
std::string to_toml(const TrainOptions& options);
// Keys and values of to_toml() one by one; options that were not given are left out.
Args config_values(const TrainOptions& options);
// Keys and values of all options but those about what is said to the user, and but --config, which is one of the files
// that the others come from.
Args all_values(const TrainOptions& options);

// Throws Error (usage) with this text, as fmt::format() makes it; bad_input() throws InputError.
template <class... Values>
[[noreturn]] void bad_usage(fmt::format_string<Values...> text, Values&&... values) {
  throw Error(fmt::format(text, std::forward<Values>(values)...));
}
// A message of a library, which names fields between backticks, as the user knows them: "`grad_dtype`: expected ..."
// becomes "--grad-dtype: expected ...". Another name stays as it is.
std::string with_options(const std::string& message);
// Throws an error that is being handled again, with with_options() of all its messages.
[[noreturn]] void throw_with_options(const Error& error);
// Returns the result of f, whose errors name options.
template <class F>
auto in_options(const F& f) {
  try {
    return f();
  } catch (const Error& e) {
    throw_with_options(e);
  }
}
// That error again, with the option before it where it is about `path` and names none.
[[noreturn]] void throw_of_option(std::string_view option, const std::string& path, const InputError& error);
// Returns the result of f. Its InputError about `path`, a file that cannot be read or used, begins with the option that
// named it.
template <class F>
auto of_option(std::string_view option, const std::string& path, const F& f) {
  try {
    return f();
  } catch (const InputError& e) {
    throw_of_option(option, path, e);
  }
}

}  // namespace tessera
