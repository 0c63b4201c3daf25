// From which dataset each sequence of a mixture comes: a pure function of its number, so that nothing is kept or
// carried.
//
// Of the first n sequences, for any n, each dataset has less than one more or fewer than its share of n: the chairman
// assignment of Tijdeman (1980, "The chairman assignment problem", Discrete Mathematics 32), computed once for the
// period after which shares of whole numbers come out even. Of shares 3 and 1: a a b a, a a b a, ...
#pragma once
#include <cstdint>
#include <span>
#include <vector>

namespace tessera {

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
    int64_t nth;  // of those that come from it, from 0
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
