// CLI11 behind one function. It splits the words; values are checked by app/option_values, so that the command line and
// the configuration file say the same about them.
#include "app/command_line.h"

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <array>
#include <filesystem>
#include <vector>

#include "app/option_values.h"
#include "app/plan_line.h"
#include "app/pretrained.h"
#include "tensor/error.h"

namespace tessera {
namespace {

constexpr const char* kAbout =
    "Tessera trains a small GPT, under any layout, and proves that the layout changed nothing.";
constexpr const char* kCommands = "train, verify, generate, checkpoint, data, bench, plan, report or explore";
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
constexpr const char* kGenerateExamples =
    "Examples:\n"
    "  tessera generate runs/mine --prompt \"It was a\" --tokens 200\n"
    "  tessera generate runs/mine/checkpoints/step-500 --temperature 1 --top-p 0.9";
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

constexpr const char* kReportExamples =
    "Examples:\n"
    "  tessera train --trace --pp 2 --microbatches 6 --out runs/mine   a run that leaves a timeline\n"
    "  tessera report runs/mine                        draws it: runs/mine/report.html, for any browser";

std::string help_of(const OptionInfo& info, const std::string& value) {
  std::string text(info.help);
  if (!info.choices.empty()) text += fmt::format(": {}", info.choices);
  return value.empty() ? text : fmt::format("{} [{}]", text, value);
}

// verify makes its own sequences and writes nothing.
bool is_of_verify(std::string_view name) {
  constexpr std::array<std::string_view, 23> others = {
      "cuda-graph",  "staleness",      "record",     "replay",   "data",    "tokenizer", "out",        "resume",
      "keep",        "quiet",          "save-every", "no-save",  "no-eval", "config",    "eval-every", "trace",
      "trace-steps", "check-replicas", "template",   "train-on", "pack",    "skip-bad",  "init"};
  return std::ranges::find(others, name) == others.end();
}

// A command that takes the options of a run; of verify and plan not all.
void add_run(CLI::App* train, const TrainOptions& defaults, Words& words) {
  const std::string command = train->get_name();
  for_each_option(defaults, [&]<class T>(const OptionInfo& info, const T& field) {
    if ((command == "verify" && !is_of_verify(info.name)) || (command == "plan" && !is_of_plan(info.name))) return;
    const std::string name(info.name), shown = "--" + name;
    constexpr bool flag = std::is_same_v<T, bool>;
    if (flag && command != "plan") {
      train
          ->add_flag_callback(
              shown, [&words, name] { words.emplace_back(name, "true"); }, std::string(info.help))
          ->group(std::string(info.group));
    } else if constexpr (flag || std::is_same_v<T, std::optional<bool>>) {  // --untied, or --untied=false
      train
          ->add_flag_function(
              shown, [&words, name](int64_t n) { words.emplace_back(name, n > 0 ? "true" : "false"); },
              std::string(info.help))
          ->check([](const std::string& text) {  // CLI11 lets stoll throw
            return text == "true" || text == "false" ? "" : fmt::format("expected true or false, found '{}'", text);
          })
          ->group(std::string(info.group));
    } else {
      std::string value;
      if constexpr (std::is_same_v<T, std::string>)
        value = field;
      else if constexpr (std::is_arithmetic_v<T>)
        value = fmt::format("{}", field);
      if (command == "plan" && is_searched(name)) value.clear();
      train
          ->add_option_function<std::string>(
              shown, [&words, name](const std::string& text) { words.emplace_back(name, text); }, help_of(info, value))
          ->group(std::string(info.group))
          ->type_name("");
    }
  });
  train->footer(command == "verify" ? kVerifyExamples : kTrainExamples);
}

// An option of a command other than train: its words go to `set`.
void add(CLI::App* app, const std::string& name, const std::string& help,
         const std::function<void(const std::string&)>& set) {
  app->add_option_function<std::string>(name, set, help)->type_name("");
}

void add_generate(CLI::App& app, GenerateOptions& o) {
  CLI::App* g = app.add_subcommand("generate", "Write text with a trained model");
  g->add_option("FROM", o.from, "run directory, or a checkpoint in one")->required()->type_name("");
  add(g, "--prompt", "text to go on from [a new line]", [&o](const std::string& t) { o.prompt = t; });
  add(g, "--tokens", "how many to write [300]",
      [&o](const std::string& t) { o.tokens = parse_integer("--tokens", t, 1, 1e9); });
  add(g, "--temperature", "0 takes the likeliest, 1 samples as trained [0.8]", [&o](const std::string& t) {
    o.temperature = parse_number("--temperature", t, {.name = "", .group = "", .help = "", .least = 0, .most = 100});
  });
  add(g, "--top-k", "only among the k likeliest; 0: all [0]",
      [&o](const std::string& t) { o.top_k = parse_integer("--top-k", t, 0, 1e9); });
  add(g, "--top-p", "only among the likeliest that make up this probability [1]", [&o](const std::string& t) {
    o.top_p = parse_number("--top-p", t, {.name = "", .group = "", .help = "", .least = 1e-9, .most = 1});
  });
  add(g, "--seed", "of the samples [1337]",
      [&o](const std::string& t) { o.seed = parse_integer("--seed", t, 0, 9e18); });
  add(g, "--device", "where the model computes: cpu|cuda [cpu]",
      [&o](const std::string& t) { o.device = parse_choice("--device", t, "cpu|cuda"); });
  add(g, "--threads-per-rank", "threads of the CPU; default: all cores",
      [&o](const std::string& t) { o.threads_per_rank = parse_integer("--threads-per-rank", t, 1, 1024); });
  g->footer(kGenerateExamples);
}

void add_data(CLI::App& app, DatasetOptions& o) {
  CLI::App* d = app.add_subcommand("data", "Make a token dataset from a text");
  d->add_option("SOURCE", o.source, "austen, tinyshakespeare, a text file, or llm.c's token file")
      ->required()
      ->type_name("");
  add(d, "--tokenizer", "char, bytes, bpe, or a folder with tokenizer.json, or vocab.json and merges.txt [char]",
      [&o](const std::string& t) { o.tokenizer = t; });
  add(d, "--vocab", "most tokens of a bpe tokenizer that is trained [50257]",
      [&o](const std::string& t) { o.vocab = parse_integer("--vocab", t, 256, 1e9); });
  add(d, "--out", "folder to make; default: the cache", [&o](const std::string& t) {
    if (t.empty()) throw Error("--out: expected a folder to make, found ''");
    o.out = t;
  });
  d->footer(kDataExamples);
}

void add_bench(CLI::App& app, BenchOptions& o) {
  CLI::App* b = app.add_subcommand("bench", "Time operations, collectives, strategies and schedules");
  add(b, "--device", "where rows run: cpu|cuda [cpu]",
      [&o](const std::string& t) { o.device = parse_choice("--device", t, "cpu|cuda"); });
  b->prefix_command();  // the words behind are Google Benchmark's
  b->footer(kBenchExamples);
}

void add_report(CLI::App& app, ReportOptions& o) {
  CLI::App* r = app.add_subcommand("report", "Draw a run as one HTML file, or as text: timeline, memory, bytes, loss");
  r->add_option("RUN", o.run, "run directory of a run with --trace")->required()->type_name("");
  add(r, "--format", "html: a file; text: on standard output [html]", [&o](const std::string& t) {
    if (t != "html" && t != "text") throw Error(fmt::format("--format: expected html or text, found '{}'", t));
    o.format = t;
  });
  add(r, "--out", "file to write; default: RUN/report.html", [&o](const std::string& t) {
    if (t.empty()) throw Error("--out: expected a file to write, found ''");
    o.out = t;
  });
  r->footer(kReportExamples);
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
  DatasetOptions data;
  BenchOptions bench;
  PlanOptions plan;
  ReportOptions report;
  CheckpointOptions checkpoint;
  ExploreOptions explore;
  add_run(app.add_subcommand("train", "Train a GPT; with no option: a small one on real English prose"), {}, words);
  add_run(app.add_subcommand("verify", "Prove that a plan trains like one rank, and count what it sends and holds"),
          verify_defaults(), words);
  add_generate(app, generate);
  add_data(app, data);
  add_bench(app, bench);
  CLI::App* planning = app.add_subcommand("plan", "Choose a layout for a model and a machine before anything runs");
  add_run(planning, plan_defaults(), words);
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
  if (chosen.front()->get_name() == "generate") return generate;
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
