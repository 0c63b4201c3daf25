// From files to rows.
#include "data/evaluation_text.h"

#include <fmt/format.h>

#include <utility>

#include "data/files.h"
#include "data/llmc_file.h"
#include "data/loader.h"
#include "data/shards.h"
#include "data/text_file.h"
#include "tensor/error.h"

namespace tessera {
namespace fs = std::filesystem;
namespace {

// Rows keep what they are windows of.
std::shared_ptr<const Rows> windows_of(TokenFile tokens, int64_t context, const std::string& what) {
  if (tokens.size() < 2)
    throw InputError(
        fmt::format("{}: {} tokens; expected at least 2, one of them to be predicted", what, tokens.size()));
  struct Kept {
    explicit Kept(TokenFile t, int64_t length) : tokens(std::move(t)), windows(tokens, length) {}
    TokenFile tokens;
    Windows windows;
  };
  const auto kept = std::make_shared<const Kept>(std::move(tokens), context);
  return {kept, &kept->windows};
}

}  // namespace

EvaluationText evaluation_text(const std::string& spec, const Tokenizer& tokenizer, const ExampleOptions& o) {
  EvaluationText out;
  std::error_code error;
  if (is_jsonl_name(spec)) {
    const auto examples = all_examples(spec, tokenizer, o, out.notes);
    out.bytes = std::ssize(tokenizer.decode(examples->target_tokens()));
    out.rows = examples;
    return out;
  }
  if (names_shards(spec)) {
    const std::string file = find_shards(spec).val.string();
    out = evaluation_text(file, tokenizer, o);
    out.notes.push_back(fmt::format("{}: evaluated on {}", spec, file));
    return out;
  }
  if (fs::is_directory(spec, error)) {
    const Dataset dataset = Dataset::open(spec);
    if (dataset.tokenizer->to_json() != tokenizer.to_json())
      throw Error(fmt::format("{}: its tokens are of another tokenizer than the model's", spec));
    out.bytes = dataset.val_bytes;
    out.rows = windows_of(dataset.val, o.context, spec);
    return out;
  }
  std::vector<int32_t> tokens;
  if (is_llmc_file(spec)) {
    const std::string bytes = read_file(spec);
    tokens = parse_llmc(std::as_bytes(std::span(bytes)), tokenizer.vocab_size(), spec);
    out.bytes = std::ssize(tokenizer.decode(tokens));
  } else {
    const Text text = load_text_file(spec);
    tokens = tokenizer.encode(text.bytes);
    out.bytes = std::ssize(text.bytes);
  }
  out.rows = windows_of(TokenFile::of_tokens(tokens, tokenizer.vocab_size(), spec), o.context, spec);
  return out;
}

}  // namespace tessera
