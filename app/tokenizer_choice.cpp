// The choice of a tokenizer.
#include "app/tokenizer_choice.h"

#include <fmt/format.h>

#include <filesystem>
#include <memory>

#include "app/option_values.h"
#include "app/progress.h"
#include "tensor/error.h"

namespace tessera {

TokenizerChoice tokenizer_choice(const std::optional<std::string>& name, const std::string& otherwise, bool quiet) {
  std::error_code error;
  if (name && *name != "char" && *name != "bytes" && *name != "bpe" && !std::filesystem::is_directory(*name, error))
    throw Error(fmt::format(
        "--tokenizer: expected char, bytes, bpe, or a folder with tokenizer.json, or vocab.json and merges.txt, "
        "found '{}'{}",
        *name, did_you_mean(*name, {"char", "bytes", "bpe"})));
  const auto progress = std::make_shared<Progress>(Progress::for_stderr(0, quiet));
  return {.name = name.value_or(""), .otherwise = otherwise, .progress = [progress](int64_t made, int64_t most) {
            progress->work(fmt::format("training a byte-level BPE tokenizer: {} of at most {} tokens", made, most));
          }};
}

}  // namespace tessera
