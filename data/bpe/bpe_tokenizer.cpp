// Encoding by a heap of the merges that apply, and decoding by concatenation.
#include "data/bpe/bpe_tokenizer.h"

#include <fmt/format.h>

#include <algorithm>
#include <functional>
#include <queue>

#include "data/bpe/alphabet.h"
#include "data/bpe/pieces.h"
#include "tensor/error.h"

namespace tessera {
namespace {

constexpr size_t kCachedBytes = 48;  // of a piece that is worth remembering
constexpr size_t kCachedPieces = 1 << 18;

uint64_t pair_key(int32_t left, int32_t right) {
  return static_cast<uint64_t>(static_cast<uint32_t>(left)) << 32 | static_cast<uint32_t>(right);
}

// A piece while it is merged: a linked list of tokens in an array.
struct Symbol {
  int32_t token, previous, next;  // next -1: none; token -1: merged into the one before
};

}  // namespace

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
  ranks_.reserve(merges_.size());
  results_.reserve(merges_.size());
  for (size_t rank = 0; rank < merges_.size(); ++rank) {
    const auto [left, right] = merges_[rank];
    for (const int32_t part : {left, right})
      if (part < 0 || part >= vocab_size())
        throw InputError(fmt::format("{}: merge {} is of the token {}, which is not there", what, rank, part));
    const std::string joined = tokens_[static_cast<size_t>(left)] + tokens_[static_cast<size_t>(right)];
    const auto result = ids.find(joined);
    if (result == ids.end())
      throw InputError(fmt::format("{}: merge {} makes '{}', which is no token", what, rank, bpe::spell(joined)));
    if (!ranks_.emplace(pair_key(left, right), static_cast<int32_t>(rank)).second)
      throw InputError(fmt::format("{}: merge {} (into '{}') stands there twice", what, rank, bpe::spell(joined)));
    results_.push_back(result->second);
  }
}

// Merges in order of rank, and of place among equals: the heap holds those that applied when they were pushed, and what
// an earlier merge has taken away is noticed when it comes up.
void BpeTokenizer::encode_piece(std::string_view piece, std::vector<int32_t>& out) const {
  if (piece.size() >= size_t{1} << 30) throw Error("a piece of text of more than 2^30 bytes");
  const auto n = static_cast<int32_t>(piece.size());
  std::vector<Symbol> symbols(piece.size());
  for (int32_t i = 0; i < n; ++i)
    symbols[static_cast<size_t>(i)] = {byte_tokens_[static_cast<uint8_t>(piece[static_cast<size_t>(i)])], i - 1,
                                       i + 1 < n ? i + 1 : -1};
  std::priority_queue<uint64_t, std::vector<uint64_t>, std::greater<>> heap;  // rank, then place
  const auto rank_at = [&](int32_t i) {
    const Symbol& s = symbols[static_cast<size_t>(i)];
    if (s.token < 0 || s.next < 0) return -1;
    const auto found = ranks_.find(pair_key(s.token, symbols[static_cast<size_t>(s.next)].token));
    return found == ranks_.end() ? -1 : found->second;
  };
  const auto push = [&](int32_t i) {
    if (i < 0) return;
    if (const int32_t rank = rank_at(i); rank >= 0) heap.push(pair_key(rank, i));
  };
  for (int32_t i = 0; i < n; ++i) push(i);
  while (!heap.empty()) {
    const auto rank = static_cast<int32_t>(heap.top() >> 32), i = static_cast<int32_t>(heap.top() & 0xFFFFFFFF);
    heap.pop();
    if (rank_at(i) != rank) continue;
    Symbol& s = symbols[static_cast<size_t>(i)];
    Symbol& eaten = symbols[static_cast<size_t>(s.next)];
    s.token = results_[static_cast<size_t>(rank)];
    s.next = eaten.next;
    eaten.token = -1;
    if (s.next >= 0) symbols[static_cast<size_t>(s.next)].previous = i;
    push(i);
    push(s.previous);
  }
  for (int32_t i = 0; i >= 0; i = symbols[static_cast<size_t>(i)].next)
    out.push_back(symbols[static_cast<size_t>(i)].token);
}

std::vector<int32_t> BpeTokenizer::encode(std::string_view text) const {
  std::vector<int32_t> out;
  out.reserve(text.size() / 3);
  // A text repeats its words: where the tokens of a short piece stand in `out`, so that they can be copied.
  struct Place {
    size_t begin, count;
  };
  std::unordered_map<std::string_view, Place> known;
  bpe::for_each_piece(text, [&](std::string_view piece) {
    if (piece.size() == 1) return out.push_back(byte_tokens_[static_cast<uint8_t>(piece[0])]);
    const bool remember = piece.size() <= kCachedBytes;
    if (const auto found = remember ? known.find(piece) : known.end(); found != known.end()) {
      const Place place = found->second;
      for (size_t i = 0; i < place.count; ++i) out.push_back(out[place.begin + i]);
      return;
    }
    const size_t begin = out.size();
    encode_piece(piece, out);
    if (remember && known.size() < kCachedPieces) known.emplace(piece, Place{begin, out.size() - begin});
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
