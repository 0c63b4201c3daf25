// What all kinds of byte-pair encoding share: pairs of tokens that become one, in order of rank, and the memory of the
// pieces that a text has had.
#pragma once
#include <cstdint>
#include <span>
#include <string_view>
#include <unordered_map>
#include <vector>

namespace tessera::bpe {

struct Merge {
  int32_t left, right;
};

class MergeTable {
 public:
  void reserve(size_t merges);
  // The next merge in order of rank, and the token that it makes. False, and nothing is added, for a pair that is
  // known.
  bool add(Merge merge, int32_t result);

  // Appends to `out` what becomes of the tokens of a piece when the merge of lowest rank is applied again and again,
  // the leftmost first, until none applies. Throws Error for a piece of 2^30 tokens. Cost: n log n.
  void apply(std::span<const int32_t> piece, std::vector<int32_t>& out) const;

 private:
  std::vector<int32_t> results_;                 // of each merge
  std::unordered_map<uint64_t, int32_t> ranks_;  // by the pair
};

// A text repeats its words: where the tokens of each short piece stand in the output, so that they can be copied.
class KnownPieces {
 public:
  // What append() is given must stay where it is as long as this.
  explicit KnownPieces(std::vector<int32_t>& out) : out_(&out) {}

  // Appends the tokens of a piece; encode(piece) appends those of one that was not met before.
  template <class Encode>
  void append(std::string_view piece, const Encode& encode) {
    const bool remember = piece.size() <= kBytes;
    if (const auto found = remember ? known_.find(piece) : known_.end(); found != known_.end()) {
      const Place place = found->second;
      for (size_t i = 0; i < place.count; ++i) out_->push_back((*out_)[place.begin + i]);
      return;
    }
    const size_t begin = out_->size();
    encode(piece);
    if (remember && known_.size() < kPieces) known_.emplace(piece, Place{begin, out_->size() - begin});
  }

 private:
  static constexpr size_t kBytes = 48;  // of a piece that is worth remembering
  static constexpr size_t kPieces = 1 << 18;
  struct Place {
    size_t begin, count;
  };
  std::vector<int32_t>* out_;
  std::unordered_map<std::string_view, Place> known_;
};

}  // namespace tessera::bpe
