// Collectives that are graded: inputs of every rank, and results that typical mistakes would make of them.
#include <fmt/format.h>

#include "lab/compare.h"
#include "tensor/random.h"

namespace tessera::lab {
namespace {

// The value that results are filled with before.
constexpr double kUntouched = -1000;
constexpr int64_t kFloat = 4;  // bytes

// A transport that counts what another one sends.
class Counting final : public Transport {
 public:
  explicit Counting(Transport& through) : through_(through) {}
  int rank() const override { return through_.rank(); }
  int size() const override { return through_.size(); }
  int world_rank(int rank) const override { return through_.world_rank(rank); }
  std::string_view kind() const override { return through_.kind(); }
  void send(int to, int tag, const std::byte* data, int64_t bytes) override {
    sent += bytes;
    if (to != (rank() + 1) % size()) elsewhere += bytes;
    through_.send(to, tag, data, bytes);
  }
  void recv(int from, int tag, std::byte* data, int64_t bytes) override { through_.recv(from, tag, data, bytes); }
  std::unique_ptr<Transport> split(int, int) override { throw Error("split() here: its messages are not counted"); }
  void fail(const std::string& cause) override { through_.fail(cause); }

  int64_t sent = 0, elsewhere = 0;  // elsewhere than to the next rank

 private:
  Transport& through_;
};

// Each rank's array of `count` float32 numbers: small whole ones, or any.
struct Inputs {
  int ranks = 2;
  int64_t count = 1;
  bool whole_numbers = true;
  uint64_t seed = 0;

  double at(int rank, int64_t i) const {
    const Philox random(seed + static_cast<uint64_t>(rank));
    if (whole_numbers) return static_cast<double>(random.below(60, static_cast<uint64_t>(i))) + 1;
    return static_cast<float>(random.uniform(static_cast<uint64_t>(i)) - 0.5);
  }
  Range range(int r) const { return chunk_range(count, ranks, r); }
  std::vector<double> of(int rank, Range r) const {
    std::vector<double> out;
    for (int64_t i = r.begin; i < r.end; ++i) out.push_back(at(rank, i));
    return out;
  }
  std::vector<double> of_piece(int rank, int p) const { return of(rank, range(p)); }
  std::string where(Op op, int rank) const {
    const char* operation = op == Op::all_gather   ? "all-gather"
                            : op == Op::all_reduce ? "all-reduce"
                                                   : "reduce-scatter";
    return fmt::format("{} of {} number{} on {} ranks, rank {}", operation, count, count == 1 ? "" : "s", ranks, rank);
  }

  struct Result {
    std::vector<double> values, whole, room;  // its result, its array, the room for its piece and a number more
    int64_t sent = 0, counted = 0;            // bytes that left it, and as the learner's code counts them
    int64_t elsewhere = 0;                    // bytes that did not go to the next rank
    auto fields() { return std::tie(values, whole, room, sent, counted, elsewhere); }
  };
  // Runs a collective from one tensor to another on each rank.
  std::vector<Result> run(Op op, int64_t (*algorithm)(Transport& t, const Call& call)) const {
    const auto rank = [&](Communicator& world) {
      const ArenaPtr arena = make_arena();
      const std::vector<double> mine = of(world.rank(), {0, count});
      const std::vector<float> narrow(mine.begin(), mine.end());
      Tensor whole = Tensor::of<float>(narrow, {count}, arena), in = whole;
      const Range own = range(world.rank());
      Tensor room = Tensor::empty({own.size() + 1}, DType::float32, arena);  // pieces differ by one at most
      room.fill(kUntouched);
      if (op == Op::all_gather) {
        in = whole.narrow(0, own.begin, own.size()).clone();
        whole.fill(kUntouched);
      }
      const Tensor out = op == Op::reduce_scatter ? room.narrow(0, 0, own.size()) : whole;
      Counting transport(world.transport());
      const int64_t counted =
          algorithm(transport, {.op = op, .count = count, .in = in.address(), .out = out.address()});
      return Result{numbers(out), numbers(whole), numbers(room), transport.sent, counted, transport.elsewhere};
    };
    return by_ranks(ranks, rank);
  }

  // Throws Wrong where a reduce-scatter has changed its input, or has written more than a piece.
  void expect_kept(const std::string& where, int rank, const Result& result) const {
    if (result.room.empty() || result.room.back() != kUntouched)
      throw Failure{"values", where + ": more than a piece was written to `out`; expected this rank's piece alone",
                    "`out` has room for one piece: the sum that travels needs memory of its own"};
    if (result.whole != of(rank, {0, count}))
      throw Failure{"values", where + ": the array at `in` has changed; expected it as it was",
                    "a sum is added to `in`, or a message is received there: this needs memory of its own"};
  }
  // Guesses at the sum of all ranks' piece `r`, on rank r.
  std::vector<Guess> guesses_of_sum(int r) const {
    std::vector<double> sum(range(r).size());
    for (int q = 0; q < ranks; ++q) sum = sum + of_piece(q, r);
    std::vector<Guess> out{{"nothing was written there", std::vector<double>(sum.size(), kUntouched)},
                           {"it is this rank's own piece: nothing that came from others was added", of_piece(r, r)},
                           {"this rank's own piece is added once for each rank: what the others sent is not used",
                            of_piece(r, r) * ranks}};
    for (int q = 0; q < ranks; ++q) {
      const std::vector<double> theirs = of_piece(q, r);
      out.push_back(
          {fmt::format("it is the piece of rank {} alone: the message replaced the sum, and was not added to it", q),
           theirs});
      out.push_back({fmt::format("the numbers of rank {} are missing in the sum", q), sum + theirs * -1});
      out.push_back({fmt::format("the numbers of rank {} are in the sum twice", q), sum + theirs});
    }
    for (int p = 0; p < ranks; ++p) {
      std::vector<double> other(range(p).size());
      for (int q = 0; q < ranks; ++q) other = other + of_piece(q, p);
      out.push_back({fmt::format("it is the sum of piece {0}; rank {1} must end with piece {1}", p, r), other});
    }
    return out;
  }
  // Throws Wrong where a piece is not that of its rank.
  void expect_gathered(const std::string& where, const std::vector<double>& found) const {
    for (int p = 0; p < ranks; ++p) {
      const Range r = range(p);
      const auto begin = found.begin();
      std::vector<Guess> guesses{{"nothing was written there: a piece never arrived, or went to another place",
                                  std::vector<double>(static_cast<size_t>(r.size()), kUntouched)}};
      for (int q = 0; q < ranks; ++q)
        guesses.push_back(
            {fmt::format("it is the piece of rank {}: pieces are at the wrong places", q), of_piece(q, q)});
      guesses.push_back(
          {"a piece is sent from a wrong place, or written to one: piece p begins range(p).begin * element "
           "bytes behind the beginning",
           {begin + r.begin, begin + r.end}});
      expect_values(fmt::format("{}, the piece of rank {}", where, p), {begin + r.begin, begin + r.end}, of_piece(p, p),
                    guesses, ranks);
    }
  }
};

// The sum of piece p, each addition rounded: ranks from `first` up, and around to the one before it.
std::vector<double> sum_from(const Inputs& in, int p, int first) {
  std::vector<double> out;
  for (int64_t i = in.range(p).begin; i < in.range(p).end; ++i) {
    float sum = 0;
    for (int s = 0; s < in.ranks; ++s) sum += static_cast<float>(in.at((first + s) % in.ranks, i));
    out.push_back(sum);
  }
  return out;
}

// An algorithm as it is graded: how it runs, and what each rank must have.
struct Graded {
  int64_t (*algorithm)(Transport& t, const Call& call);
  int (*first)(int piece);  // the rank whose numbers a piece's sum begins with, modulo the ranks
  std::vector<Guess> (*guesses)(const Inputs& in, int rank);
  void (*expect_bytes)(Grading& grading, const std::string& where, const Inputs& in, Op op, int rank, int64_t found);
  const char* halves = nullptr;  // the cause where each half of an all-reduce is right alone
  bool to_the_next = false;      // messages go to no other rank
};

void check(Grading& grading, const Inputs& in, Op op, const Graded& graded,
           const std::vector<Inputs::Result>& results) {
  for (int r = 0; r < in.ranks; ++r) {
    const Inputs::Result& found = results[r];
    const std::string where = in.where(op, r);
    if (std::ssize(found.values) != (op == Op::reduce_scatter ? in.range(r).size() : in.count)) throw NoAnswer();
    if (op == Op::all_gather) in.expect_gathered(where, found.values);
    if (op == Op::reduce_scatter) {
      in.expect_kept(where, r, found);
      expect_values(where, found.values, sum_from(in, r, graded.first(r)), graded.guesses(in, r), in.ranks);
    }
    if (op == Op::all_reduce) {
      std::vector<double> all;
      for (int p = 0; p < in.ranks; ++p)
        for (const double x : sum_from(in, p, graded.first(p))) all.push_back(x);
      std::vector<Guess> guesses;
      if (graded.halves) guesses.push_back({graded.halves, found.values});
      expect_values(where, found.values, all, guesses, in.ranks);
    }
    for (const int64_t sent : {found.sent, found.counted}) graded.expect_bytes(grading, where, in, op, r, sent);
    if (graded.to_the_next)
      expect_bytes(grading, where + ", to other ranks than the next one", found.elsewhere, 0, "none: a ring");
  }
}

// Checks arrays over 2, 3 and 5 ranks, of 1 to 1003 numbers: of whole ones first, whose sums have one value in any
// order.
void check_all(Grading& grading, std::initializer_list<Op> ops, const Graded& graded) {
  for (const bool whole_numbers : {true, false})
    for (const int n : {3, 2, 5})
      for (const int64_t count : {int64_t{8 * n}, int64_t{n}, int64_t{7}, int64_t{1}, int64_t{1003}})
        for (const Op op : ops) {
          const Inputs in{n, count, whole_numbers, grading.seed()};
          const auto results = grading.ask(n, [&] { return in.run(op, graded.algorithm); });
          grading.check([&] { check(grading, in, op, graded, results); });
        }
}

// The direct exchange over messages: values, order of sums, bytes.

void expect_direct_bytes(Grading& grading, const std::string& where, const Inputs& in, Op op, int rank, int64_t found) {
  const int64_t all = in.count * kFloat, own = in.range(rank).size() * kFloat, n = in.ranks;
  const bool gathers = op == Op::all_gather;
  expect_bytes(
      grading, where, found, sent_directly({.op = op, .count = in.count}, in.ranks, rank),
      gathers ? "its piece to each of the others" : "of each other rank's piece once, S less its own",
      {{"the whole array goes to every other rank; each needs its own piece alone", (n - 1) * all},
       {"a rank sends to itself too", gathers ? n * own : all},
       {"the number of bytes is not counted: send() of this struct counts, and that of `memory` does not", 0}});
}

constexpr Graded kMessages{direct_by_messages, [](int) { return 0; },
                           [](const Inputs& in, int rank) { return in.guesses_of_sum(rank); }, expect_direct_bytes};

}  // namespace

PassedChecks grade_messages(Grading& grading) {
  check_all(grading, {Op::reduce_scatter, Op::all_gather, Op::all_reduce}, kMessages);
  return {"sums over 2, 3 and 5 ranks of 1 to 1003 numbers, pieces even and uneven, some of them empty",
          "order: ranks are added from 0 up, to the bit", "bytes: each half sends (n - 1) / n of the array"};
}

// The ring, half by half: values, order of sums, bytes.

namespace {

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
    for (int q = 0; q < n; ++q) sums[q] = sums[q] + of(q, way.piece(q, s));
  }
  return sums[r];
}

// The sum of piece r whose first numbers, or those that are added to them, or all, begin `begin` bytes behind the
// beginning of their array.
std::vector<double> from_byte(const Inputs& in, int r, bool first, bool others) {
  const Range own = in.range(r);
  std::vector<double> sum(own.size());
  for (int q = 0; q < in.ranks; ++q) {
    const std::vector<double> all = in.of(q, {0, in.count});
    const std::vector<float> floats(all.begin(), all.end());
    for (int64_t i = 0; i < own.size(); ++i) {
      float x = floats[own.begin + i];
      if (q == (r + 1) % in.ranks ? first : others)
        std::memcpy(&x, reinterpret_cast<const std::byte*>(floats.data()) + own.begin + i * kFloat, sizeof(x));
      sum[i] += x;
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

void expect_ring_bytes(Grading& grading, const std::string& where, const Inputs& in, Op op, int rank, int64_t found) {
  if (op == Op::all_reduce) return;  // its halves have been counted
  const bool gathers = op == Op::all_gather;
  const int64_t all = in.count * kFloat, kept = in.range(gathers ? (rank + 1) % in.ranks : rank).size() * kFloat;
  std::vector<BytesGuess> guesses{
      {"the whole array is sent in each step; a step moves one piece", (in.ranks - 1) * all},
      {"there is a step too many: n - 1 of them are enough", all}};
  if (gathers) std::swap(guesses[0], guesses[1]);
  expect_bytes(
      grading, where, found, all - kept,
      gathers ? "all of the array except its right neighbour's piece" : "all of the array except its own piece",
      guesses);
}

constexpr Graded kRing{
    ring,
    [](int piece) { return piece + 1; },
    guesses,
    expect_ring_bytes,
    "each half is right alone. In an all-reduce `in` and `out` lie in the same array, so the sum that "
    "travels needs memory of its own",
    true};

}  // namespace

PassedChecks grade_ring(Grading& grading) {
  for (const Op op : {Op::reduce_scatter, Op::all_gather, Op::all_reduce}) check_all(grading, {op}, kRing);
  return {"sums over 2, 3 and 5 ranks of 1 to 1003 numbers, pieces even and uneven, some of them empty",
          "order: piece c is added from rank c + 1 around to rank c, to the bit",
          "bytes: each rank sends all but one piece in each half, 2 (n - 1) / n of the array"};
}

}  // namespace tessera::lab
