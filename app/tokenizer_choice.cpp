// The choice of a tokenizer.
#include "app/tokenizer_choice.h"

#include <fmt/format.h>

#include <filesystem>
#include <memory>
#include <string_view>

#include "app/option_values.h"
#include "app/progress.h"
#include "tensor/error.h"

namespace tessera {
namespace {

constexpr std::string_view kSized = "bpe-";  // with the most tokens behind it
constexpr double kLeastVocab = 256;          // of the bytes

}  // namespace

TokenizerChoice tokenizer_choice(const std::optional<std::string>& name, const std::string& otherwise, bool quiet) {
  std::error_code error;
  const auto progress = std::make_shared<Progress>(Progress::for_stderr(0, quiet));
  TokenizerChoice out{
      .name = name.value_or(""), .otherwise = otherwise, .progress = [progress](int64_t made, int64_t most) {
        progress->work(fmt::format("training a byte-level BPE tokenizer: {} of at most {} tokens", made, most));
      }};
  if (!name || *name == "char" || *name == "bytes" || *name == "bpe" || std::filesystem::is_directory(*name, error))
    return out;
  if (name->starts_with(kSized)) {
    out.name = "bpe";
    out.vocab_size = parse_integer("--tokenizer bpe-N", name->substr(kSized.size()), kLeastVocab, 1e9);
    return out;
  }
  throw Error(fmt::format(
      "--tokenizer: expected char, bytes, bpe, bpe-N, or a folder with tokenizer.json, or vocab.json and merges.txt, "
      "found '{}'{}",
      *name, did_you_mean(*name, {"char", "bytes", "bpe"})));
}

}  // namespace tessera
