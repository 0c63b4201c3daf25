// A tokenizer that others made: the tokenizer.json of a Hugging Face folder and the files that belong to it.
//
// Byte-level BPE with the patterns of GPT-2, Llama 3 and Qwen, and BPE over characters with bytes to fall back on, as
// Llama 2 and Mistral have it. Token for token what the Python library `tokenizers` makes of a text; like there, what
// is not UTF-8 counts as U+FFFD. Special tokens' names in a text are text unless asked otherwise (the library's
// encode_special_tokens).
#pragma once
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <string>

#include "data/hub_tokenizer/added_tokens.h"
#include "data/hub_tokenizer/description.h"
#include "data/tokenizer.h"

namespace tessera {

// A file of a tokenizer, which is refused where it is larger than any tokenizer's.
std::string read_tokenizer_file(const std::filesystem::path& file);

class HubTokenizer final : public Tokenizer {
 public:
  using Files = std::map<std::string, std::string>;

  // Of the files' contents by name: tokenizer.json, and where they are there tokenizer_config.json,
  // special_tokens_map.json and chat_template.jinja. `json` is the first, parsed. Throws InputError naming the file.
  HubTokenizer(Files files, const nlohmann::json& json, const std::string& what);
  // Of a folder whose tokenizer.json says `text`, which is `json` parsed.
  static std::unique_ptr<HubTokenizer> load(const std::filesystem::path& folder, std::string text,
                                            const nlohmann::json& json);
  static bool is_file(std::string_view name);  // one of the four above

  int64_t vocab_size() const override { return static_cast<int64_t>(d_.tokens.size()); }
  std::vector<int32_t> encode(std::string_view text) const override { return encode_with(text, {}); }
  std::vector<int32_t> encode_with(std::string_view text, const EncodeOptions& options) const override;
  std::string decode(std::span<const int32_t> tokens) const override;
  std::string bytes_of(int32_t token) const override;
  std::optional<int32_t> bos() const override { return bos_; }
  std::optional<int32_t> document_end() const override { return eos_; }
  std::optional<int32_t> special(std::string_view name) const override;
  std::string_view chat_template() const override { return chat_template_; }
  std::map<std::string, std::string> files() const override { return files_; }
  std::string_view kind() const override { return "hub"; }
  std::string to_json() const override;

 private:
  void read_config(const std::string& what);
  std::optional<int32_t> named(const nlohmann::json& config, const char* key, const std::string& what) const;

  std::string normalized(std::string_view part, bool prefixed) const;
  void encode_part(std::string_view part, bool first, bool prefixed, std::vector<int32_t>& out) const;
  void cut(std::string_view text, size_t step, const std::function<void(std::string_view)>& f) const;
  void encode_piece(std::string_view piece, std::vector<int32_t>& symbols, std::vector<int32_t>& out) const;
  void split_symbols(std::string_view piece, std::vector<int32_t>& symbols) const;

  Files files_;
  hub::Description d_;
  hub::AddedTokens written_, normal_;  // those that stand in a text as it is, and in the normalised one
  hub::Ids names_;                     // of the added tokens
  std::optional<int32_t> bos_, eos_;
  std::string chat_template_;
};

}  // namespace tessera
