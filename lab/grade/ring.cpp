// The ring, half by half: values, order of sums, bytes.
#include <fmt/format.h>

#include <cmath>

#include "lab/compare.h"
#include "lab/grade/inputs.h"
#include "lab/graders.h"

namespace tessera::lab {
namespace {

constexpr int64_t kFloat = 4;

// The order of piece c: ranks c + 1, ..., n - 1, 0, ..., c, each sum rounded.
std::vector<double> around(const Inputs& in, int c) {
  const Range own = in.range(c);
  std::vector<double> out;
  for (int64_t i = own.begin; i < own.end; ++i) {
    auto sum = static_cast<float>(in.at((c + 1) % in.ranks, i));
    for (int s = 2; s <= in.ranks; ++s) sum += static_cast<float>(in.at((c + s) % in.ranks, i));
    out.push_back(sum);
  }
  return out;
}

std::vector<Guess> guesses(const Inputs& in, int r) {
  std::vector<Guess> out = in.guesses_of_sum(r);
  const int next = (r + 1) % in.ranks;
  std::vector<double> before(static_cast<size_t>(in.range(next).size()));
  for (int q = 0; q < in.ranks; ++q)
    if (q != next) before = before + in.of_piece(q, next);
  out.push_back(
      {fmt::format("it is piece {}, to which rank {} alone has not added yet: a step is missing", next, next), before});
  return out;
}

void check_reduce_scatter(const Inputs& in) {
  const auto results = in.run(
      [&](Communicator& world, Tensor whole, Tensor own) {
        world.reduce_scatter(whole, own);
        return own;
      },
      Op::reduce_scatter, Algorithm::ring);
  for (int r = 0; r < in.ranks; ++r) {
    const std::string where = in.where("reduce-scatter", r);
    expect_values(where, results[r].values, around(in, r), guesses(in, r), in.ranks);
    const int64_t all = in.count * kFloat, own = in.range(r).size() * kFloat;
    expect_bytes(where, results[r].sent, all - own, "S less its own piece",
                 {{"the whole array is sent in each step; a step moves one piece", (in.ranks - 1) * all},
                  {"there is a step too many: n - 1 of them are enough", all}});
  }
}

void check_all_gather(const Inputs& in) {
  const auto results = in.run(
      [&](Communicator& world, Tensor whole, Tensor) {
        const Range own = in.range(world.rank());
        const Tensor piece = whole.narrow(0, own.begin, own.size()).clone();
        whole.fill(kUntouched);
        world.all_gather(piece, whole);
        return whole;
      },
      Op::all_gather, Algorithm::ring);
  for (int r = 0; r < in.ranks; ++r) {
    const std::string where = in.where("all-gather", r);
    in.expect_gathered(where, results[r].values);
    const int64_t all = in.count * kFloat, next = in.range((r + 1) % in.ranks).size() * kFloat;
    expect_bytes(where, results[r].sent, all - next, "S less the piece that its right neighbour had",
                 {{"there is a step too many: n - 1 of them are enough", all},
                  {"the whole array is sent in each step; a step moves one piece", (in.ranks - 1) * all}});
  }
}

void check_all_reduce(const Inputs& in) {
  const auto results = in.run(
      [&](Communicator& world, Tensor whole, Tensor) {
        world.all_reduce(whole);
        return whole;
      },
      Op::all_reduce, Algorithm::ring);
  for (int r = 0; r < in.ranks; ++r) {
    std::vector<double> expected;
    for (int c = 0; c < in.ranks; ++c)
      for (const double x : around(in, c)) expected.push_back(x);
    expect_values(in.where("all-reduce", r), results[r].values, expected, {}, in.ranks);
  }
}

}  // namespace

Held grade_ring() {
  for_inputs([](const Inputs& in) {
    check_reduce_scatter(in);
    check_all_gather(in);
    check_all_reduce(in);
  });
  return {"sums over 2, 3 and 5 ranks of 1 to 1003 numbers, pieces even and uneven, some of them empty",
          "order: piece c is added from rank c + 1 around to rank c, to the bit",
          "bytes: each rank sends all but one piece in each half, 2 (n - 1) / n of the array"};
}

}  // namespace tessera::lab
