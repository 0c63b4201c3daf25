// Pair counts that are kept up to date merge by merge, and a heap of pairs by count.
#include "data/bpe/bpe_train.h"

#include <fmt/format.h>

#include <algorithm>
#include <queue>

#include "data/bpe/alphabet.h"
#include "data/bpe/pieces.h"
#include "tensor/error.h"

namespace tessera {
namespace {

constexpr int64_t kProgressEvery = 64;  // merges

struct Word {
  std::vector<int32_t> tokens;
  int64_t count;
};

struct Pair {
  int64_t count = 0;
  std::vector<int32_t> words;  // those that may contain it, ascending
};

struct Candidate {
  int64_t count;
  uint64_t pair;
  // Of a heap whose top is the best: the highest count, then the smallest pair.
  bool operator<(const Candidate& other) const {
    return count != other.count ? count < other.count : pair > other.pair;
  }
};

uint64_t pair_key(int32_t left, int32_t right) {
  return static_cast<uint64_t>(static_cast<uint32_t>(left)) << 32 | static_cast<uint32_t>(right);
}
BpeTokenizer::Merge of_key(uint64_t key) {
  return {static_cast<int32_t>(key >> 32), static_cast<int32_t>(key & 0xFFFFFFFF)};
}

class Trainer {
 public:
  explicit Trainer(std::string_view text) {
    for (const uint8_t byte : bpe::bytes_in_order()) add_token(std::string(1, static_cast<char>(byte)));
    count_words(text);
    for (size_t w = 0; w < words_.size(); ++w) add_pairs(static_cast<int32_t>(w), nullptr);
    for (const auto& [key, pair] : pairs_) heap_.push({pair.count, key});
  }

  // Makes one merge; false when no pair occurs `least` times.
  bool step(int64_t least) {
    while (!heap_.empty()) {
      const Candidate best = heap_.top();
      heap_.pop();
      Pair& pair = pairs_.at(best.pair);
      if (best.count != pair.count) {  // the count went down since it was pushed
        if (pair.count > 0) heap_.push({pair.count, best.pair});
        continue;
      }
      if (best.count < least) return false;
      merge(best.pair);
      return true;
    }
    return false;
  }

  int64_t made() const { return std::ssize(tokens_); }
  BpeTokenizer finish() && { return {std::move(tokens_), std::move(merges_), "the trained tokenizer"}; }

 private:
  int32_t add_token(const std::string& bytes) {
    const auto [place, added] = ids_.emplace(bytes, static_cast<int32_t>(tokens_.size()));
    if (added) tokens_.push_back(bytes);
    return place->second;
  }

  void count_words(std::string_view text) {
    std::unordered_map<std::string_view, int32_t> index;
    bpe::for_each_piece(text, [&](std::string_view piece) {
      const auto [place, added] = index.emplace(piece, static_cast<int32_t>(words_.size()));
      if (added) {
        Word word{{}, 0};
        for (const char byte : piece) word.tokens.push_back(ids_.at(std::string(1, byte)));
        words_.push_back(std::move(word));
      }
      ++words_[static_cast<size_t>(place->second)].count;
    });
  }

  // Adds a word's pairs to the counts; `changed` gets them.
  void add_pairs(int32_t w, std::vector<uint64_t>* changed) {
    const Word& word = words_[static_cast<size_t>(w)];
    for (size_t i = 0; i + 1 < word.tokens.size(); ++i) {
      const uint64_t key = pair_key(word.tokens[i], word.tokens[i + 1]);
      Pair& pair = pairs_[key];
      pair.count += word.count;
      if (pair.words.empty() || pair.words.back() != w) pair.words.push_back(w);
      if (changed != nullptr) changed->push_back(key);
    }
  }
  void take_pairs(const Word& word) {
    for (size_t i = 0; i + 1 < word.tokens.size(); ++i)
      pairs_.at(pair_key(word.tokens[i], word.tokens[i + 1])).count -= word.count;
  }

  void merge(uint64_t key) {
    const auto [left, right] = of_key(key);
    const int32_t result = add_token(tokens_[static_cast<size_t>(left)] + tokens_[static_cast<size_t>(right)]);
    merges_.push_back({left, right});
    std::vector<int32_t> words = std::move(pairs_.at(key).words);
    pairs_.at(key).words.clear();
    std::ranges::sort(words);
    words.erase(std::unique(words.begin(), words.end()), words.end());
    std::vector<uint64_t> changed;
    for (const int32_t w : words) merge_in(w, {left, right}, result, changed);
    std::ranges::sort(changed);
    changed.erase(std::unique(changed.begin(), changed.end()), changed.end());
    for (const uint64_t pair : changed)
      if (const BpeTokenizer::Merge m = of_key(pair); m.left == result || m.right == result)
        heap_.push({pairs_.at(pair).count, pair});
  }

  // Joins the pair in one word, from left to right.
  void merge_in(int32_t w, BpeTokenizer::Merge pair, int32_t result, std::vector<uint64_t>& changed) {
    Word& word = words_[static_cast<size_t>(w)];
    std::vector<int32_t>& t = word.tokens;
    size_t first = 0;
    while (first + 1 < t.size() && (t[first] != pair.left || t[first + 1] != pair.right)) ++first;
    if (first + 1 >= t.size()) return;  // an earlier merge took it apart
    take_pairs(word);
    size_t to = first;
    for (size_t from = first; from < t.size(); ++to) {
      const bool here = from + 1 < t.size() && t[from] == pair.left && t[from + 1] == pair.right;
      t[to] = here ? result : t[from];
      from += here ? 2 : 1;
    }
    t.resize(to);
    add_pairs(w, &changed);
  }

  std::vector<std::string> tokens_;
  std::vector<BpeTokenizer::Merge> merges_;
  std::unordered_map<std::string, int32_t> ids_;
  std::vector<Word> words_;
  std::unordered_map<uint64_t, Pair> pairs_;
  std::priority_queue<Candidate> heap_;
};

}  // namespace

BpeTokenizer train_bpe(std::string_view text, const BpeTraining& options) {
  if (options.vocab_size < 256)
    throw FieldError("vocab", fmt::format("a bpe tokenizer has at least its 256 bytes; found {}", options.vocab_size));
  Trainer trainer(text);
  while (trainer.made() < options.vocab_size && trainer.step(options.least_count))
    if (options.progress && trainer.made() % kProgressEvery == 0) options.progress(trainer.made());
  return std::move(trainer).finish();
}

}  // namespace tessera
