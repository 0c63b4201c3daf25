// Encoding piece by piece, and decoding by concatenation.
#include "data/bpe/bpe_tokenizer.h"

#include <fmt/format.h>

#include <algorithm>
#include <unordered_map>

#include "data/bpe/alphabet.h"
#include "data/bpe/pieces.h"
#include "tensor/error.h"

namespace tessera {

BpeTokenizer::BpeTokenizer(std::vector<std::string> tokens, std::vector<Merge> merges, const std::string& what)
    : tokens_(std::move(tokens)), merges_(std::move(merges)) {
  index_bytes(what);
  index_merges(what);
}

void BpeTokenizer::index_bytes(const std::string& what) {
  byte_tokens_.fill(-1);
  for (size_t i = 0; i < tokens_.size(); ++i) {
    if (tokens_[i].empty()) throw InputError(fmt::format("{}: token {} is empty", what, i));
    if (tokens_[i].size() > 1) continue;
    int32_t& place = byte_tokens_[static_cast<uint8_t>(tokens_[i][0])];
    if (place >= 0) throw InputError(fmt::format("{}: tokens {} and {} are the same byte", what, place, i));
    place = static_cast<int32_t>(i);
  }
  for (size_t b = 0; b < 256; ++b)
    if (byte_tokens_[b] < 0)
      throw InputError(fmt::format("{}: no token for the byte 0x{:02x}; expected all 256 bytes", what, b));
}

void BpeTokenizer::index_merges(const std::string& what) {
  std::unordered_map<std::string_view, int32_t> ids;
  ids.reserve(tokens_.size());
  for (size_t i = 0; i < tokens_.size(); ++i)
    if (const auto [known, added] = ids.emplace(tokens_[i], static_cast<int32_t>(i)); !added)
      throw InputError(
          fmt::format("{}: tokens {} and {} are the same, '{}'", what, known->second, i, bpe::spell(tokens_[i])));
  table_.reserve(merges_.size());
  for (size_t rank = 0; rank < merges_.size(); ++rank) {
    const auto [left, right] = merges_[rank];
    for (const int32_t part : {left, right})
      if (part < 0 || part >= vocab_size())
        throw InputError(fmt::format("{}: merge {} uses the token {}, which is not there", what, rank, part));
    const std::string joined = tokens_[static_cast<size_t>(left)] + tokens_[static_cast<size_t>(right)];
    const auto result = ids.find(joined);
    if (result == ids.end())
      throw InputError(fmt::format("{}: merge {} makes '{}', which is no token", what, rank, bpe::spell(joined)));
    if (!table_.add(merges_[rank], result->second))
      throw InputError(fmt::format("{}: merge {} (into '{}') appears twice", what, rank, bpe::spell(joined)));
  }
}

std::vector<int32_t> BpeTokenizer::encode(std::string_view text) const {
  std::vector<int32_t> out, bytes;
  out.reserve(text.size() / 3);
  bpe::KnownPieces known(out);
  bpe::for_each_piece(text, [&](std::string_view piece) {
    if (piece.size() == 1) return out.push_back(byte_tokens_[static_cast<uint8_t>(piece[0])]);
    known.append(piece, [&](std::string_view unknown) {
      bytes.clear();
      for (const char c : unknown) bytes.push_back(byte_tokens_[static_cast<uint8_t>(c)]);
      table_.apply(bytes, out);
    });
  });
  return out;
}

std::optional<int32_t> BpeTokenizer::document_end() const {
  const auto found = std::find(tokens_.begin(), tokens_.end(), "<|endoftext|>");
  return found == tokens_.end() ? std::nullopt : std::optional(static_cast<int32_t>(found - tokens_.begin()));
}

std::string BpeTokenizer::decode(std::span<const int32_t> tokens) const {
  std::string out;
  for (const int32_t t : tokens) {
    if (t < 0 || t >= vocab_size())
      throw Error(fmt::format("token {} is outside the bpe tokenizer's vocabulary of {}", t, vocab_size()));
    out += tokens_[static_cast<size_t>(t)];
  }
  return out;
}

}  // namespace tessera
