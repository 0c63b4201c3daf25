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
    "  tessera checkpoint import SmolLM-135M --out runs/smol     a Hugging Face folder becomes a run\n"
    "  tessera checkpoint export runs/mine --out mine            a run becomes a folder that transformers loads\n"
    "  tessera checkpoint export runs/lora --out whole --merge   one with adapters: the base and what they learnt\n"
    "  tessera checkpoint inspect runs/mine                      sizes, and every tensor\n"
    "  tessera checkpoint reshard runs/mine --out parts --dp 2 --tp 2 --zero 3   one file for each rank, and back";

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
  add_words(*action, "--dtype", "what tensors are stored in: fp32|bf16; default: as they are",
            {[&o](const std::string& text) { o.dtype = parse_choice("--dtype", text, "fp32|bf16"); }, wrong});
}

}  // namespace

void add_checkpoint(CLI::App& app, CheckpointOptions& o, Findings& wrong) {
  CLI::App* c = app.add_subcommand("checkpoint", "Take models in and give them out, in the form of Hugging Face");
  CLI::App* in = c->add_subcommand("import", "Make a run of a folder, for train --init, generate and export");
  add_from(in, o, "folder with config.json and model.safetensors, or shards of it");
  add_out(in, o, "run to make", wrong);
  add_dtype(in, o, wrong);
  add_words(*in, "--tokenizer", "bytes, or a tokenizer's folder; default: the folder's own",
            {[&o](const std::string& text) { o.tokenizer = text; }, wrong});
  CLI::App* out = c->add_subcommand("export", "Make a folder of a run or a checkpoint, which transformers loads");
  add_from(out, o, "run directory, or a checkpoint in one");
  add_out(out, o, "folder to make", wrong);
  add_dtype(out, o, wrong);
  out->add_flag("--merge", o.merge, "adapters are added to the weights; default: they are written alone, as PEFT's");
  CLI::App* parts =
      c->add_subcommand("reshard", "Make a run in parts, a file for each rank of a layout; or whole again");
  add_from(parts, o, "run directory, or a checkpoint in one");
  add_out(parts, o, "run to make", wrong);
  constexpr std::array<std::string_view, 9> layout = {"ranks", "dp",       "tp",     "pp",     "cp",
                                                      "zero",  "schedule", "chunks", "servers"};
  add_run_words(*parts, o.layout, layout);
  parts->footer("Without a layout: whole files.");
  CLI::App* look = c->add_subcommand("inspect", "Say what a run, a checkpoint or a folder holds");
  add_from(look, o, "run directory, checkpoint, or Hugging Face folder");
  c->footer(kExamples);
}

void choose_what(const CLI::App& command, CheckpointOptions& o) {
  const std::vector<CLI::App*> chosen = command.get_subcommands();
  if (chosen.empty()) throw Error("checkpoint: expected import, export, inspect or reshard");
  const std::string name = chosen.front()->get_name();
  using Way = CheckpointOptions::Way;
  o.way = name == "import"    ? Way::import
          : name == "export"  ? Way::write
          : name == "reshard" ? Way::reshard
                              : Way::inspect;
  if (o.way != Way::inspect && o.out.empty())
    throw Error("--out: expected a name for what checkpoint " + name + " makes");
}

}  // namespace tessera
