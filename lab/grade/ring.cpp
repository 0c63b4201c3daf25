// The ring, half by half: values, order of sums, bytes.
#include <fmt/format.h>

#include <algorithm>
#include <cstring>

#include "lab/compare.h"
#include "lab/exercise.h"
#include "lab/grade/inputs.h"

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

// A reduce-scatter: piece rank + first is copied, and in step s the numbers of piece(rank, s) are added to what comes.
struct Way {
  const char* cause;
  int first = -1, steps = -1;  // `steps` less than 0: before n, the steps that it makes too few
  std::function<int(int rank, int s)> piece = [](int rank, int s) { return rank - s - 2; };
};

const std::vector<Way>& typical_mistakes() {
  static const std::vector<Way> all{
      {"a step is missing: the last rank has not added its numbers yet; there are n - 1 steps", -1, -2},
      {"there is a step too many: n - 1 of them are enough", -1, 0},
      {"the same piece is added to in every step: `s` is missing in the number of the piece", -1, -1,
       [](int rank, int) { return rank - 2; }},
      {"the number of the piece goes up with s; expected rank - s - 2", 1, -1,
       [](int rank, int s) { return rank + s + 2; }},
      {"the number of the piece goes up with s; expected rank - s - 2", -1, -1,
       [](int rank, int s) { return rank + s - 2; }},
      {"the first piece is rank + 1; expected rank - 1", 1},
      {"the first piece is `rank`; expected rank - 1", 0},
      {"the first piece is `rank`, and all others one too far; expected rank - 1 first", 0, -1,
       [](int rank, int s) { return rank - s - 1; }}};
  return all;
}

// Sums that each rank ends with, where all pieces are equally long.
std::vector<double> on_this_way(const Inputs& in, const Way& way, int r) {
  const int n = in.ranks;
  const auto of = [&](int rank, int p) { return in.of_piece(rank, ((p % n) + n) % n); };
  std::vector<std::vector<double>> sums;
  for (int q = 0; q < n; ++q) sums.push_back(of(q, q + way.first));
  for (int s = 0; s < n + way.steps; ++s) {
    std::rotate(sums.begin(), sums.end() - 1, sums.end());  // each to the right
    for (int q = 0; q < n; ++q) sums[static_cast<size_t>(q)] = sums[static_cast<size_t>(q)] + of(q, way.piece(q, s));
  }
  return sums[static_cast<size_t>(r)];
}

// The sum of piece r whose first numbers, or those that are added to them, or all, begin `begin` bytes behind the
// beginning of their array.
std::vector<double> from_byte(const Inputs& in, int r, bool first, bool others) {
  const Range own = in.range(r);
  std::vector<double> sum(static_cast<size_t>(own.size()));
  for (int q = 0; q < in.ranks; ++q) {
    const std::vector<double> all = in.of(q, {0, in.count});
    const std::vector<float> floats(all.begin(), all.end());
    for (int64_t i = 0; i < own.size(); ++i) {
      float x = floats[static_cast<size_t>(own.begin + i)];
      if (q == (r + 1) % in.ranks ? first : others)
        std::memcpy(&x, reinterpret_cast<const std::byte*>(floats.data()) + own.begin + i * kFloat, sizeof(x));
      sum[static_cast<size_t>(i)] += x;
    }
  }
  return sum;
}

std::vector<Guess> guesses(const Inputs& in, int r) {
  std::vector<Guess> out;
  if (in.count % in.ranks == 0)
    for (const Way& way : typical_mistakes()) out.push_back({way.cause, on_this_way(in, way, r)});
  for (Guess& guess : in.guesses_of_sum(r)) out.push_back(std::move(guess));
  for (const auto& [first, others] : {std::pair(true, true), {true, false}, {false, true}})
    out.push_back({"a place in memory is in bytes: piece p begins at in + range(p).begin * element",
                   from_byte(in, r, first, others)});
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
    in.expect_kept(where, results[r]);
    expect_values(where, results[r].values, around(in, r), guesses(in, r), in.ranks);
    const int64_t all = in.count * kFloat, own = in.range(r).size() * kFloat;
    expect_bytes(where, results[r].sent, all - own, "all of the array except its own piece",
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
    expect_bytes(where, results[r].sent, all - next, "all of the array except its right neighbour's piece",
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
    expect_values(in.where("all-reduce", r), results[r].values, expected,
                  {{"each half is right alone. In an all-reduce `in` and `out` lie in the same array, so the sum that "
                    "travels needs memory of its own",
                    results[r].values}},
                  in.ranks);
  }
}

}  // namespace

Held grade_ring() {
  for_inputs(check_reduce_scatter);
  for_inputs(check_all_gather);
  for_inputs(check_all_reduce);
  return {"sums over 2, 3 and 5 ranks of 1 to 1003 numbers, pieces even and uneven, some of them empty",
          "order: piece c is added from rank c + 1 around to rank c, to the bit",
          "bytes: each rank sends all but one piece in each half, 2 (n - 1) / n of the array"};
}

}  // namespace tessera::lab
