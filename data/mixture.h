// Several datasets that are trained on together, each with a weight: its share of the sequences.
//
//   data = "books=0.7,code=0.3"     or the name of a file, .json or .toml, whose names are relative to it:
//
//   {"books": 0.7, "code/texts.txt": 0.3}        books = 0.7
//                                                code = 0.3
//
// Weights are in proportion: 7 and 3 mean the same. Which sequence comes from which dataset: data/mixture.h.
#pragma once

#include "data/dataset.h"

namespace tessera {

struct Weighted {
  std::string name;  // as it is written
  double weight = 0;
  std::string spec = name;  // the value of `data` that names the dataset alone
};

// "A=0.7,B=0.3". `what` names it in messages. Throws Error (usage): a name that is empty or comes twice, a weight that
// is no positive finite number, fewer than two, more than 256.
std::vector<Weighted> parse_weights(std::string_view text, const std::string& what);
// Parses a file's weights, JSON or TOML by the end of its name `what`. Throws InputError; of TOML that cannot be read,
// Error (usage).
std::vector<Weighted> parse_weights_file(std::string_view bytes, const std::string& what);

// The mixture that `data` names; nothing where it names one dataset: where it has no '=', or is itself the name of a
// file or folder that is no such file.
std::optional<std::vector<Weighted>> mixture_in(const std::string& data);

// One dataset of all of them, opened in the order of the weights. Throws Error (usage) where the tokenizers differ, or
// where some are examples and some are not.
Dataset mixed(const std::vector<Weighted>& weights, std::vector<Dataset> datasets);

// From which dataset each sequence of a mixture comes: a pure function of its number, so that nothing is kept or
// carried.
//
// Each dataset has, of the first n sequences, for any n, less than one more or fewer than its share of n: the chairman
// assignment of Tijdeman (1980, "The chairman assignment problem", Discrete Mathematics 32), computed once for the
// period after which shares of whole numbers come out even. Of shares 3 and 1: a a b a, a a b a, ...

// Whole numbers, without a common divisor, in the proportions of the weights, of which each is positive and finite. The
// proportions are exact where the weights have at most six digits behind the point and the sum is at most a million;
// else each is rounded to millionths of the sum, and is at least one.
std::vector<int64_t> whole_shares(std::span<const double> weights);

class MixtureOrder {
 public:
  // Each share is at least 1; at most 256 of them, and their sum at most 1,000,000. Throws Error (usage). Cost: the
  // sum times the number of shares, and 8 bytes for each of the sum.
  explicit MixtureOrder(std::vector<int64_t> shares);

  struct Place {
    size_t dataset;
    int64_t nth;  // its place among those that come from it, from 0
  };
  // Sequence 0, 1, ...
  Place at(int64_t sequence) const;

 private:
  std::vector<int64_t> shares_;
  struct Entry {
    int32_t dataset, nth;
  };
  std::vector<Entry> period_;
};

}  // namespace tessera
