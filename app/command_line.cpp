// The command line. CLI11 only splits the arguments; field descriptors parse the values, so errors of the command line
// and configuration file agree.
#include "app/command_line.h"

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <string>
#include <string_view>
#include <tuple>
#include <variant>
#include <vector>

#include "app/default_job.h"
#include "app/pretrained.h"
#include "app/resolve.h"
#include "base/config_file.h"
#include "base/setting_json.h"

namespace tessera {
namespace {

constexpr const char* kAbout =
    "Tessera trains small language models under any parallel layout and proves that the layout does not change the "
    "results.";
constexpr const char* kCommands =
    "train, verify, audit, generate, evaluate, checkpoint, data, bench, plan, report, explore, lab or describe";
constexpr double kMaxRanks = 1 << 20, kMaxBatch = 1e7;  // limits of `plan`, which starts no ranks

using Names = std::vector<std::string>;
const Names kGenerate = split("ranks dp tp pp zero dtype quantize backend device timeout threads-per-rank base", ' ');
const Names kEvaluateOptions = split(
    "base data batch context template train-on skip-bad map roles no-bos special ranks dp tp sp cp pp cp-mode zero "
    "dtype quantize backend device timeout threads-per-rank format",
    ' ');
const Names kQuantizeOptions =
    split("context batch template train-on skip-bad map roles no-bos special device threads-per-rank", ' ');
const Names kReshardOptions = split("ranks dp tp pp cp zero schedule chunks servers", ' ');
// verify generates its own sequences and writes nothing.
const Names kExcludedFromVerify = split(
    "cuda-graph staleness record replay data tokenizer add-tokens end out resume keep quiet save-every no-save no-eval "
    "config eval-every trace trace-steps check-replicas template train-on pack skip-bad map roles no-bos special init "
    "base epochs patience val-data val-share shuffle restarts launch hostfile",
    ' ');

bool is_among(const Names& names, const Setting& s) { return std::ranges::find(names, s.word()) != names.end(); }

bool is_plan_property(const Setting& s) {
  const std::string_view name = s.name;
  if (name == "record" || name == "replay" || name == "staleness") return false;
  return s.field.group == "Model" || s.field.group == "Plan" || name == "batch" || name == "microbatches" ||
         name == "recompute" || name == "optimizer";
}

// Reads app/help/NAME.txt; empty if the file does not exist.
std::string help_footer(const std::string& command) {
  const auto found = std::ranges::find(help::help_files(), command, &EmbeddedFile::name);
  return found == help::help_files().end() ? "" : std::string(found->text.substr(0, found->text.size() - 1));
}

// Registers each option once, for CLI11 and for `describe`.
class CommandLine {
 public:
  CommandLine();
  Command parse(int argc, const char* const* argv);

 private:
  using Take = std::function<void(const Setting&, const std::string&)>;
  enum class Defaults : uint8_t { none, all, but_searched };

  CLI::App* command(CLI::App& owner, const std::string& name, const std::string& about);
  void add(CLI::App* to, const Setting& setting, const Take& take, bool has_default);
  // The command's own options. Reports all errors, collected in `errors_`.
  void add(CLI::App* to, const Settings& settings);
  // Options of a run, collected as text and parsed after the complete command line is known.
  void add_run(CLI::App* to, TypedOptions& defaults, Args& args, const std::function<bool(const Setting&)>& wanted,
               Defaults shown = Defaults::none);
  void add_run(CLI::App* to, Args& args, const Names& names) {
    add_run(to, run_, args, [&names](const Setting& s) { return is_among(names, s); });
  }
  std::string to_json_text() const;
  const CLI::App* chosen() const;
  void refuse(const std::string& message) {
    errors_.check([&] { throw Error(message); });
  }
  void refuse_leftovers();
  Command parsed_command();
  void set_all(TypedOptions& o, const Args& args);
  void set_plan_option(const std::string& name, const std::string& text);
  template <class Options>
  Options with_checked_args(Options o);
  TrainCommand complete(const TypedOptions& o) { return {checked(o), o.own, o.set}; }
  TrainCommand train();
  Command verify();
  Command plan();

  CLI::App app_{kAbout, "tessera"};
  std::vector<std::pair<const CLI::App*, std::vector<std::pair<Setting, bool>>>> registered_;
  ErrorList errors_;
  Args args_;  // options of train and verify
  TypedOptions run_, verify_run_ = verify_defaults(), plan_run_ = plan_defaults();
  GenerateOptions generate_;
  EvaluateOptions evaluate_;
  DatasetOptions data_;
  BenchOptions bench_;
  PlanOptions plan_;
  Args plan_args_;
  ReportOptions report_;
  CheckpointOptions checkpoint_;
  AuditOptions audit_;
  ExploreOptions explore_;
  LabOptions lab_;
  VerifyOptions verify_;
  std::string describe_format_ = "json";
};

CLI::App* CommandLine::command(CLI::App& owner, const std::string& name, const std::string& about) {
  CLI::App* out = owner.add_subcommand(name, about);
  out->allow_extras();
  out->footer(help_footer(name));
  registered_.emplace_back(out, std::vector<std::pair<Setting, bool>>());
  return out;
}

void CommandLine::add(CLI::App* to, const Setting& s, const Take& take, bool has_default) {
  const std::string shown = "--" + s.word();
  std::string help = with_options(std::string(s.help));
  registered_.back().second.emplace_back(s, has_default);
  CLI::Option* made = nullptr;
  if (auto* const* many = std::get_if<std::vector<std::string>*>(&s.at); s.field.place || s.field.repeated) {
    const std::string name = s.field.place ? std::string(s.name) : shown;
    made = many ? to->add_option(name, **many, help) : to->add_option(name, *std::get<std::string*>(s.at), help);
    if (many) made->multi_option_policy(CLI::MultiOptionPolicy::TakeAll);
    if (s.field.repeated) made->expected(1);
    const bool bounded = s.field.range.max < 1e300;  // a bounded positional argument is optional
    if (s.field.place && many && bounded)
      made->expected(static_cast<int>(s.field.range.min), static_cast<int>(s.field.range.max));
    else if (s.field.place && !bounded)
      made->required();
  } else if (s.is_flag()) {  // --untied, or --untied=false
    made = to->add_flag_function(
        shown, [s, take](int64_t n) { take(s, n > 0 ? "true" : "false"); }, help);
    made->multi_option_policy(CLI::MultiOptionPolicy::TakeLast);
    made->check([](const std::string& text) {  // otherwise std::stoll throws inside CLI11
      return text == "true" || text == "false" ? "" : fmt::format("expected true or false, got '{}'", text);
    });
  } else {
    if (const std::string choices = s.choices(); !choices.empty()) help += ": " + choices;
    if (const std::string value = s.text(); has_default && !s.field.open && !value.empty())
      help += fmt::format(" [{}]", value);
    made = to->add_option_function<std::string>(
        shown, [s, take](const std::string& text) { take(s, text); }, help);
  }
  if (!s.is_flag()) made->type_name("");
  if (!s.field.group.empty()) made->group(std::string(s.field.group));
}

void CommandLine::add(CLI::App* to, const Settings& settings) {
  const Take read = [this](const Setting& s, const std::string& text) {
    errors_.check([&] { s.read("--" + s.word(), text); });
  };
  for (const Setting& s : settings) add(to, s, read, true);
}

void CommandLine::add_run(CLI::App* to, TypedOptions& defaults, Args& args,
                          const std::function<bool(const Setting&)>& wanted, Defaults shown) {
  const Take note = [&args](const Setting& s, const std::string& text) { args.emplace_back(s.word(), text); };
  for (const Setting& s : field_descriptors(defaults))
    if (s.field.in_words && wanted(s))
      add(to, s, note, shown == Defaults::all || (shown == Defaults::but_searched && !is_searched(s.word())));
}

CommandLine::CommandLine() {
  app_.get_formatter()->column_width(24);
  app_.option_defaults()->multi_option_policy(CLI::MultiOptionPolicy::TakeLast);
  app_.set_version_flag("--version", "tessera " TESSERA_VERSION);
  app_.footer(help_footer("tessera"));
  app_.allow_extras();
  app_.require_subcommand(0, 1);  // later command names are arguments: a run may be called "train"
  const auto any = [](const Setting&) { return true; };
  CLI::App* c = command(app_, "train", "Train a language model; without options, a small one on English prose");
  c->footer(fmt::format("{}\nWithout a model, data or tokenizer option, the default job is trained:\n  {}",
                        help_footer("train"), default_job_args(default_job())));
  add_run(c, run_, args_, any, Defaults::all);
  c = command(app_, "verify", "Prove that a plan trains like one rank, and check its traffic and memory");
  add_run(
      c, verify_run_, args_, [](const Setting& s) { return !is_among(kExcludedFromVerify, s); }, Defaults::all);
  add(c, field_descriptors(verify_));
  c = command(app_, "audit", "Compare a recorded step of any program with a reference, and name the likely fault");
  add(c, field_descriptors(audit_));
  c = command(app_, "generate", "Generate text with a trained model");
  add(c, field_descriptors(generate_));
  add_run(c, generate_.args, kGenerate);
  c = command(app_, "evaluate", "Evaluate the loss of a model on text or examples");
  add(c, field_descriptors(evaluate_));
  add_run(c, evaluate_.args, kEvaluateOptions);
  c = command(app_, "data", "Tokenize text into a dataset");
  add(c, field_descriptors(data_));
  c = command(app_, "bench", "Benchmark operations, collectives, strategies and schedules");
  add(c, field_descriptors(bench_));
  c = command(app_, "plan", "Choose a parallel layout for a model and a machine, without running it");
  add_run(c, plan_run_, plan_args_, is_of_plan, Defaults::but_searched);
  add(c, field_descriptors(plan_));
  c = command(app_, "report", "Report on a run or compare two: timeline, memory, traffic, loss");
  add(c, field_descriptors(report_));
  add_run(c, run_, report_.args, is_plan_property);
  CLI::App* owner = command(app_, "checkpoint", "Import, export and convert models in Hugging Face format");
  const auto checkpoint_action = [&](const char* name, const char* about, CheckpointOptions::Action action) {
    c = command(*owner, name, about);
    c->callback([this, action] { checkpoint_.action = action; });
    add(c, field_descriptors(checkpoint_, action));
  };
  using Subcommand = CheckpointOptions::Action;
  checkpoint_action("import", "Convert a Hugging Face folder to a run for train --init, generate and export",
                    Subcommand::import);
  checkpoint_action("export", "Convert a run or a checkpoint to a folder that transformers can load",
                    Subcommand::write);
  checkpoint_action("reshard", "Rewrite a run with one file per rank of a layout, or with full tensors",
                    Subcommand::reshard);
  add_run(c, checkpoint_.layout, kReshardOptions);
  checkpoint_action("quantize", "Quantize the weights of attention and feed-forward layers to 4 bits",
                    Subcommand::quantize);
  add_run(c, checkpoint_.layout, kQuantizeOptions);
  checkpoint_action("inspect", "Show the contents of a run, a checkpoint or a Hugging Face folder",
                    Subcommand::inspect);
  c = command(app_, "explore", "Explore the planner interactively, in a browser on this machine");
  add(c, field_descriptors(explore_));
  owner = command(app_, "lab", "Puzzles and exercises on parallel training, solved in files or C++ functions");
  const auto lab_action = [&](const char* name, const char* about, LabOptions::Action action) {
    c = command(*owner, name, about);
    c->callback([this, action] { lab_.action = action; });
    add(c, field_descriptors(lab_, action));
  };
  lab_action("list", "List puzzles and exercises (the default)", LabOptions::Action::list);
  lab_action("start", "Create the directory of a puzzle or exercise, with its page and the file to write",
             LabOptions::Action::start);
  lab_action("check", "Grade the file of a puzzle, or build and grade a C++ function", LabOptions::Action::check);
  lab_action("grade", "Grade the function that is built into this program", LabOptions::Action::grade);
  lab_action("answer", "Answer the questions of a grader (started by check)", LabOptions::Action::answer);
  owner->require_subcommand(0, 1);
  c = command(app_, "describe", "Print every option of every command, for programs that build command lines");
  add(c, {{"format", &describe_format_, "output format", Field{.choices = "json"}}});
}

// {"version": .., "commands": [{"command": "train", "help": .., "options": [..]}, ..]}
std::string CommandLine::to_json_text() const {
  nlohmann::ordered_json commands = nlohmann::ordered_json::array();
  for (const auto& [app, settings] : registered_) {
    const CLI::App* owner = app->get_parent();
    nlohmann::ordered_json options = nlohmann::ordered_json::array();
    for (const auto& [setting, has_default] : settings) {
      options.push_back(make_entry(setting, with_options));
      if (!has_default) options.back().erase("default");
    }
    commands.push_back({{"command", owner == &app_ ? app->get_name() : owner->get_name() + " " + app->get_name()},
                        {"help", app->get_description()},
                        {"options", options}});
  }
  return nlohmann::ordered_json{{"version", TESSERA_VERSION}, {"commands", commands}}.dump() + "\n";
}

const CLI::App* CommandLine::chosen() const {
  const auto all = app_.get_subcommands();
  return all.empty() ? nullptr : all.front();
}

// Reports every unknown option with the nearest valid name or, without any, the first unexpected argument.
void CommandLine::refuse_leftovers() {
  const CLI::App* const command = chosen();
  std::vector<std::string> left = app_.remaining(true);
  std::erase_if(left, [&](const std::string& word) {
    return command && command->get_name() == "bench" && (word.starts_with("--benchmark_") || word.starts_with("--v="));
  });
  if (left.empty()) return;
  std::vector<std::string> known;
  if (!command && !left.front().starts_with("-")) {
    for (const CLI::App* c : app_.get_subcommands({})) known.push_back(c->get_name());
    return refuse(
        fmt::format("unknown command '{}'; expected {}{}", left.front(), kCommands, did_you_mean(left.front(), known)));
  }
  const CLI::App* const owner = command ? command : &app_;
  for (const CLI::Option* option : owner->get_options())
    for (const std::string& name : option->get_lnames()) known.push_back("--" + name);
  const bool options = std::ranges::any_of(left, [](const std::string& word) { return word.starts_with("-"); });
  for (const std::string& word : left) {
    if (options && !word.starts_with("-")) continue;  // probably the value of an unknown option
    const std::string name = word.substr(0, word.find('='));
    if (!options) return refuse(fmt::format("unexpected argument '{}'", word));
    refuse(fmt::format("unknown option '{}'{}", name, did_you_mean(name, known)));
  }
}

std::string parse_error_text(const CLI::ParseError& e) {
  std::string text = e.what();
  if (dynamic_cast<const CLI::ArgumentMismatch*>(&e) != nullptr)
    return fmt::format("{}: expected a value, got none", text.substr(0, text.find(':')));
  const size_t name = text.find("--"), value = text.find(" = ");  // a flag: "Could not convert: --quiet = maybe"
  if (dynamic_cast<const CLI::ConversionError*>(&e) == nullptr || name == text.npos || value == text.npos) return text;
  return fmt::format("{}: expected true or false, got '{}'", text.substr(name, value - name), text.substr(value + 3));
}

void CommandLine::set_all(TypedOptions& o, const Args& args) {
  for (const auto& [name, text] : args) errors_.check([&, &name = name, &text = text] { set_option(o, name, text); });
  const auto is_given = [&](const char* name) {
    return std::ranges::find(args, name, &Args::value_type::first) != args.end();
  };
  for (const auto& [one, other] : {std::pair("epochs", "steps"), {"val-data", "val-share"}})
    if (is_given(one) && is_given(other))
      refuse(fmt::format("--{}: cannot be combined with --{}, which it replaces", one, other));
  errors_.raise();
}

// Parses run options before the model is opened, to report errors early.
template <class Options>
Options CommandLine::with_checked_args(Options o) {
  TypedOptions run;
  set_all(run, o.args);
  return o;
}

Command CommandLine::verify() {
  if (verify_.hide && !verify_.defect) refuse("--hide: requires --defect (random or the name of a fault)");
  const bool has_plan_options = std::ranges::any_of(args_, [](const auto& w) { return w.first != "format"; });
  if (verify_.placements && (verify_.defect || has_plan_options))
    refuse("--placements: cannot be combined with plan options, because the file specifies ranks and sizes");
  TypedOptions o = verify_run_;
  set_all(o, args_);
  verify_.run = complete(o);
  return verify_;
}

// Stores the base model's path as an absolute path. A resumed run must use the base model it started with.
void fix_base(RunConfig& r) {
  TrainConfig saved_config;
  const RunConfig& saved = saved_config.run;
  const std::string config = r.out ? (std::filesystem::path(*r.out) / "config.toml").string() : "";
  if (r.resume && is_there(config)) apply_config_file(saved_config, config);
  const auto canonical = [](const std::string& path) { return std::filesystem::weakly_canonical(path).string(); };
  for (const auto& [name, now, before] : {std::tuple("init", &r.init, &saved.init), {"base", &r.base, &saved.base}}) {
    if (r.resume && *now != *before && (!*now || !*before || canonical(**now) != canonical(**before)))
      bad_usage("--{}: the run in {} was started with {}; expected the same value, got {}", name, *r.out,
                before->value_or("none"), now->value_or("none"));
    if (r.resume)
      *now = *before;
    else if (*now)
      *now = canonical(**now);
  }
  r.adapter_base = saved.adapter_base, r.base_hash = saved.base_hash;
}

TrainCommand CommandLine::train() {
  std::string config, out;
  bool resume = false;
  if (TypedOptions o; !errors_.none()) set_all(o, args_);  // reports all errors before any file is read
  for (const auto& [name, text] : args_) {
    if (name == "config") config = text;
    if (name == "out") out = text;
    if (name == "resume") resume = text == "true";
  }
  const bool resumed = resume && !out.empty() && config.empty();
  if (resumed) config = (std::filesystem::path(out) / "config.toml").string();
  bool chooses = std::ranges::any_of(args_, [](const auto& w) { return chooses_job(w.first, w.second); });
  const std::string file =
      config.empty() ? "" : for_option(resumed ? "resume" : "config", config, [&] { return read_file(config); });
  for (const ConfigEntry& entry : read_config(file, config)) chooses = chooses || chooses_job(entry.key, entry.value);
  TypedOptions o = chooses ? TypedOptions{} : default_job();
  errors_.check([&] { apply_config(o, file, config); });
  set_all(o, args_);
  if (o.run.init && !resume) take_model(o, for_option("init", *o.run.init, [&] { return first_config(o); }));
  if (o.run.base && !o.run.init) throw Error("--base: requires --init ADAPTERS");
  if (!resume || !out.empty()) fix_base(o.run);
  if (o.optim.dtype == DType::float64)
    throw Error("--dtype: fp64 is supported only by tessera verify; expected fp32 or bf16");
  return complete(o);
}

void CommandLine::set_plan_option(const std::string& name, const std::string& text) {
  PlanOptions& o = plan_;
  if (name == "model" && text.ends_with(".json")) {
    o.model_file = text;
  } else {
    const Settings all = field_descriptors(o.run);
    Setting s = *all.find_word(name);
    if (name == "ranks" || name == "pp" || name == "dp" || name == "cp" || name == "tp") s.field.range.max = kMaxRanks;
    if (name == "batch") s.field.range.max = kMaxBatch;
    s.read("--" + name, text);
    o.run.set.emplace(s.name);
    if (name == "model") o.model_file.reset();
  }
  std::erase_if(o.args, [&](const auto& w) { return w.first == name; });
  o.args.emplace_back(name, text);
}

Command CommandLine::plan() {
  for (const auto& [name, text] : plan_args_)
    errors_.check([&, &name = name, &text = text] { set_plan_option(name, text); });
  errors_.raise();
  const DType dtype = plan_.run.optim.dtype;
  if (dtype != DType::bfloat16 && (plan_.hardware != "this" || dtype == DType::float64))
    bad_usage("--dtype: expected bf16, the only dtype for which hardware descriptions specify rates; got '{}'",
              value_name(dtype));
  return plan_;
}

// `help` and `help train` are aliases of `--help` and `train --help`.
std::vector<const char*> with_help(int argc, const char* const* argv) {
  std::vector<const char*> args(argv, argv + argc);
  if (argc < 2 || std::string_view(argv[1]) != "help") return args;
  args.erase(args.begin() + 1);
  args.push_back("--help");
  return args;
}

Command CommandLine::parsed_command() {
  const std::string name = chosen() ? chosen()->get_name() : "";
  if (name == "bench") {
    bench_.args = chosen()->remaining();
    refuse_leftovers();
    errors_.raise();
    return bench_;
  }
  refuse_leftovers();
  if (name == "train") return train();
  if (name == "verify") return verify();
  if (name == "generate") return with_checked_args(generate_);
  if (name == "evaluate") return with_checked_args(evaluate_);
  if (name == "plan") return plan();
  errors_.raise();
  if (!chosen()) bad_usage("no command given; expected {} (see tessera --help)", kCommands);
  if (name == "describe") return Print{to_json_text()};
  if (name == "report") return report_;
  if (name == "audit") return audit_;
  if (name == "explore") return explore_;
  if (name == "data") return data_;
  if (name == "lab") return lab_;
  const std::vector<CLI::App*> action = chosen()->get_subcommands();
  if (action.empty()) throw Error("checkpoint: expected import, export, inspect, quantize or reshard");
  if (checkpoint_.action != CheckpointOptions::Action::inspect && checkpoint_.out.empty())
    throw Error("--out: missing; expected a new directory for the result of checkpoint " + action.front()->get_name());
  return checkpoint_;
}

Command CommandLine::parse(int argc, const char* const* argv) {
  const std::vector<const char*> given = with_help(argc, argv);
  try {
    app_.parse(static_cast<int>(given.size()), const_cast<char**>(given.data()));  // CLI11 2.1 does not modify argv
  } catch (const CLI::CallForHelp&) {
    return Print{chosen() ? chosen()->help("tessera") : app_.help()};
  } catch (const CLI::CallForVersion& e) {
    return Print{std::string(e.what()) + "\n"};
  } catch (const CLI::ParseError& e) {
    refuse_leftovers();
    if (errors_.none() || dynamic_cast<const CLI::ArgumentMismatch*>(&e) != nullptr ||
        dynamic_cast<const CLI::ConversionError*>(&e) != nullptr)
      refuse(parse_error_text(e));
    errors_.raise();
  }
  return parsed_command();
}

}  // namespace

Command parse_command_line(int argc, const char* const* argv) { return CommandLine().parse(argc, argv); }

}  // namespace tessera
