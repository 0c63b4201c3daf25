// Bounds that graders hold numbers and bytes to, and how they find the likely cause of a fault: each typical mistake
// says what it would have computed, and the one that matches is named.
#pragma once

#include "autograd/var.h"
#include "lab/exercise.h"
#include "parallel/comm/launch.h"

namespace tessera::lab {

// A mistake, and the numbers that it makes. The last may be what was found, for what is known of all others.
struct Guess {
  std::string cause;
  std::vector<double> would_be;
};

// Throws Wrong with the first wrong element. `where` says which case it is: "3 ranks, 7 numbers, float32, rank 1". A
// constant factor is a cause too if it means something: 2, 1/2, -1, and `ranks` above 1 or one over them. `tolerance`
// is relative to the largest expected number; 0: the same numbers, and a difference that rounding explains is said to
// be one of order.
void expect_values(const std::string& where, const std::vector<double>& found, const std::vector<double>& expected,
                   const std::vector<Guess>& guesses = {}, int ranks = 1, double tolerance = 0);

struct BytesGuess {
  std::string cause;
  int64_t would_be = 0;
};
// Tells the grading how many bytes are too many or too few; `formula` is what they should be, in symbols.
void expect_bytes(Grading& grading, const std::string& where, int64_t found, int64_t expected,
                  const std::string& formula, const std::vector<BytesGuess>& guesses = {});

// Ranks as threads that wait for each other only a short time. What a rank throws comes out, its number in front.
void on_ranks(int ranks, const std::function<void(Communicator& world)>& body, Algorithm algorithm = Algorithm::direct);

// The findings of each rank, by its number.
template <class F>
auto by_ranks(int ranks, const F& body, Algorithm algorithm = Algorithm::direct) {
  std::vector<std::invoke_result_t<F, Communicator&>> found(static_cast<size_t>(ranks));
  on_ranks(
      ranks, [&](Communicator& world) { found[static_cast<size_t>(world.rank())] = body(world); }, algorithm);
  return found;
}

// Bytes that left a rank by any operation, so that what goes another way is seen too.
int64_t sent(const Communicator& world);

// A tensor's numbers.
std::vector<double> numbers(const Tensor& t);
// Empty where none has come.
std::vector<double> gradient_values(const Var& x);
std::vector<double> operator+(std::vector<double> a, const std::vector<double>& b);
std::vector<double> operator*(std::vector<double> a, double factor);

}  // namespace tessera::lab
