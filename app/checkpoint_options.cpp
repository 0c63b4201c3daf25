// The words of `checkpoint`.
#include "app/checkpoint_options.h"

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <array>

#include "app/option_values.h"
#include "app/run_words.h"
#include "tensor/error.h"

namespace tessera {
namespace {

constexpr const char* kExamples =
    "Examples:\n"
    "  tessera checkpoint import SmolLM-135M --out runs/smol     make a run from a Hugging Face folder\n"
    "  tessera checkpoint export runs/mine --out mine            make a folder that transformers loads\n"
    "  tessera checkpoint export runs/lora --out whole --merge   add the adapters to the weights of the base\n"
    "  tessera checkpoint inspect runs/mine                      show the sizes and every tensor\n"
    "  tessera checkpoint reshard runs/mine --out parts --dp 2 --tp 2 --zero 3   write one file for each rank\n"
    "  tessera checkpoint quantize runs/mine --calibrate notes.txt --out small   round the layers to 4 bits";
constexpr const char* kQuantizeFooter =
    "Makes a folder in GPTQ's format, version 1, which transformers and its like load. generate, evaluate and train "
    "--init\nhold its codes as they are stored, in 4 bits.";

void add_from(CLI::App* action, CheckpointOptions& o, const char* what) {
  action->add_option("FROM", o.from, what)->required()->type_name("");
  action->allow_extras();
}

void add_out(CLI::App* action, CheckpointOptions& o, const char* what, Findings& wrong) {
  const auto set = [&o](const std::string& text) {
    if (text.empty()) throw Error("--out: expected a folder to make, found ''");
    o.out = text;
  };
  add_words(*action, "--out", what, {set, wrong});
}

void add_dtype(CLI::App* action, CheckpointOptions& o, Findings& wrong) {
  add_words(*action, "--dtype", "type of the stored tensors: fp32|bf16; default: unchanged",
            {[&o](const std::string& text) { o.dtype = parse_choice("--dtype", text, "fp32|bf16"); }, wrong});
}

void add_quantize(CLI::App& checkpoint, CheckpointOptions& o, Findings& wrong) {
  CLI::App& q =
      *checkpoint.add_subcommand("quantize", "Round the weights of attention and feed-forward layers to 4 bits");
  add_from(&q, o, "run directory, a checkpoint in one, or a Hugging Face folder");
  add_out(&q, o, "folder to make", wrong);
  add_words(q, "--method", "gptq, or rtn: each weight to the nearest value, to compare with [gptq]",
            {[&o](const std::string& t) { o.method = parse_choice("--method", t, "gptq|rtn"); }, wrong});
  add_words(q, "--bits", "of a weight: 4 [4]", {[](const std::string& t) { parse_choice("--bits", t, "4"); }, wrong});
  add_words(q, "--group", "inputs whose weights share a scale; divides the inputs of every layer [128]",
            {[&o](const std::string& t) { o.group = parse_integer("--group", t, 1, 1e9); }, wrong});
  add_words(q, "--calibrate", "text, tokens or examples like those that the model is to read; not needed by rtn",
            {[&o](const std::string& t) { o.calibrate = t; }, wrong});
  add_words(q, "--windows", "of the context's length, spread over the calibration data [128]",
            {[&o](const std::string& t) { o.windows = parse_integer("--windows", t, 1, 1e9); }, wrong});
  constexpr std::array<std::string_view, 7> run = {"context",  "batch",  "template",        "train-on",
                                                   "skip-bad", "device", "threads-per-rank"};
  add_run_words(q, o.layout, run);
  q.footer(kQuantizeFooter);
}

}  // namespace

void add_checkpoint(CLI::App& app, CheckpointOptions& o, Findings& wrong) {
  CLI::App* c = app.add_subcommand("checkpoint", "Import and export models in the format of Hugging Face");
  CLI::App* in = c->add_subcommand("import", "Make a run from a folder, for train --init, generate and export");
  add_from(in, o, "folder with config.json and model.safetensors, or shards of it");
  add_out(in, o, "run to make", wrong);
  add_dtype(in, o, wrong);
  add_words(*in, "--tokenizer", "bytes, or a tokenizer's folder; default: the folder's own",
            {[&o](const std::string& text) { o.tokenizer = text; }, wrong});
  CLI::App* out = c->add_subcommand("export", "Make a folder that transformers loads from a run or a checkpoint");
  add_from(out, o, "run directory, or a checkpoint in one");
  add_out(out, o, "folder to make", wrong);
  add_dtype(out, o, wrong);
  out->add_flag("--merge", o.merge, "adds adapters to the weights; default: writes the adapters alone, as PEFT does");
  CLI::App* parts =
      c->add_subcommand("reshard", "Make a run with one file for each rank of a layout, or with whole files again");
  add_from(parts, o, "run directory, or a checkpoint in one");
  add_out(parts, o, "run to make", wrong);
  constexpr std::array<std::string_view, 9> layout = {"ranks", "dp",       "tp",     "pp",     "cp",
                                                      "zero",  "schedule", "chunks", "servers"};
  add_run_words(*parts, o.layout, layout);
  parts->footer("Without a layout it writes whole files.");
  add_quantize(*c, o, wrong);
  CLI::App* look = c->add_subcommand("inspect", "Show the contents of a run, a checkpoint or a folder");
  add_from(look, o, "run directory, checkpoint, or Hugging Face folder");
  c->footer(kExamples);
}

void choose_what(const CLI::App& command, CheckpointOptions& o) {
  const std::vector<CLI::App*> chosen = command.get_subcommands();
  if (chosen.empty()) throw Error("checkpoint: expected import, export, inspect, quantize or reshard");
  const std::string name = chosen.front()->get_name();
  using Way = CheckpointOptions::Way;
  o.way = name == "import"     ? Way::import
          : name == "export"   ? Way::write
          : name == "reshard"  ? Way::reshard
          : name == "quantize" ? Way::quantize
                               : Way::inspect;
  if (o.way != Way::inspect && o.out.empty())
    throw Error("--out: expected a name for the result of checkpoint " + name);
}

}  // namespace tessera
