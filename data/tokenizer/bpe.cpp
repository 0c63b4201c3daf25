// The byte alphabet as two small tables, and merging with a heap.
#include "data/tokenizer/bpe.h"

#include <queue>

#include "base/error.h"
#include "base/utf8.h"

namespace tessera::bpe {
namespace {

constexpr int kLast = 0x100 + 67;  // last code point of the alphabet

constexpr bool visible(int byte) {
  return (byte >= 0x21 && byte <= 0x7E) || (byte >= 0xA1 && byte <= 0xAC) || (byte >= 0xAE && byte <= 0xFF);
}

struct Tables {
  std::array<char32_t, 256> character{};
  std::array<int16_t, kLast + 1> byte{};  // -1: not in the alphabet
  std::array<uint8_t, 256> order{};
};

constexpr Tables make_tables() {
  Tables t;
  for (int16_t& b : t.byte) b = -1;
  size_t shown = 0, hidden = 188;
  for (int b = 0; b < 256; ++b) {
    const size_t place = visible(b) ? shown++ : hidden++;
    const char32_t c = visible(b) ? static_cast<char32_t>(b) : static_cast<char32_t>(0x100 + place - 188);
    t.order[place] = static_cast<uint8_t>(b);
    t.character[static_cast<size_t>(b)] = c;
    t.byte[c] = static_cast<int16_t>(b);
  }
  return t;
}
constexpr Tables kTables = make_tables();

// A linked list in an array, during merging.
struct Symbol {
  int32_t token, previous, next;  // next -1: none; token -1: merged into the previous one
};

}  // namespace

const std::array<uint8_t, 256>& bytes_in_order() { return kTables.order; }

std::string spell(std::string_view bytes) {
  std::string out;
  for (const char b : bytes) append_utf8(out, kTables.character[static_cast<uint8_t>(b)]);
  return out;
}

std::optional<std::string> unspell(std::string_view spelling) {
  std::string out;
  for (size_t position = 0; position < spelling.size();) {
    const std::optional<char32_t> c = next_code_point(spelling, position);
    if (!c || *c > kLast || kTables.byte[*c] < 0) return std::nullopt;
    out += static_cast<char>(kTables.byte[*c]);
  }
  return out;
}

void MergeTable::reserve(size_t merges) {
  ranks_.reserve(merges);
  results_.reserve(merges);
}

bool MergeTable::add(Merge merge, int32_t result) {
  if (!ranks_.add(pair_key(merge.left, merge.right), static_cast<int32_t>(results_.size()))) return false;
  results_.push_back(result);
  return true;
}

// Applies merges by rank, then by position. The heap may hold merges that an earlier merge has invalidated; they are
// detected when popped.
void MergeTable::apply(std::span<const int32_t> piece, std::vector<int32_t>& out) const {
  if (piece.size() >= size_t{1} << 30) throw Error("a text segment of 2^30 tokens or more");
  const auto n = static_cast<int32_t>(piece.size());
  std::vector<Symbol> symbols(piece.size());
  for (int32_t i = 0; i < n; ++i)
    symbols[static_cast<size_t>(i)] = {piece[static_cast<size_t>(i)], i - 1, i + 1 < n ? i + 1 : -1};
  std::priority_queue<uint64_t, std::vector<uint64_t>, std::greater<>> heap;  // rank, then position
  const auto rank_at = [&](int32_t i) {
    const Symbol& s = symbols[static_cast<size_t>(i)];
    if (s.token < 0 || s.next < 0) return -1;
    return ranks_.find(pair_key(s.token, symbols[static_cast<size_t>(s.next)].token));
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
  for (int32_t i = n > 0 ? 0 : -1; i >= 0; i = symbols[static_cast<size_t>(i)].next)
    out.push_back(symbols[static_cast<size_t>(i)].token);
}

}  // namespace tessera::bpe
