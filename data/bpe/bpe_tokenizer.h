// Byte-level byte-pair encoding, as GPT-2 has it: every byte is a token, and each merge joins two tokens into a longer
// one. Within a piece of text (pieces.h) the merge of lowest rank is applied again and again until none applies.
//
// Any bytes can be encoded, and decoding gives them back exactly. Source: Sennrich et al. 2016, "Neural machine
// translation of rare words with subword units", section 3.2; on bytes: Radford et al. 2019, section 2.2.
#pragma once
#include <array>
#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

#include "data/bpe/merges.h"
#include "data/tokenizer.h"

namespace tessera {

class BpeTokenizer final : public Tokenizer {
 public:
  using Merge = bpe::Merge;

  // The bytes of each token, and the merges in order of rank. A token that is neither one byte nor the result of a
  // merge is special, like <|endoftext|>: encode() never makes it, decode() writes it out. Throws InputError, naming
  // `what`: a byte without a token, a token given twice, a merge given twice or of or into a token that is not there.
  BpeTokenizer(std::vector<std::string> tokens, std::vector<Merge> merges, const std::string& what);

  // Reads vocab.json and merges.txt of a folder, as GPT-2's are. Throws InputError naming file, line and key.
  static BpeTokenizer load_files(const std::filesystem::path& folder);
  // The contents of those two files.
  static BpeTokenizer parse_files(std::string_view vocab_json, std::string_view merges_txt, const std::string& vocab,
                                  const std::string& merges);
  std::string vocab_json() const;
  std::string merges_txt() const;

  int64_t vocab_size() const override { return static_cast<int64_t>(tokens_.size()); }
  // Cost: the pieces, and n log n in the bytes of a piece that was not met before; memory grows with the new pieces.
  std::vector<int32_t> encode(std::string_view text) const override;
  std::string decode(std::span<const int32_t> tokens) const override;
  std::optional<int32_t> document_end() const override;
  std::string_view kind() const override { return "bpe"; }
  std::string to_json() const override;

  const std::vector<std::string>& tokens() const { return tokens_; }
  const std::vector<Merge>& merges() const { return merges_; }

 private:
  void index_bytes(const std::string& what);
  void index_merges(const std::string& what);

  std::vector<std::string> tokens_;
  std::vector<Merge> merges_;
  std::array<int32_t, 256> byte_tokens_{};  // the token of each byte
  bpe::MergeTable table_;
};

}  // namespace tessera
