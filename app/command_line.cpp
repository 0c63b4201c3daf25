// CLI11 behind one function. It splits the words; values are checked by app/option_values, so that the command line and
// the configuration file say the same about them.
#include "app/command_line.h"

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <array>
#include <filesystem>
#include <vector>

#include "app/data_options.h"
#include "app/default_job.h"
#include "app/inference_options.h"
#include "app/option_values.h"
#include "app/plan/text.h"
#include "app/report/options.h"
#include "app/run/pretrained.h"
#include "app/run_words.h"
#include "data/config_file.h"
#include "data/files.h"
#include "tensor/error.h"

namespace tessera {
namespace {

constexpr const char* kAbout =
    "Tessera trains small language models under any layout, and proves that the layout changes nothing.";
constexpr const char* kCommands =
    "train, verify, generate, evaluate, checkpoint, data, bench, plan, report, explore or lab";
constexpr const char* kTrainExamples =
    "Examples:\n"
    "  tessera train                                   a small model on six novels of Jane Austen, in a minute or two\n"
    "  tessera train --data notes.txt --steps 500      your own text\n"
    "  tessera train --model gpt-mini --dtype bf16     six layers of 384 channels, in bfloat16\n"
    "  tessera train --resume --out runs/mine          go on where a run was stopped\n"
    "  tessera train --restarts 3 --save-every 100     start again by itself, should the process be killed";
constexpr const char* kVerifyExamples =
    "Examples:\n"
    "  tessera verify                                  two data-parallel ranks against one rank, bit for bit\n"
    "  tessera verify --ranks 4 --zero 3 --dtype bf16 --microbatches 3\n"
    "  tessera verify --all-reduce ring --bucket-mb 0.1 --optimizer sgd --format json\n"
    "  tessera verify --tp 2 --defect random --hide    a game: which defect was planted?";
constexpr const char* kBenchExamples =
    "Examples:\n"
    "  tessera bench --benchmark_filter=^op/                          operations, forward and backward\n"
    "  tessera bench --benchmark_filter=op/attention.*fp32            some of them\n"
    "  tessera bench --benchmark_filter=collective/all_reduce/direct  by size: bandwidth, latency, bytes\n"
    "  mpirun -n 2 tessera bench --benchmark_filter=collective        beside MPI's own\n"
    "  tessera bench --benchmark_filter=strategy/zero-3/fp32/2        a step beside one rank's\n"
    "  tessera bench --benchmark_filter=schedule/zb-h1/4/8            a pipeline's bubble\n"
    "  tessera bench --benchmark_list_tests                           all names\n"
    "  tessera bench --device cuda                                    on GPUs, where operations are larger\n"
    "The other flags are Google Benchmark's. docs/measurements.md says how to read the rows.";

// verify makes its own sequences and writes nothing.
bool is_of_verify(std::string_view name) {
  constexpr std::array<std::string_view, 27> others = {
      "cuda-graph", "staleness", "record",      "replay",         "data",     "tokenizer", "out",
      "resume",     "keep",      "quiet",       "save-every",     "no-save",  "no-eval",   "config",
      "eval-every", "trace",     "trace-steps", "check-replicas", "template", "train-on",  "pack",
      "skip-bad",   "init",      "shuffle",     "restarts",       "launch",   "hostfile"};
  return std::ranges::find(others, name) == others.end();
}

void add_run(CLI::App* command, Words& words, const std::string& examples, const RunWords& how) {
  add_run_words(*command, words, how);
  command->footer(examples);
}

void add_bench(CLI::App& app, BenchOptions& o, Findings& wrong) {
  CLI::App* b = app.add_subcommand("bench", "Time operations, collectives, strategies and schedules");
  add_words(*b, "--device", "where rows run: cpu|cuda [cpu]",
            {[&o](const std::string& t) { o.device = parse_choice("--device", t, "cpu|cuda"); }, wrong});
  b->prefix_command();  // the words behind are Google Benchmark's
  b->footer(kBenchExamples);
}

// The options that nothing took, or where all are known the first word, and what each may have been meant to be.
void refuse_leftovers(const CLI::App& app, const CLI::App* command, Findings& wrong) {
  const std::vector<std::string> left = app.remaining(true);
  if (left.empty()) return;
  std::vector<std::string> known;
  if (!command && !left.front().starts_with("-")) {
    for (const CLI::App* c : app.get_subcommands({})) known.push_back(c->get_name());
    wrong.check([&] {
      throw Error(fmt::format("unknown command '{}'; expected {}{}", left.front(), kCommands,
                              did_you_mean(left.front(), known)));
    });
    return;
  }
  const CLI::App* owner = command ? command : &app;
  for (const CLI::Option* option : owner->get_options())
    for (const std::string& name : option->get_lnames()) known.push_back("--" + name);
  const bool options = std::ranges::any_of(left, [](const std::string& word) { return word.starts_with("-"); });
  for (const std::string& word : left) {
    if (options && !word.starts_with("-")) continue;  // most likely the value of one
    const std::string name = word.substr(0, word.find('='));
    wrong.check([&] {
      throw Error(options ? fmt::format("unknown option '{}'{}", name, did_you_mean(name, known))
                          : fmt::format("unexpected word '{}'", word));
    });
    if (!options) return;
  }
}

// What CLI11 says of words that it cannot split, in ours.
std::string words_of(const CLI::ParseError& e) {
  std::string text = e.what();
  if (dynamic_cast<const CLI::ArgumentMismatch*>(&e) != nullptr)
    return fmt::format("{}: expected a value, found none", text.substr(0, text.find(':')));
  const size_t name = text.find("--"), value = text.find(" = ");  // of a flag: "Could not convert: --quiet = maybe"
  if (dynamic_cast<const CLI::ConversionError*>(&e) == nullptr || name == text.npos || value == text.npos) return text;
  return fmt::format("{}: expected true or false, found '{}'", text.substr(name, value - name), text.substr(value + 3));
}

void set_all(TrainOptions& o, const Words& words, Findings& wrong) {
  for (const auto& [name, text] : words) wrong.check([&, &name = name, &text = text] { set_option(o, name, text); });
  wrong.raise();
}

// Of a model that is not open yet: what the words set is looked at by itself.
template <class Options>
Options with_good_words(Options o, Findings& wrong) {
  TrainOptions run;
  set_all(run, o.words, wrong);
  return o;
}

void add_verify(CLI::App& v, VerifyOptions& o, Findings& wrong) {
  add_words(v, "--defect",
            "plants a known defect in the plan, and says what broke and why: its name, random (by --seed), or list",
            {[&o](const std::string& name) { o.defect = name; }, wrong})
      ->group("Defect");
  v.add_flag("--hide", o.hide, "keeps the defect's name until the end")->group("Defect");
}

VerifyOptions verify_options(const Words& words, VerifyOptions o, Findings& wrong) {
  wrong.check([&] {
    if (o.hide && !o.defect) throw Error("--hide: hides what --defect plants; expected --defect random or a name");
  });
  set_all(o.run, words, wrong);
  validate(o.run);
  return o;
}

TrainOptions train_options(const Words& words, Findings& wrong) {
  std::string config, out;
  bool resume = false;
  if (TrainOptions o; !wrong.none()) set_all(o, words, wrong);  // no file is read
  for (const auto& [name, text] : words) {
    if (name == "config") config = text;
    if (name == "out") out = text;
    if (name == "resume") resume = true;
  }
  const bool resumed = resume && !out.empty() && config.empty();
  if (resumed) config = (std::filesystem::path(out) / "config.toml").string();
  bool chooses = std::ranges::any_of(words, [](const auto& w) { return chooses_job(w.first); });
  const std::string file =
      config.empty() ? "" : of_option(resumed ? "resume" : "config", config, [&] { return read_file(config); });
  for (const ConfigEntry& entry : read_config(file, config)) chooses = chooses || chooses_job(entry.key);
  TrainOptions o = chooses ? TrainOptions{} : default_job();
  wrong.check([&] { apply_config(o, file, config); });
  set_all(o, words, wrong);
  if (o.init && !resume) take_model(o, of_option("init", *o.init, [&] { return pretrained_config(*o.init); }));
  if (o.dtype == "fp64") throw Error("--dtype: fp64 is for tessera verify; expected fp32 or bf16");
  validate(o);
  return o;
}

// `help` and `help train`, as others have it, are `--help` and `train --help`.
std::vector<const char*> with_help(int argc, const char* const* argv) {
  std::vector<const char*> words(argv, argv + argc);
  if (words.size() < 2 || std::string_view(words[1]) != "help") return words;
  words.erase(words.begin() + 1);
  words.push_back("--help");
  return words;
}

}  // namespace

Command parse_command_line(int argc, const char* const* argv) {
  const std::vector<const char*> given = with_help(argc, argv);
  CLI::App app(kAbout, "tessera");
  app.get_formatter()->column_width(24);
  app.option_defaults()->multi_option_policy(CLI::MultiOptionPolicy::TakeLast);
  app.set_version_flag("--version", "tessera " TESSERA_VERSION);
  app.footer("tessera COMMAND --help, or tessera help COMMAND, says more about a command.");
  app.allow_extras();
  app.require_subcommand(0, 1);  // a second name of a command is a word like others: a run may be called "train"
  Words words;
  Findings wrong;
  GenerateOptions generate;
  EvaluateOptions evaluate;
  DatasetOptions data;
  BenchOptions bench;
  PlanOptions plan;
  ReportOptions report;
  CheckpointOptions checkpoint;
  ExploreOptions explore;
  LabOptions lab;
  VerifyOptions verify{verify_defaults()};
  const TrainOptions of_train, of_verify = verify_defaults(), of_plan = plan_defaults();
  add_run(app.add_subcommand("train", "Train a language model; with no option: a small one on real English prose"),
          words,
          fmt::format("{}\nIf you name no model, text or tokenizer, it trains the default job:\n  {}", kTrainExamples,
                      default_job_words(default_job())),
          {.defaults = of_train, .wanted = [](std::string_view) { return true; }});
  CLI::App* verifying =
      app.add_subcommand("verify", "Prove that a plan trains like one rank, and count what it sends and holds");
  add_run(verifying, words, kVerifyExamples, {.defaults = of_verify, .wanted = is_of_verify});
  add_verify(*verifying, verify, wrong);
  add_generate(app, generate, wrong);
  add_evaluate(app, evaluate);
  add_data(app, data, wrong);
  add_bench(app, bench, wrong);
  CLI::App* planning = app.add_subcommand("plan", "Choose a layout for a model and a machine before anything runs");
  add_run_words(*planning, words,
                {.defaults = of_plan, .wanted = is_of_plan, .flags_take_values = true, .without_default = is_searched});
  add_plan(*planning, plan, wrong);
  add_report(app, report, wrong);
  add_checkpoint(app, checkpoint, wrong);
  add_explore(app, explore, wrong);
  add_lab(app, lab);
  for (CLI::App* c : app.get_subcommands({})) c->allow_extras();
  const auto chosen_of = [&app]() -> const CLI::App* {
    const auto all = app.get_subcommands();
    return all.empty() ? nullptr : all.front();
  };
  try {
    app.parse(static_cast<int>(given.size()), const_cast<char**>(given.data()));  // CLI11 2.1 does not write there
  } catch (const CLI::CallForHelp&) {
    return Print{chosen_of() ? chosen_of()->help("tessera") : app.help()};
  } catch (const CLI::CallForVersion& e) {
    return Print{std::string(e.what()) + "\n"};
  } catch (const CLI::ParseError& e) {
    refuse_leftovers(app, chosen_of(), wrong);
    if (wrong.none() || dynamic_cast<const CLI::ArgumentMismatch*>(&e) != nullptr ||
        dynamic_cast<const CLI::ConversionError*>(&e) != nullptr)
      wrong.check([&] { throw Error(words_of(e)); });
    wrong.raise();
  }
  const CLI::App* const chosen = chosen_of();
  const std::string name = chosen ? chosen->get_name() : "";
  if (name == "bench") {
    wrong.raise();
    bench.words = chosen->remaining();
    return bench;
  }
  refuse_leftovers(app, chosen, wrong);
  if (name == "train" || name == "verify" || name == "generate" || name == "evaluate") {
    if (name == "train") return train_options(words, wrong);
    if (name == "verify") return verify_options(words, verify, wrong);
    return name == "generate" ? Command(with_good_words(generate, wrong)) : with_good_words(evaluate, wrong);
  }
  if (name == "plan") set_words(plan, words, wrong);
  wrong.raise();
  if (!chosen) throw Error(fmt::format("no command given; expected {} (tessera --help says more)", kCommands));
  if (name == "plan") return plan;
  if (name == "report") return report;
  if (name == "checkpoint") {
    choose_what(*chosen, checkpoint);
    return checkpoint;
  }
  if (name == "explore") return explore;
  if (name == "lab") {
    choose_what(*chosen, lab);
    return lab;
  }
  return data;
}

}  // namespace tessera
