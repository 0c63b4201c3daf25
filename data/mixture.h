// Mixtures: several datasets trained on together, each with a weight (its fraction of the sequences).
//
//   data = "books=0.7,code=0.3"     or the name of a .json or .toml file, relative to which its names are resolved:
//
//   {"books": 0.7, "code/texts.txt": 0.3}        books = 0.7
//                                                code = 0.3
//
// Only the ratio of the weights matters: 7 and 3 are equivalent.
#pragma once

#include "data/dataset.h"

namespace tessera {

struct Weighted {
  std::string name;  // as written
  double weight = 0;
  std::string spec = name;  // the dataset by itself as a value of `data`
};

// Parses "A=0.7,B=0.3". `what` names the source in errors. Throws Error (usage) for empty or duplicate names, weights
// that are not positive and finite, fewer than two components, and more than 256.
std::vector<Weighted> parse_weights(std::string_view text, const std::string& what);
// Parses a weights file, JSON or TOML by the extension of `what`. Throws InputError; Error (usage) for malformed TOML.
std::vector<Weighted> parse_weights_file(std::string_view bytes, const std::string& what);

// The mixture that `data` names. Returns nullopt for a single dataset: without '=', or if it is an existing file or
// directory other than a weights file.
std::optional<std::vector<Weighted>> mixture_in(const std::string& data);

// Combines datasets, in the order of the weights. Throws Error (usage) if the tokenizers differ, or if only some of the
// datasets are examples.
Dataset mixed(const std::vector<Weighted>& weights, std::vector<Dataset> datasets);

// Assigns each sequence of a mixture to a dataset: a pure function of the sequence number, so there is no state to
// store or communicate.
//
// For any n, the first n sequences contain each dataset's share of n to within less than one sequence: the chairman
// assignment of Tijdeman (1980, "The chairman assignment problem", Discrete Mathematics 32), computed once for the
// period, the sum of the integer shares. For shares 3 and 1: a a b a, a a b a, ...

// Coprime integers in the ratio of the weights, which are positive and finite. The ratio is exact if the weights have
// at most six decimal places and their scaled sum is at most a million; otherwise each is rounded to millionths of the
// sum, and is at least one.
std::vector<int64_t> integer_shares(std::span<const double> weights);

class MixtureOrder {
 public:
  // Each share is at least 1; at most 256 shares with a sum of at most 1,000,000. Throws Error (usage). Cost: sum times
  // number of shares; 8 bytes per unit of the sum.
  explicit MixtureOrder(std::vector<int64_t> shares);

  struct Place {
    size_t dataset;
    int64_t nth;  // index among the sequences from this dataset, from 0
  };
  Place at(int64_t sequence) const;

 private:
  std::vector<int64_t> shares_;
  struct Entry {
    int32_t dataset, nth;
  };
  std::vector<Entry> period_;
};

}  // namespace tessera
