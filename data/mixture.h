// Mixtures: datasets trained on together, each with a weight (its fraction of the sequences).
//
//   data = "books=0.7,code=0.3"     or a .json or .toml file, relative to which names are resolved:
//
//   {"books": 0.7, "code/texts.txt": 0.3}        books = 0.7
//                                                code = 0.3
//
// Only the ratio of the weights matters.
#pragma once
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "data/dataset.h"

namespace tessera {

struct Weighted {
  std::string name;  // as written
  double weight = 0;
  std::string spec = name;  // as a value of `data`
};

// Parses "A=0.7,B=0.3". Throws Error (usage) for empty or duplicate names, weights that are not positive and finite,
// fewer than two components, and more than 256.
std::vector<Weighted> parse_weights(std::string_view text, const std::string& what);
// JSON or TOML by the extension of `what`. Throws InputError; Error (usage) for malformed TOML.
std::vector<Weighted> parse_weights_file(std::string_view bytes, const std::string& what);

// nullopt for a single dataset: without '=', or an existing path other than a weights file.
std::optional<std::vector<Weighted>> mixture_in(const std::string& data);

// In the order of the weights. Throws Error (usage) if tokenizers differ, or if only some datasets are examples.
Dataset mixed(const std::vector<Weighted>& weights, std::vector<Dataset> datasets);

// The order of sequences is a pure function of the sequence number, so there is no state to store or communicate. The
// first n sequences contain each dataset's fraction of n to within less than one sequence, for any n: the chairman
// assignment of Tijdeman (1980, "The chairman assignment problem", Discrete Mathematics 32), computed once for the
// period, the sum of the integer ratios. For ratios 3 and 1: a a b a, a a b a, ...

// Coprime integers in the ratio of the weights. The ratio is exact for weights with at most six decimal places whose
// scaled sum is at most a million; otherwise each is rounded to millionths of the sum, at least one.
std::vector<int64_t> integer_ratios(std::span<const double> weights);

class MixtureOrder {
 public:
  // At most 256 ratios of at least 1, with a sum of at most 1,000,000; else throws Error (usage). Cost: sum times
  // number of ratios; 8 bytes per unit of the sum.
  explicit MixtureOrder(std::vector<int64_t> ratios);

  struct Place {
    size_t dataset;
    int64_t nth;  // among the sequences of this dataset, from 0
  };
  Place at(int64_t sequence) const;

 private:
  std::vector<int64_t> ratios_;
  struct Entry {
    int32_t dataset, nth;
  };
  std::vector<Entry> period_;
};

}  // namespace tessera
