// Comparison of values and bytes for graders: each typical mistake predicts a result; a match is reported as the cause.
#pragma once
#include <cstdint>
#include <functional>
#include <string>
#include <type_traits>
#include <vector>

#include "autograd/var.h"
#include "lab/exercise.h"
#include "parallel/comm/launch.h"

namespace tessera::lab {

// A typical mistake and its result. The last guess may repeat the values found, as a fallback cause.
struct Guess {
  std::string cause;
  std::vector<double> would_be;
};

// Throws Failure for the first wrong element. `where` describes the case: "3 ranks, 7 elements, float32, rank 1".
// Constant factors 2, 1/2, -1, `ranks` and 1 / `ranks` are diagnosed too. `tolerance` is relative to the largest
// expected value; 0 requires equality, and rounding differences are diagnosed as a different summation order.
void expect_values(const std::string& where, const std::vector<double>& found, const std::vector<double>& expected,
                   const std::vector<Guess>& guesses = {}, int ranks = 1, double tolerance = 0);

struct BytesGuess {
  std::string cause;
  int64_t would_be = 0;
};
// Records a failure if the bytes differ; `formula` is the expected value in symbols.
void expect_bytes(Grading& grading, const std::string& where, int64_t found, int64_t expected,
                  const std::string& formula, const std::vector<BytesGuess>& guesses = {});

// Runs ranks as threads with a short timeout. A rank's exceptions are rethrown with its number as a prefix.
void on_ranks(int ranks, const std::function<void(Communicator& world)>& body, Algorithm algorithm = Algorithm::direct);

template <class F>
auto by_ranks(int ranks, const F& body, Algorithm algorithm = Algorithm::direct) {
  std::vector<std::invoke_result_t<F, Communicator&>> found(static_cast<size_t>(ranks));
  on_ranks(
      ranks, [&](Communicator& world) { found[static_cast<size_t>(world.rank())] = body(world); }, algorithm);
  return found;
}

// Bytes sent by all operations.
int64_t sent(const Communicator& world);

std::vector<double> to_doubles(const Tensor& t);
// Empty without a gradient.
std::vector<double> gradient_values(const Var& x);
std::vector<double> operator+(std::vector<double> a, const std::vector<double>& b);
std::vector<double> operator*(std::vector<double> a, double factor);

}  // namespace tessera::lab
