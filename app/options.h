// Option structs of the commands, with field descriptors (base/setting.h). Descriptors of model, optimization and
// plan fields are defined next to their structs, in models/ and train/.
#pragma once
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/bad_input.h"
#include "base/error_list.h"
#include "base/setting.h"
#include "data/chat_template.h"
#include "train/config_file.h"

namespace tessera {

// Options of `train` and similar commands that are not part of a configuration.
struct TrainOptions {
  std::optional<int64_t> rank = {};
  int64_t restarts = 0;
  std::optional<std::string> launch = {}, hostfile = {};
  std::optional<std::string> config = {};
  std::string format = "text";
  bool quiet = false;
  bool trace = false;
  int64_t trace_steps = 10;

  bool json() const { return format == "json"; }
};

// What a user typed: a configuration without derived fields, which resolve() (app/resolve.h) adds.
struct TypedOptions : TrainConfig {
  TrainOptions own = {};
  FieldNames set = {};

  bool is_set(std::string_view name) const { return set.contains(name); }
  // o["dp"] = 2 sets the option from the text "2".
  struct OptionRef {
    TypedOptions& options;
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

// The result of the command line: a complete, validated configuration.
struct TrainCommand {
  TrainConfig config;
  TrainOptions options;
  FieldNames set = {};  // by the user, for config.toml
};

// `verify` trains synthetic random tokens under a plan and on one rank.
struct VerifyOptions {
  TrainCommand run = {};
  std::optional<std::string> defect = {};  // a fault name, "random" or "list"
  bool hide = false;
  std::optional<std::string> placements = {};  // a file
};
TypedOptions verify_defaults();
TypedOptions plan_defaults();

// FROM is a run directory, a checkpoint in one, or a folder of a model or adapters.
struct GenerateOptions {
  std::string from;
  std::vector<std::string> prompts;  // empty: a newline
  std::optional<std::string> prompts_file;
  bool chat = false;  // reads prompts as turns of a conversation from standard input
  ChatTemplate chat_template = ChatTemplate::none;
  std::optional<std::string> system;
  int64_t tokens = 300;
  double temperature = 0.8;
  int64_t top_k = 0;
  double top_p = 1, min_p = 0, repetition_penalty = 1;
  int64_t seed = 1337;
  std::vector<std::string> stop;
  bool ignore_end = false, special = false, no_bos = false;
  std::string format = "text";
  Args args;
};

struct EvaluateOptions {
  std::string from;
  Args args;
};

struct DatasetOptions {
  std::vector<std::string> sources;
  std::optional<std::string> tokenizer;
  int64_t vocab = 50257;
  int64_t shard_tokens = 0;
  bool special = false;
  std::optional<std::string> out;
};

struct ReportOptions {
  std::vector<std::string>
      runs;                     // run directories or `bench` files: one, or two to compare; may be empty with a figure
  std::string format = "html";  // or "text" on standard output
  std::optional<std::string> figure, out;
  bool svg = false;
  Args args = {};
};

struct BenchOptions {
  Device device = Device::cpu;
  std::optional<std::string> dtype, model, bytes;
  std::vector<int64_t> ranks;
  bool table = false;
  std::vector<std::string> args;  // passed to Google Benchmark
};

// `plan` also accepts the model, batch and layout options of `train`.
struct PlanOptions {
  TypedOptions run = plan_defaults();  // axes of any size, because no ranks are started
  Args args = {};                      // options of `run` that were set
  std::optional<std::string> model_file;
  std::optional<std::string> hardware;
  std::string software = "tessera";
  std::optional<int64_t> ep;
  std::optional<double> memory_gb;
  int64_t top = 10;
  std::optional<std::string> html, cases;
  bool calibrate = false;
  std::vector<int64_t> measure = {};  // positions in the ranking
  std::string format = "text";
};

struct CheckpointOptions {
  enum class Action { import, write, reshard, quantize, inspect };
  Action action = Action::inspect;
  std::string from;
  std::optional<std::string> base = {};  // if `from` contains adapters
  std::string out;                       // import and reshard: a run directory; export and quantize: a folder
  bool merge = false;
  std::optional<std::string> dtype;      // default: the stored dtype
  std::optional<std::string> tokenizer;  // import: required if the folder has no tokenizer
  Args layout;                           // reshard: plan options; quantize: options of its single rank
  std::string method = "gptq", bits = "4", calibrate;
  int64_t group = 128, windows = 128;
};

struct AuditOptions {
  std::vector<std::string> paths;  // the recording, and the reference if any
  std::optional<std::string> html, svg;
  std::string format = "text";
};

struct ExploreOptions {
  std::optional<int64_t> port;
};

struct LabOptions {
  enum class Action { list, start, check, grade, answer };
  Action action = Action::list;
  std::string exercise, directory, all, format = "text";
};

Settings field_descriptors(TrainConfig& config, TrainOptions& options);
Settings field_descriptors(TypedOptions& options);
Settings field_descriptors(VerifyOptions& options);  // only those specific to `verify`
Settings field_descriptors(GenerateOptions& options);
Settings field_descriptors(EvaluateOptions& options);
Settings field_descriptors(DatasetOptions& options);
Settings field_descriptors(ReportOptions& options);
Settings field_descriptors(BenchOptions& options);
Settings field_descriptors(PlanOptions& options);
Settings field_descriptors(CheckpointOptions& options, CheckpointOptions::Action action);
Settings field_descriptors(AuditOptions& options);
Settings field_descriptors(ExploreOptions& options);
Settings field_descriptors(LabOptions& options, LabOptions::Action action);

// Whether `plan` accepts this option of `train`; whether the planner searches its values if unset.
bool is_of_plan(const Setting& setting);
bool is_searched(std::string_view option);

// Parses and sets option `name` ("min-lr"). Throws Error (usage): "--min-lr: expected X, got Y".
void set_option(TypedOptions& options, std::string_view name, const std::string& text);
void forget(TypedOptions& options, const std::vector<std::string_view>& names);
// As in train/config_file.h, with `options.set` as `set`.
Args config_values(const TypedOptions& options);
std::string to_toml(const TypedOptions& options);
void apply_config_file(TypedOptions& options, const std::string& path);
void apply_config(TypedOptions& options, std::string_view file, const std::string& path);

// Keys and values of all options except output options and --config, whose values are already included.
Args all_values(const TrainCommand& command);

// Replaces known field names in backticks by options: "`grad_dtype`: expected ..." becomes "--grad-dtype: expected
// ...".
std::string with_options(const std::string& message);
// Rethrows the error, prefixed with the option if it concerns `path` and names no option.
[[noreturn]] void throw_for_option(std::string_view option, const std::string& path, const InputError& error);
// Returns f(); applies throw_for_option() to InputErrors.
template <class F>
auto for_option(std::string_view option, const std::string& path, const F& f) {
  try {
    return f();
  } catch (const InputError& e) {
    throw_for_option(option, path, e);
  }
}

}  // namespace tessera
