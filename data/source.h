// What the field `data` names: a dataset, examples, or a mixture of these.
#pragma once
#include <string>
#include <string_view>

#include "data/examples.h"

namespace tessera {

struct DataKind {
  bool has_examples = false;     // of a mixture: in any of its datasets
  std::string_view format = {};  // of a file without examples, if it is known not to be text
};
// Throws as example_files(), mixture_in() and check_table().
DataKind data_kind(const std::string& data);

// Throws as dataset_for(), load_examples() and mixed().
Dataset open_data(const std::string& data, const TokenizerChoice& tokenizer, const ExampleOptions& options);

}  // namespace tessera
