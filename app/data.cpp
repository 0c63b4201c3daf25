// The command `data`: converts texts or token files to a token dataset.
#include <filesystem>
#include <string>
#include <vector>

#include "app/commands.h"
#include "app/dataset.h"
#include "app/output.h"
#include "data/json_rows.h"
#include "data/shards.h"

namespace tessera {
namespace {

std::vector<std::string> dataset_sources(const DatasetOptions& o) {
  std::vector<std::string> out;
  for (const std::string& source : o.sources) {
    const auto files = matching_files(source);
    if (files.empty()) out.push_back(source);
    for (const std::filesystem::path& f : files) out.push_back(f.string());
  }
  return out;
}

Dataset make(const DatasetOptions& o) {
  TokenizerChoice choice = tokenizer_choice(o.tokenizer, "char", false);
  choice.special = o.special;
  if (o.tokenizer == "bpe") choice.vocab_size = o.vocab;  // --vocab does not apply to bpe-N
  const std::vector<std::string> sources = dataset_sources(o);
  const std::string& first = sources.front();
  if (o.out)
    return sources.size() == 1 && is_llmc_file(first) && o.shard_tokens == 0
               ? import_llmc(first, choice, *o.out)
               : make_dataset_from(sources, choice, *o.out, o.shard_tokens);
  if (sources.size() > 1) bad_usage("--out: a dataset of {} sources requires an output directory", sources.size());
  if (o.shard_tokens > 0) throw Error("--shard-tokens: requires --out, the directory of the shards");
  return holds_examples(first) ? dataset_of_documents(first, choice) : dataset_for(first, choice);
}

}  // namespace

int run(const DatasetOptions& o) {
  const Dataset d = make(o);
  const std::string files = d.train.size() > 1 ? fmt::format(" in {} files", d.train.size()) : "";
  print(fmt::format("{}\n  {} training tokens{}, {} held out; vocabulary {} ({})\n  {}\n", one_line(d.source),
                    d.train_tokens(), files, d.val_tokens(), d.tokenizer->vocab_size(), d.tokenizer->kind(),
                    one_line(d.directory.string())));
  say_notes(d.notes);
  return 0;
}

}  // namespace tessera
