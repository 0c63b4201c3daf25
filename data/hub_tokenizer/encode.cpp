// A text to tokens: added tokens taken out, the rest normalised, cut into pieces, and merged.
#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "data/hub_tokenizer/hub_tokenizer.h"
#include "data/hub_tokenizer/nfc.h"
#include "data/utf8.h"
#include "tensor/error.h"

namespace tessera {

using hub::kMark;

namespace {

std::string with_marks(std::string_view text) {
  std::string out;
  out.reserve(text.size() + text.size() / 2);
  for (const char c : text) c == ' ' ? out += kMark : out += c;
  return out;
}

// Calls f for the stretches of a text that begin at a mark: at each, or only at those behind something else.
void cut_at_marks(std::string_view text, bool each, const std::function<void(std::string_view)>& f) {
  size_t begin = 0;
  for (size_t mark = text.find(kMark); mark != std::string_view::npos; mark = text.find(kMark, mark + kMark.size())) {
    if (mark == begin || (!each && text.substr(0, mark).ends_with(kMark))) continue;
    f(text.substr(begin, mark - begin));
    begin = mark;
  }
  if (begin < text.size()) f(text.substr(begin));
}

}  // namespace

std::vector<int32_t> HubTokenizer::encode_with(std::string_view text, const EncodeOptions& options) const {
  std::vector<int32_t> out;
  out.reserve(text.size() / 3);
  if (options.add_ends) out = d_.before;
  const bool broken = find_invalid_utf8(text) != std::string_view::npos;
  const std::string mended = broken ? replace_broken(text) : std::string();
  bool first = true;
  const auto append = [&](std::string_view found, int32_t token) {
    const bool begins = std::exchange(first, false);
    if (token >= 0) return out.push_back(token);
    const bool prefixed = !begins || options.begins;
    bool part_begins = begins;
    const std::string normal = normalized(found, prefixed);
    normal_.split(normal, options.special_in_text, [&](std::string_view part, int32_t inside) {
      const bool begins_part = std::exchange(part_begins, false);
      if (inside >= 0) return out.push_back(inside);
      encode_part(part, begins_part, !begins_part || options.begins, out);
    });
  };
  written_.split(broken ? std::string_view(mended) : text, options.special_in_text, append);
  if (options.add_ends) out.insert(out.end(), d_.behind.begin(), d_.behind.end());
  return out;
}

std::string HubTokenizer::normalized(std::string_view part, bool prefixed) const {
  std::string out = d_.nfc ? hub::to_nfc(part) : std::string(part);
  if (d_.prepend_mark && prefixed) out.insert(0, kMark);
  return d_.spaces_to_marks ? with_marks(out) : out;
}

// `first`: at the beginning of the whole text; `prefixed`: whether what marks a beginning may be put there.
void HubTokenizer::encode_part(std::string_view part, bool first, bool prefixed, std::vector<int32_t>& out) const {
  std::string changed;
  const bool mark = d_.prefix_mark == hub::Prefix::always || (d_.prefix_mark == hub::Prefix::first && first);
  if (prefixed && mark && !part.starts_with(kMark)) part = changed = std::string(kMark) + std::string(part);
  if (prefixed && d_.prefix_space && !part.starts_with(' ')) part = changed = " " + std::string(part);
  std::vector<int32_t> symbols;
  bpe::KnownPieces known(out);
  cut(part, 0, [&](std::string_view piece) {
    known.append(piece, [&](std::string_view unknown) { encode_piece(unknown, symbols, out); });
  });
}

void HubTokenizer::cut(std::string_view text, size_t step, const std::function<void(std::string_view)>& f) const {
  if (step < d_.cuts.size()) {
    const auto next = [&](std::string_view piece) { cut(piece, step + 1, f); };
    return bpe::for_each_piece(text, next, d_.cuts[step]);
  }
  if (!d_.cut_at_marks && !d_.marks_begin_words) return f(text);
  cut_at_marks(text, d_.cut_at_marks, f);
}

void HubTokenizer::encode_piece(std::string_view piece, std::vector<int32_t>& symbols,
                                std::vector<int32_t>& out) const {
  if (d_.ignore_merges)
    if (const auto whole = d_.vocab.find(piece); whole != d_.vocab.end()) return out.push_back(whole->second);
  symbols.clear();
  split_symbols(piece, symbols);
  d_.merges.apply(symbols, out);
}

// What is merged: bytes; or characters, where those that are no token become bytes, or else the unknown token.
void HubTokenizer::split_symbols(std::string_view piece, std::vector<int32_t>& symbols) const {
  bool unknown_before = false;
  for (size_t position = 0; position < piece.size();) {
    const size_t begin = position;
    if (d_.byte_level || !next_code_point(piece, position)) ++position;
    const std::string_view character = piece.substr(begin, position - begin);
    const auto byte_token = [&](char c) { return d_.byte_tokens[static_cast<uint8_t>(c)]; };
    const auto known = d_.byte_level ? d_.vocab.end() : d_.vocab.find(character);
    if (known != d_.vocab.end()) {
      symbols.push_back(known->second);
    } else if (std::all_of(character.begin(), character.end(), [&](char c) { return byte_token(c) >= 0; })) {
      for (const char c : character) symbols.push_back(byte_token(c));
    } else if (d_.unknown >= 0) {
      if (!unknown_before || !d_.fuse_unknown) symbols.push_back(d_.unknown);
      unknown_before = true;
      continue;
    } else {
      throw Error(fmt::format("the tokenizer has no token for '{}' and none for the unknown", character));
    }
    unknown_before = false;
  }
}

}  // namespace tessera
