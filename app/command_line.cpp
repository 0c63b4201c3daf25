// CLI11 behind one function. It splits the words; values are checked by app/option_values, so that the command line and
// the configuration file say the same about them.
#include "app/command_line.h"

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <array>
#include <filesystem>
#include <vector>

#include "app/inference_options.h"
#include "app/option_values.h"
#include "app/plan_line.h"
#include "app/pretrained.h"
#include "app/report_options.h"
#include "app/run_words.h"
#include "tensor/error.h"

namespace tessera {
namespace {

constexpr const char* kAbout =
    "Tessera trains a small GPT, under any layout, and proves that the layout changed nothing.";
constexpr const char* kCommands = "train, verify, generate, evaluate, checkpoint, data, bench, plan, report or explore";
constexpr const char* kTrainExamples =
    "Examples:\n"
    "  tessera train                                   a small GPT on six novels of Jane Austen, in a minute or two\n"
    "  tessera train --data notes.txt --steps 500      your own text\n"
    "  tessera train --model gpt-mini --dtype bf16     six layers of 384 channels, in bfloat16\n"
    "  tessera train --resume --out runs/mine          go on where a run was stopped";
constexpr const char* kVerifyExamples =
    "Examples:\n"
    "  tessera verify                                  two data-parallel ranks against one rank, bit for bit\n"
    "  tessera verify --ranks 4 --zero 3 --dtype bf16 --microbatches 3\n"
    "  tessera verify --all-reduce ring --bucket-mb 0.1 --optimizer sgd --format json";
constexpr const char* kDataExamples =
    "Examples:\n"
    "  tessera data austen                             make the default dataset and say where it is kept\n"
    "  tessera data notes.txt --tokenizer bpe --vocab 4096 --out notes-bpe   train --data notes-bpe takes it\n"
    "  tessera data more.txt --tokenizer notes-bpe --out more-bpe            the same tokenizer for another text";

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
  constexpr std::array<std::string_view, 23> others = {
      "cuda-graph",  "staleness",      "record",     "replay",   "data",    "tokenizer", "out",        "resume",
      "keep",        "quiet",          "save-every", "no-save",  "no-eval", "config",    "eval-every", "trace",
      "trace-steps", "check-replicas", "template",   "train-on", "pack",    "skip-bad",  "init"};
  return std::ranges::find(others, name) == others.end();
}

void add_run(CLI::App* command, Words& words, const char* examples, const RunWords& how) {
  add_run_words(*command, words, how);
  command->footer(examples);
}

void add_data(CLI::App& app, DatasetOptions& o) {
  CLI::App* d = app.add_subcommand("data", "Make a token dataset from a text");
  d->add_option("SOURCE", o.source,
                "austen, tinyshakespeare, a text file, documents as FILE.jsonl (.gz and .zst too), or llm.c's token "
                "file")
      ->required()
      ->type_name("");
  add_words(*d, "--tokenizer", "char, bytes, bpe, or a folder with tokenizer.json, or vocab.json and merges.txt [char]",
            [&o](const std::string& t) { o.tokenizer = t; });
  add_words(*d, "--vocab", "most tokens of a bpe tokenizer that is trained [50257]",
            [&o](const std::string& t) { o.vocab = parse_integer("--vocab", t, 256, 1e9); });
  add_words(*d, "--out", "folder to make; default: the cache", [&o](const std::string& t) {
    if (t.empty()) throw Error("--out: expected a folder to make, found ''");
    o.out = t;
  });
  d->footer(kDataExamples);
}

void add_bench(CLI::App& app, BenchOptions& o) {
  CLI::App* b = app.add_subcommand("bench", "Time operations, collectives, strategies and schedules");
  add_words(*b, "--device", "where rows run: cpu|cuda [cpu]",
            [&o](const std::string& t) { o.device = parse_choice("--device", t, "cpu|cuda"); });
  b->prefix_command();  // the words behind are Google Benchmark's
  b->footer(kBenchExamples);
}

// The first word that nothing took, and what it may have been meant to be.
void refuse_leftovers(const CLI::App& app, const CLI::App* command) {
  const std::vector<std::string> left = app.remaining(true);
  if (left.empty()) return;
  std::vector<std::string> known;
  const std::string& word = left.front();
  if (!command && !word.starts_with("-")) {
    for (const CLI::App* c : app.get_subcommands({})) known.push_back(c->get_name());
    throw Error(fmt::format("unknown command '{}'; expected {}{}", word, kCommands, did_you_mean(word, known)));
  }
  const CLI::App* owner = command ? command : &app;
  for (const CLI::Option* option : owner->get_options())
    for (const std::string& name : option->get_lnames()) known.push_back("--" + name);
  const std::string name = word.substr(0, word.find('='));
  if (word.starts_with("-")) throw Error(fmt::format("unknown option '{}'{}", name, did_you_mean(name, known)));
  throw Error(fmt::format("unexpected word '{}'", word));
}

// Of a model that is not open yet: what the words set is looked at by itself.
template <class Options>
Options with_good_words(Options o) {
  TrainOptions run;
  for (const auto& [name, text] : o.words) set_option(run, name, text);
  return o;
}

VerifyOptions verify_options(const Words& words) {
  VerifyOptions o{verify_defaults()};
  for (const auto& [name, text] : words) set_option(o.run, name, text);
  validate(o.run);
  return o;
}

TrainOptions train_options(const Words& words) {
  TrainOptions o;
  std::string config, out;
  bool resume = false;
  for (const auto& [name, text] : words) {
    if (name == "config") config = text;
    if (name == "out") out = text;
    if (name == "resume") resume = true;
  }
  if (resume && !out.empty() && config.empty()) config = (std::filesystem::path(out) / "config.toml").string();
  if (!config.empty()) apply_config_file(o, config);
  for (const auto& [name, text] : words) set_option(o, name, text);
  if (o.init && !resume) take_model(o, pretrained_config(*o.init));
  if (o.dtype == "fp64") throw Error("--dtype: fp64 is for tessera verify; expected fp32 or bf16");
  validate(o);
  return o;
}

}  // namespace

Command parse_command_line(int argc, const char* const* argv) {
  CLI::App app(kAbout, "tessera");
  app.get_formatter()->column_width(24);
  app.option_defaults()->multi_option_policy(CLI::MultiOptionPolicy::TakeLast);
  app.set_version_flag("--version", "tessera " TESSERA_VERSION);
  app.footer("tessera COMMAND --help says more about a command.");
  app.allow_extras();
  app.require_subcommand(0, 1);  // a second name of a command is a word like others: a run may be called "train"
  Words words;
  GenerateOptions generate;
  EvaluateOptions evaluate;
  DatasetOptions data;
  BenchOptions bench;
  PlanOptions plan;
  ReportOptions report;
  CheckpointOptions checkpoint;
  ExploreOptions explore;
  const TrainOptions of_train, of_verify = verify_defaults(), of_plan = plan_defaults();
  add_run(app.add_subcommand("train", "Train a GPT; with no option: a small one on real English prose"), words,
          kTrainExamples, {.defaults = of_train, .wanted = [](std::string_view) { return true; }});
  add_run(app.add_subcommand("verify", "Prove that a plan trains like one rank, and count what it sends and holds"),
          words, kVerifyExamples, {.defaults = of_verify, .wanted = is_of_verify});
  add_generate(app, generate);
  add_evaluate(app, evaluate);
  add_data(app, data);
  add_bench(app, bench);
  CLI::App* planning = app.add_subcommand("plan", "Choose a layout for a model and a machine before anything runs");
  add_run_words(*planning, words,
                {.defaults = of_plan, .wanted = is_of_plan, .flags_take_values = true, .without_default = is_searched});
  add_plan(*planning, plan);
  add_report(app, report);
  add_checkpoint(app, checkpoint);
  add_explore(app, explore);
  for (CLI::App* c : app.get_subcommands({})) c->allow_extras();
  try {
    app.parse(argc, const_cast<char**>(argv));  // CLI11 2.1 takes a pointer to non-const and does not write
  } catch (const CLI::CallForHelp&) {
    for (const CLI::App* c : app.get_subcommands()) return Print{c->help("tessera")};
    return Print{app.help()};
  } catch (const CLI::CallForVersion& e) {
    return Print{std::string(e.what()) + "\n"};
  } catch (const CLI::ArgumentMismatch& e) {
    throw Error(fmt::format("{}: expected a value, found none",
                            std::string(e.what()).substr(0, std::string(e.what()).find(':'))));
  } catch (const CLI::ConversionError& e) {  // of a flag; its words are "Could not convert: --quiet = maybe"
    const std::string words_of(e.what());
    const size_t name = words_of.find("--"), value = words_of.find(" = ");
    if (name == std::string::npos || value == std::string::npos) throw Error(words_of);
    throw Error(fmt::format("{}: expected true or false, found '{}'", words_of.substr(name, value - name),
                            words_of.substr(value + 3)));
  } catch (const CLI::ParseError& e) {
    const auto chosen = app.get_subcommands();
    refuse_leftovers(app, chosen.empty() ? nullptr : chosen.front());
    throw Error(e.what());
  }
  const auto chosen = app.get_subcommands();
  if (!chosen.empty() && chosen.front()->get_name() == "bench") {
    bench.words = chosen.front()->remaining();
    return bench;
  }
  refuse_leftovers(app, chosen.empty() ? nullptr : chosen.front());
  if (chosen.empty()) throw Error(fmt::format("no command given; expected {} (tessera --help says more)", kCommands));
  if (chosen.front()->get_name() == "train") return train_options(words);
  if (chosen.front()->get_name() == "verify") return verify_options(words);
  if (chosen.front()->get_name() == "generate") return with_good_words(generate);
  if (chosen.front()->get_name() == "evaluate") return with_good_words(evaluate);
  if (chosen.front()->get_name() == "plan") {
    set_words(plan, words);
    return plan;
  }
  if (chosen.front()->get_name() == "report") return report;
  if (chosen.front()->get_name() == "checkpoint") {
    choose_what(*chosen.front(), checkpoint);
    return checkpoint;
  }
  if (chosen.front()->get_name() == "explore") return explore;
  return data;
}

}  // namespace tessera
