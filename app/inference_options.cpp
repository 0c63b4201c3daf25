// The words of `generate` and `evaluate`.
#include "app/inference_options.h"

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <array>

#include "app/option_table.h"
#include "app/option_values.h"
#include "app/run_words.h"
#include "tensor/error.h"

namespace tessera {
namespace {

constexpr const char* kFrom = "run directory, a checkpoint in one, or a Hugging Face or PEFT folder";
constexpr const char* kGenerateExamples =
    "Examples:\n"
    "  tessera generate runs/mine --prompt \"It was a\" --tokens 200\n"
    "  tessera generate SmolLM-135M --prompt \"The moon\" --temperature 0       a folder of another program's\n"
    "  tessera generate runs/mine --prompts questions.txt --format json        a text for each line, at once\n"
    "  tessera generate runs/mine --tp 2 --prompt \"It was a\"                  each rank has a part of every matrix";
constexpr const char* kEvaluateExamples =
    "Examples:\n"
    "  tessera evaluate runs/mine --data notes.txt                 loss and bits per byte on a text\n"
    "  tessera evaluate SmolLM-135M --data notes.txt --dtype bf16 --tp 2\n"
    "  tessera evaluate runs/tuned --data questions.jsonl          the loss on responses";

OptionInfo range(double least, double most) {
  return {.name = "", .group = "", .help = "", .least = least, .most = most};
}

}  // namespace

void add_generate(CLI::App& app, GenerateOptions& o, Findings& wrong) {
  CLI::App& g = *app.add_subcommand("generate", "Write text with a trained model");
  g.add_option("FROM", o.from, kFrom)->required()->type_name("");
  const auto number = [&](const char* name, const char* help, double& to, const OptionInfo& info) {
    add_words(g, name, help, {[&to, info, name](const std::string& t) { to = parse_number(name, t, info); }, wrong});
  };
  const auto integer = [&](const char* name, const char* help, int64_t& to, double least, double most) {
    add_words(g, name, help,
              {[&to, least, most, name](const std::string& t) { to = parse_integer(name, t, least, most); }, wrong});
  };
  const auto texts = [&](const char* name, const char* help, std::vector<std::string>& to) {
    g.add_option(name, to, help)->type_name("")->multi_option_policy(CLI::MultiOptionPolicy::TakeAll)->expected(1);
  };
  texts("--prompt", "text to continue; may be given several times [a new line]", o.prompts);
  add_words(g, "--prompts", "file with a prompt on each line",
            {[&o](const std::string& t) { o.prompts_file = t; }, wrong});
  integer("--tokens", "tokens to write [300]", o.tokens, 1, 1e9);
  number("--temperature", "0 takes the likeliest token, 1 samples by the probabilities of the model [0.8]",
         o.temperature, range(0, 100));
  integer("--top-k", "samples among the k likeliest tokens only; 0: among all [0]", o.top_k, 0, 1e9);
  number("--top-p", "samples among the likeliest tokens that together have this probability [1]", o.top_p,
         range(1e-9, 1));
  number("--min-p", "samples among tokens with at least this share of the probability of the likeliest [0]", o.min_p,
         range(0, 1));
  number("--repetition-penalty", "makes tokens that were read or written before less likely; 1: does nothing [1]",
         o.repetition_penalty, range(0.01, 100));
  integer("--seed", "seed of the samples [1337]", o.seed, 0, 9e18);
  texts("--stop", "text that ends the writing and is not shown; may be given several times", o.stop);
  g.add_flag("--ignore-end", o.ignore_end, "goes on after the token that ends a text");
  add_words(g, "--format", "format of standard output: text|json [text]",
            {[&o](const std::string& t) { o.format = parse_choice("--format", t, "text|json"); }, wrong});
  constexpr std::array<std::string_view, 11> plan = {
      "ranks", "dp", "tp", "pp", "zero", "dtype", "quantize", "backend", "device", "timeout", "threads-per-rank"};
  add_run_words(g, o.words, plan);
  g.footer(kGenerateExamples);
}

void add_evaluate(CLI::App& app, EvaluateOptions& o) {
  CLI::App& e = *app.add_subcommand("evaluate", "Say how well a model predicts a text");
  e.add_option("FROM", o.from, kFrom)->required()->type_name("");
  constexpr std::array<std::string_view, 21> run = {
      "data",  "batch",    "context", "template", "train-on", "skip-bad",         "ranks",
      "dp",    "tp",       "sp",      "cp",       "pp",       "cp-mode",          "zero",
      "dtype", "quantize", "backend", "device",   "timeout",  "threads-per-rank", "format"};
  add_run_words(e, o.words, run);
  e.footer(kEvaluateExamples);
}

}  // namespace tessera
