// The command `data`: a token dataset from a text or from token files.
#include <fmt/format.h>

#include <filesystem>

#include "app/commands.h"
#include "app/output.h"
#include "app/tokenizer_choice.h"
#include "data/dataset.h"
#include "data/jsonl.h"
#include "data/known_texts.h"
#include "data/llmc_file.h"
#include "data/text_file.h"
#include "tensor/error.h"

namespace tessera {
namespace {

Dataset make(const DatasetOptions& o, const TokenizerChoice& choice) {
  if (is_jsonl_name(o.source))
    return o.out ? make_dataset_of_documents(o.source, choice, *o.out) : dataset_of_documents(o.source, choice);
  if (!o.out) return dataset_for(o.source, choice);
  if (is_llmc_file(o.source)) return import_llmc(o.source, choice, *o.out);
  std::optional<Text> text = known_text(o.source);
  if (!text) text = load_text_file(o.source);
  return make_dataset(*text, choice, *o.out);
}

}  // namespace

int run_data(const DatasetOptions& o) {
  TokenizerChoice choice = tokenizer_choice(o.tokenizer, "char", false);
  if (o.tokenizer == "bpe") choice.vocab_size = o.vocab;  // and not bpe-N
  const Dataset d = make(o, choice);
  print(fmt::format("{}\n  {} tokens to train on, {} held out; vocabulary {} ({})\n  {}\n", one_line(d.source),
                    d.train_tokens(), d.val_tokens(), d.tokenizer->vocab_size(), d.tokenizer->kind(),
                    one_line(d.directory.string())));
  return 0;
}

}  // namespace tessera
