// Whole numbers and others, by a formula.
#include "lab/grade/inputs.h"

#include <fmt/format.h>

#include "tensor/random.h"

namespace tessera::lab {

double Inputs::at(int rank, int64_t i) const {
  if (whole_numbers) return static_cast<double>((rank * 37 + i * 11 + rank * i) % 41 - 13);
  return static_cast<float>(Philox(static_cast<uint64_t>(rank)).uniform(static_cast<uint64_t>(i)) - 0.5);
}

std::vector<double> Inputs::of(int rank, Range r) const {
  std::vector<double> out;
  for (int64_t i = r.begin; i < r.end; ++i) out.push_back(at(rank, i));
  return out;
}

std::string Inputs::where(const char* operation, int rank) const {
  return fmt::format("{} of {} number{} on {} ranks, rank {}", operation, count, count == 1 ? "" : "s", ranks, rank);
}

std::vector<Inputs::Result> Inputs::run(const Body& body, Op op, Algorithm algorithm) const {
  std::vector<Result> out(static_cast<size_t>(ranks));
  on_ranks(
      ranks,
      [&](Communicator& world) {
        const ArenaPtr arena = make_arena();
        const std::vector<double> mine = of(world.rank(), {0, count});
        const std::vector<float> narrow(mine.begin(), mine.end());
        const Tensor whole = Tensor::of<float>(narrow, {count}, arena);
        const int64_t size = range(world.rank()).size();
        Tensor room = Tensor::empty({size + 1}, DType::float32, arena);  // a piece is at most one longer than another
        room.fill(kUntouched);
        const std::vector<double> values = numbers(body(world, whole, room.narrow(0, 0, size)));
        out[static_cast<size_t>(world.rank())] = {values, world.counts()[static_cast<size_t>(op)].sent,
                                                  numbers(whole) == mine, numbers(room).back() == kUntouched};
      },
      algorithm);
  return out;
}

void Inputs::expect_kept(const std::string& where, const Result& result) const {
  if (!result.within)
    throw Wrong{"values", where + ": more than a piece was written to `out`; expected this rank's piece alone",
                "`out` has room for one piece: the sum that travels needs memory of its own"};
  if (!result.in_kept)
    throw Wrong{"values", where + ": the array at `in` has changed; expected it as it was",
                "a sum is added to `in`, or a message is received there: this needs memory of its own"};
}

std::vector<Guess> Inputs::guesses_of_sum(int r) const {
  std::vector<double> sum(static_cast<size_t>(range(r).size()));
  for (int q = 0; q < ranks; ++q) sum = sum + of_piece(q, r);
  std::vector<Guess> out{
      {"nothing was written there", std::vector<double>(sum.size(), kUntouched)},
      {"it is this rank's own piece: nothing that came from others was added", of_piece(r, r)},
      {"this rank's own piece is added once for each rank: what the others sent is not used", of_piece(r, r) * ranks}};
  for (int q = 0; q < ranks; ++q) {
    const std::vector<double> theirs = of_piece(q, r);
    out.push_back(
        {fmt::format("it is the piece of rank {} alone: the message replaced the sum, and was not added to it", q),
         theirs});
    out.push_back({fmt::format("the numbers of rank {} are missing in the sum", q), sum + theirs * -1});
    out.push_back({fmt::format("the numbers of rank {} are in the sum twice", q), sum + theirs});
  }
  for (int p = 0; p < ranks; ++p) {
    std::vector<double> other(static_cast<size_t>(range(p).size()));
    for (int q = 0; q < ranks; ++q) other = other + of_piece(q, p);
    out.push_back({fmt::format("it is the sum of piece {0}; rank {1} must end with piece {1}", p, r), other});
  }
  return out;
}

void Inputs::expect_gathered(const std::string& where, const std::vector<double>& found) const {
  for (int p = 0; p < ranks; ++p) {
    const Range r = range(p);
    const auto begin = found.begin();
    std::vector<Guess> guesses{{"nothing was written there: a piece never arrived, or went to another place",
                                std::vector<double>(static_cast<size_t>(r.size()), kUntouched)}};
    for (int q = 0; q < ranks; ++q)
      guesses.push_back({fmt::format("it is the piece of rank {}: pieces are at the wrong places", q), of_piece(q, q)});
    guesses.push_back(
        {"a piece is sent from a wrong place, or written to one: piece p begins range(p).begin * element "
         "bytes behind the beginning",
         {begin + r.begin, begin + r.end}});
    expect_values(fmt::format("{}, the piece of rank {}", where, p), {begin + r.begin, begin + r.end}, of_piece(p, p),
                  guesses, ranks);
  }
}

void for_inputs(const std::function<void(const Inputs&)>& check) {
  for (const bool whole_numbers : {true, false})
    for (const int n : {3, 2, 5})
      for (const int64_t count : {int64_t{8 * n}, int64_t{n}, int64_t{7}, int64_t{1}, int64_t{1003}})
        check({n, count, whole_numbers});
}

}  // namespace tessera::lab
