// The command `data`: a token dataset from a text.
#include <fmt/format.h>

#include <filesystem>

#include "app/commands.h"
#include "app/output.h"
#include "data/dataset.h"
#include "data/known_texts.h"
#include "data/text_file.h"
#include "tensor/error.h"

namespace tessera {
namespace {

Dataset make(const DataOptions& o) {
  if (!o.out) return dataset_for(o.source, o.tokenizer.value_or(""));
  std::optional<Text> text = known_text(o.source);
  if (!text) text = load_text_file(o.source);
  return make_dataset(*text, o.tokenizer.value_or("char"), *o.out);
}

}  // namespace

int run_data(const DataOptions& o) {
  const Dataset d = make(o);
  print(fmt::format("{}\n  {} tokens to train on, {} held out; vocabulary {} ({})\n  {}\n", d.source, d.train.size(),
                    d.val.size(), d.tokenizer->vocab_size(), d.tokenizer->kind(), d.directory.string()));
  return 0;
}

}  // namespace tessera
