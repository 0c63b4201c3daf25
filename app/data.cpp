// The command `data`: a token dataset from texts or from token files.
#include <fmt/format.h>

#include <filesystem>

#include "app/commands.h"
#include "app/generate/inference.h"
#include "app/output.h"
#include "data/dataset.h"
#include "data/jsonl.h"
#include "data/token_file.h"
#include "tensor/error.h"

namespace tessera {
namespace {

std::vector<std::string> sources_of(const DatasetOptions& o) {
  std::vector<std::string> out;
  for (const std::string& source : o.sources) {
    const auto files = matching_files(source);
    if (files.empty()) out.push_back(source);
    for (const std::filesystem::path& f : files) out.push_back(f.string());
  }
  return out;
}

Dataset make(const DatasetOptions& o, const TokenizerChoice& choice) {
  const std::vector<std::string> sources = sources_of(o);
  const std::string& first = sources.front();
  if (o.out)
    return sources.size() == 1 && is_llmc_file(first) && o.shard_tokens == 0
               ? import_llmc(first, choice, *o.out)
               : make_dataset_of(sources, choice, *o.out, o.shard_tokens);
  if (sources.size() > 1)
    throw Error(fmt::format("--out: expected a folder for a dataset of {} sources, found none", sources.size()));
  if (o.shard_tokens > 0) throw Error("--shard-tokens: goes with --out, the folder that the files are written to");
  return is_jsonl_name(first) ? dataset_of_documents(first, choice) : dataset_for(first, choice);
}

}  // namespace

int run_data(const DatasetOptions& o) {
  TokenizerChoice choice = tokenizer_choice(o.tokenizer, "char", false);
  if (o.tokenizer == "bpe") choice.vocab_size = o.vocab;  // and not bpe-N
  const Dataset d = make(o, choice);
  const std::string files = d.train.size() > 1 ? fmt::format(" in {} files", d.train.size()) : "";
  print(fmt::format("{}\n  {} tokens to train on{}, {} held out; vocabulary {} ({})\n  {}\n", one_line(d.source),
                    d.train_tokens(), files, d.val_tokens(), d.tokenizer->vocab_size(), d.tokenizer->kind(),
                    one_line(d.directory.string())));
  return 0;
}

}  // namespace tessera
