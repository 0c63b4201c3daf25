// Datasets by what `data` names.
#include "data/source.h"

#include <algorithm>
#include <optional>
#include <string>
#include <vector>

#include "base/files.h"
#include "data/compressed_text.h"
#include "data/json_rows.h"
#include "data/mixture.h"

namespace tessera {

DataKind data_kind(const std::string& data) {
  if (names_examples(data)) return {.has_examples = true};
  if (const auto mixture = mixture_in(data))
    if (std::ranges::any_of(*mixture, [](const Weighted& w) { return names_examples(w.spec); }))
      return {.has_examples = true};
  if (!is_plain_file(data)) return {};
  check_table(data);
  return {.format = known_kind(text_start(data), true)};
}

Dataset open_data(const std::string& data, const TokenizerChoice& tokenizer, const ExampleOptions& options) {
  const auto one = [&](const std::string& spec) {
    return names_examples(spec) ? load_examples(spec, tokenizer, options) : dataset_for(spec, tokenizer, options.held);
  };
  const std::optional<std::vector<Weighted>> mixture = mixture_in(data);
  if (!mixture) return one(data);
  options.held.refuse("a mixture");
  std::vector<Dataset> all;
  for (const Weighted& w : *mixture) all.push_back(one(w.spec));
  return mixed(*mixture, std::move(all));
}

}  // namespace tessera
