// What a model is evaluated on, as tokens of its own tokenizer.
#pragma once
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "data/examples.h"
#include "data/rows.h"

namespace tessera {

struct EvaluationText {
  std::shared_ptr<const Rows> rows;
  int64_t bytes = 0;                    // of the text; of examples those of their targets
  std::vector<std::string> notes = {};  // what a user should hear of it
};

// A text file (compressed too), llm.c's token file, the one for validation of several, a folder that `tessera data`
// made (its part for validation), or a JSONL file of examples. A text is one sequence of tokens without special ones,
// in consecutive windows of options.context: each token but the first is predicted once. Throws InputError; Error
// (usage) for a folder of another tokenizer.
EvaluationText evaluation_text(const std::string& spec, const Tokenizer& tokenizer, const ExampleOptions& options);

}  // namespace tessera
