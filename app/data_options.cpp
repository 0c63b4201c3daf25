// Words of the command line for `data`.
#include "app/data_options.h"

#include <CLI/CLI.hpp>

#include "app/option_values.h"
#include "app/run_words.h"
#include "tensor/error.h"

namespace tessera {
namespace {

constexpr const char* kDataExamples =
    "Examples:\n"
    "  tessera data austen                             make the default dataset and say where it is kept\n"
    "  tessera data notes.txt --tokenizer bpe --vocab 4096 --out notes-bpe   train --data notes-bpe takes it\n"
    "  tessera data more.txt --tokenizer notes-bpe --out more-bpe            the same tokenizer for another text\n"
    "  tessera data web/*.jsonl.zst --tokenizer notes-bpe --shard-tokens 100000000 --out web";

}  // namespace

void add_data(CLI::App& app, DatasetOptions& o, Findings& wrong) {
  CLI::App* d = app.add_subcommand("data", "Make a token dataset from texts");
  d->add_option("SOURCE", o.sources,
                "austen, tinyshakespeare, a text file, documents as FILE.jsonl (.gz and .zst too), or llm.c's token "
                "file; several, or a 'pattern*', become one dataset")
      ->required()
      ->multi_option_policy(CLI::MultiOptionPolicy::TakeAll)
      ->type_name("");
  add_words(*d, "--tokenizer",
            "char, bytes, bpe, bpe-N of at most N tokens, or a folder with tokenizer.json, or vocab.json and "
            "merges.txt [char]",
            {[&o](const std::string& t) { o.tokenizer = t; }, wrong});
  add_words(*d, "--vocab", "largest number of tokens of a bpe tokenizer that is trained [50257]",
            {[&o](const std::string& t) { o.vocab = parse_integer("--vocab", t, 256, 1e9); }, wrong});
  add_words(*d, "--shard-tokens", "writes several files of so many tokens each [0: one file]",
            {[&o](const std::string& t) { o.shard_tokens = parse_integer("--shard-tokens", t, 0, 1e12); }, wrong});
  const auto set_out = [&o](const std::string& t) {
    if (t.empty()) throw Error("--out: expected a folder to make, found ''");
    o.out = t;
  };
  add_words(*d, "--out", "folder to make; default for one source: the cache", {set_out, wrong});
  d->footer(kDataExamples);
}

}  // namespace tessera
