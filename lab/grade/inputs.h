// What every rank brings to a collective that is graded, and what typical mistakes would make of it.
#pragma once
#include <functional>
#include <string>
#include <vector>

#include "lab/compare.h"

namespace tessera::lab {

inline constexpr double kUntouched = -1000;  // what results are filled with before

// Each rank's array of `count` float32 numbers: small whole ones, or any.
struct Inputs {
  int ranks = 2;
  int64_t count = 1;
  bool whole_numbers = true;

  double at(int rank, int64_t i) const;
  Range range(int r) const { return piece(count, ranks, r); }
  std::vector<double> of(int rank, Range r) const;
  std::vector<double> of_piece(int rank, int p) const { return of(rank, range(p)); }
  std::string where(const char* operation, int rank) const;

  struct Result {
    std::vector<double> values;
    int64_t sent = 0;
    bool in_kept = true, within = true;  // its array is as it was; nothing lies behind its piece
  };
  // What body(world, whole, own) returns on each rank, and what that rank has sent by `op`: `whole` is the rank's
  // array, `own` room for its piece.
  using Body = std::function<Tensor(Communicator& world, Tensor whole, Tensor own)>;
  std::vector<Result> run(const Body& body, Op op, Algorithm algorithm) const;

  // Throws Wrong where a reduce-scatter has changed its input, or has written more than a piece.
  void expect_kept(const std::string& where, const Result& result) const;
  // Of the sum of all ranks' piece `r`, on rank r.
  std::vector<Guess> guesses_of_sum(int r) const;
  // Throws Wrong where a piece is not that of its rank.
  void expect_gathered(const std::string& where, const std::vector<double>& found) const;
};

// Calls check() for arrays over 2, 3 and 5 ranks, of 1 to 1003 numbers: of whole ones first, whose sums have one value
// in any order.
void for_inputs(const std::function<void(const Inputs&)>& check);

}  // namespace tessera::lab
