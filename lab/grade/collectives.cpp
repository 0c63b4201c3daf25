// Graders of collectives: inputs of all ranks, and results of typical mistakes.
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <functional>
#include <initializer_list>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <tuple>
#include <vector>

#include "lab/compare.h"
#include "tensor/random.h"
#include "verify/reference.h"

namespace tessera::lab {
namespace {

constexpr double kUntouched = -1000;
constexpr int64_t kFloat = 4;  // bytes

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
  std::unique_ptr<Transport> split(int, int) override {
    throw Error("split() is not supported: its messages would not be counted");
  }
  void fail(const std::string& cause) override { through_.fail(cause); }

  int64_t sent = 0, elsewhere = 0;  // elsewhere: not to the next rank

 private:
  Transport& through_;
};

// Input arrays of `count` float32 values: small integers, or arbitrary.
struct Inputs {
  int ranks = 2;
  int64_t count = 1;
  bool integers = true;
  uint64_t seed = 0;

  double at(int rank, int64_t i) const {
    const Philox random(seed + static_cast<uint64_t>(rank));
    if (integers) return static_cast<double>(random.below(60, static_cast<uint64_t>(i))) + 1;
    return static_cast<float>(random.uniform(static_cast<uint64_t>(i)) - 0.5);
  }
  Range range(int r) const { return chunk_range(count, ranks, r); }
  std::vector<double> of(int rank, Range r) const {
    std::vector<double> out;
    for (int64_t i = r.begin; i < r.end; ++i) out.push_back(at(rank, i));
    return out;
  }
  std::vector<double> of_chunk(int rank, int p) const { return of(rank, range(p)); }
  Tensor tensor(int rank, const ArenaPtr& arena) const {
    const std::vector<double> values = of(rank, {0, count});
    return Tensor::of<float>(std::vector<float>(values.begin(), values.end()), {count}, arena);
  }
  std::string where(Op op, int rank) const {
    const char* operation = op == Op::all_gather   ? "all-gather"
                            : op == Op::all_reduce ? "all-reduce"
                                                   : "reduce-scatter";
    return fmt::format("{} of {} element{} on {} ranks, rank {}", operation, count, count == 1 ? "" : "s", ranks, rank);
  }

  struct Result {
    std::vector<double> values, full, buffer;  // result, input array, buffer of one chunk and one element
    int64_t sent = 0, counted = 0;             // bytes sent, and as counted by the learner's code
    int64_t elsewhere = 0;                     // bytes not sent to the next rank
    auto fields() { return std::tie(values, full, buffer, sent, counted, elsewhere); }
  };
  std::vector<Result> run(Op op, int64_t (*algorithm)(Transport& t, const Call& call)) const {
    const auto rank = [&](Communicator& world) {
      const ArenaPtr arena = make_arena();
      Tensor full = tensor(world.rank(), arena), in = full;
      const Range own = range(world.rank());
      Tensor buffer = Tensor::empty({own.size() + 1}, DType::float32, arena);  // chunk sizes differ by at most one
      buffer.fill(kUntouched);
      if (op == Op::all_gather) {
        in = full.narrow(0, own.begin, own.size()).clone();
        full.fill(kUntouched);
      }
      const Tensor out = op == Op::reduce_scatter ? buffer.narrow(0, 0, own.size()) : full;
      Counting transport(world.transport());
      const int64_t counted =
          algorithm(transport, {.op = op, .count = count, .in = in.address(), .out = out.address()});
      return Result{to_doubles(out), to_doubles(full), to_doubles(buffer),
                    transport.sent,  counted,          transport.elsewhere};
    };
    return by_ranks(ranks, rank);
  }

  // Throws Failure if a reduce-scatter modified its input or wrote more than one chunk.
  void expect_unchanged(const std::string& where, int rank, const Result& result) const {
    if (result.buffer.empty() || result.buffer.back() != kUntouched)
      throw Failure{"values", where + ": more than one chunk was written to `out`; expected only this rank's chunk",
                    "`out` has the size of one chunk: the partial sum needs a separate buffer"};
    if (result.full != of(rank, {0, count}))
      throw Failure{"values", where + ": the array `in` was modified; expected it unchanged",
                    "a sum or message is written to `in`: use a separate buffer"};
  }
  std::vector<Guess> guesses_of_sum(int r) const {
    std::vector<double> sum(range(r).size());
    for (int q = 0; q < ranks; ++q) sum = sum + of_chunk(q, r);
    std::vector<Guess> out{
        {"nothing was written", std::vector<double>(sum.size(), kUntouched)},
        {"this rank's own chunk: no received values were added", of_chunk(r, r)},
        {"this rank's own chunk is added once per rank: the received values are not used", of_chunk(r, r) * ranks}};
    for (int q = 0; q < ranks; ++q) {
      const std::vector<double> theirs = of_chunk(q, r);
      out.push_back(
          {fmt::format("only the chunk of rank {}: the message replaced the sum instead of being added", q), theirs});
      out.push_back({fmt::format("the values of rank {} are missing in the sum", q), sum + theirs * -1});
      out.push_back({fmt::format("the values of rank {} are added twice", q), sum + theirs});
    }
    for (int p = 0; p < ranks; ++p) {
      std::vector<double> other(range(p).size());
      for (int q = 0; q < ranks; ++q) other = other + of_chunk(q, p);
      out.push_back({fmt::format("the sum of chunk {0}; rank {1} must end with chunk {1}", p, r), other});
    }
    return out;
  }
  void expect_gathered(const std::string& where, const std::vector<double>& found) const {
    for (int p = 0; p < ranks; ++p) {
      const Range r = range(p);
      const auto begin = found.begin();
      std::vector<Guess> guesses{{"nothing was written: a chunk was not received, or was written elsewhere",
                                  std::vector<double>(static_cast<size_t>(r.size()), kUntouched)}};
      for (int q = 0; q < ranks; ++q)
        guesses.push_back({fmt::format("the chunk of rank {}: chunks are at the wrong offsets", q), of_chunk(q, q)});
      guesses.push_back(
          {"a chunk is sent from or written to a wrong offset: chunk p starts at byte range(p).begin * element",
           {begin + r.begin, begin + r.end}});
      expect_values(fmt::format("{}, the chunk of rank {}", where, p), {begin + r.begin, begin + r.end}, of_chunk(p, p),
                    guesses, ranks);
    }
  }
};

// The oracle's sum.
std::vector<double> expected_sum(const Inputs& in, Algorithm order) {
  const ArenaPtr arena = make_arena();
  std::vector<Tensor> ranks;
  for (int r = 0; r < in.ranks; ++r) ranks.push_back(in.tensor(r, arena));
  return to_doubles(sum_over(ranks, {{{0, in.count}, in.count}}, order));
}

struct Graded {
  int64_t (*algorithm)(Transport& t, const Call& call);
  Algorithm order;  // of sums
  std::vector<Guess> (*guesses)(const Inputs& in, int rank);
  void (*expect_bytes)(Grading& grading, const std::string& where, const Inputs& in, Op op, int rank, int64_t found);
  const char* halves = nullptr;  // cause if each half of an all-reduce is correct separately
  bool to_the_next = false;      // requires messages only to the next rank
};

void check(Grading& grading, const Inputs& in, Op op, const Graded& graded,
           const std::vector<Inputs::Result>& results) {
  const std::vector<double> sum = expected_sum(in, graded.order);
  for (int r = 0; r < in.ranks; ++r) {
    const Inputs::Result& found = results[r];
    const std::string where = in.where(op, r);
    if (std::ssize(found.values) != (op == Op::reduce_scatter ? in.range(r).size() : in.count)) throw NoAnswer();
    if (op == Op::all_gather) in.expect_gathered(where, found.values);
    if (op == Op::reduce_scatter) {
      in.expect_unchanged(where, r, found);
      const Range own = in.range(r);
      expect_values(where, found.values, {sum.begin() + own.begin, sum.begin() + own.end}, graded.guesses(in, r),
                    in.ranks);
    }
    if (op == Op::all_reduce) {
      std::vector<Guess> guesses;
      if (graded.halves) guesses.push_back({graded.halves, found.values});
      expect_values(where, found.values, sum, guesses, in.ranks);
    }
    for (const int64_t sent : {found.sent, found.counted}) graded.expect_bytes(grading, where, in, op, r, sent);
    if (graded.to_the_next)
      expect_bytes(grading, where + ", to ranks other than the next one", found.elsewhere, 0,
                   "none: a ring sends only to the next rank");
  }
}

// Checks arrays of 1 to 1003 elements on 2, 3 and 5 ranks; integers first, whose sums are exact in any order.
void check_all(Grading& grading, std::initializer_list<Op> ops, const Graded& graded) {
  for (const bool integers : {true, false})
    for (const int n : {3, 2, 5})
      for (const int64_t count : {int64_t{8 * n}, int64_t{n}, int64_t{7}, int64_t{1}, int64_t{1003}})
        for (const Op op : ops) {
          const Inputs in{n, count, integers, grading.seed()};
          const auto results = grading.ask(n, [&] { return in.run(op, graded.algorithm); });
          grading.check([&] { check(grading, in, op, graded, results); });
        }
}

void expect_direct_bytes(Grading& grading, const std::string& where, const Inputs& in, Op op, int rank, int64_t found) {
  const int64_t all = in.count * kFloat, own = in.range(rank).size() * kFloat, n = in.ranks;
  const bool gathers = op == Op::all_gather;
  expect_bytes(grading, where, found, sent_directly({.op = op, .count = in.count}, in.ranks, rank),
               gathers ? "its chunk to every other rank" : "one chunk to every other rank, S minus its own",
               {{"the full array is sent to every other rank; each needs only its own chunk", (n - 1) * all},
                {"a rank also sends to itself", gathers ? n * own : all},
                {"the bytes are not counted: send() of this struct counts them, send() of `memory` does not", 0}});
}

constexpr Graded kMessages{direct_by_messages, Algorithm::direct,
                           [](const Inputs& in, int rank) { return in.guesses_of_sum(rank); }, expect_direct_bytes};

}  // namespace

PassedChecks grade_messages(Grading& grading) {
  check_all(grading, {Op::reduce_scatter, Op::all_gather, Op::all_reduce}, kMessages);
  return {"sums over 2, 3 and 5 ranks of 1 to 1003 elements, with even, uneven and empty chunks",
          "order: values are added in ascending order of ranks, bitwise identical",
          "bytes: each half sends (n - 1) / n of the array"};
}

namespace {

// A variant of reduce-scatter: copies chunk rank + first, and in step s adds `chunk(rank, s)` to the received sum.
struct Variant {
  const char* cause;
  int first = -1, steps = -1;  // steps < 0: relative to n
  std::function<int(int rank, int s)> chunk = [](int rank, int s) { return rank - s - 2; };
};

const std::vector<Variant>& typical_mistakes() {
  static const std::vector<Variant> all{
      {"a step is missing: the values of the last rank are not added; n - 1 steps are required", -1, -2},
      {"one step too many: n - 1 steps are sufficient", -1, 0},
      {"every step adds the same chunk: `s` is missing in the chunk index", -1, -1,
       [](int rank, int) { return rank - 2; }},
      {"the chunk index increases with s; expected rank - s - 2", 1, -1, [](int rank, int s) { return rank + s + 2; }},
      {"the chunk index increases with s; expected rank - s - 2", -1, -1, [](int rank, int s) { return rank + s - 2; }},
      {"the first chunk is rank + 1; expected rank - 1", 1},
      {"the first chunk is `rank`; expected rank - 1", 0},
      {"the first chunk is `rank`, and all others are off by one; expected rank - 1 first", 0, -1,
       [](int rank, int s) { return rank - s - 1; }}};
  return all;
}

// Result of a variant on each rank, for equal chunks.
std::vector<double> variant_sums(const Inputs& in, const Variant& variant, int r) {
  const int n = in.ranks;
  const auto of = [&](int rank, int p) { return in.of_chunk(rank, ((p % n) + n) % n); };
  std::vector<std::vector<double>> sums;
  for (int q = 0; q < n; ++q) sums.push_back(of(q, q + variant.first));
  for (int s = 0; s < n + variant.steps; ++s) {
    std::rotate(sums.begin(), sums.end() - 1, sums.end());  // to the next rank
    for (int q = 0; q < n; ++q) sums[q] = sums[q] + of(q, variant.chunk(q, s));
  }
  return sums[r];
}

// The sum of chunk r if the first values, the added ones or both are read at byte offset `begin`.
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
    for (const Variant& variant : typical_mistakes()) out.push_back({variant.cause, variant_sums(in, variant, r)});
  for (Guess& guess : in.guesses_of_sum(r)) out.push_back(std::move(guess));
  for (const auto& [first, others] : {std::pair(true, true), {true, false}, {false, true}})
    out.push_back(
        {"offsets are in bytes: chunk p starts at in + range(p).begin * element", from_byte(in, r, first, others)});
  return out;
}

void expect_ring_bytes(Grading& grading, const std::string& where, const Inputs& in, Op op, int rank, int64_t found) {
  if (op == Op::all_reduce) return;  // both halves are checked separately
  const bool gathers = op == Op::all_gather;
  const int64_t all = in.count * kFloat, local = in.range(gathers ? (rank + 1) % in.ranks : rank).size() * kFloat;
  std::vector<BytesGuess> guesses{{"each step sends the full array instead of one chunk", (in.ranks - 1) * all},
                                  {"one step too many: n - 1 steps are sufficient", all}};
  if (gathers) std::swap(guesses[0], guesses[1]);
  expect_bytes(grading, where, found, all - local,
               gathers ? "the array except the chunk of the next rank" : "the array except its own chunk", guesses);
}

constexpr Graded kRing{
    ring,
    Algorithm::ring,
    guesses,
    expect_ring_bytes,
    "each half is correct separately; in an all-reduce `in` and `out` alias the same array, so the partial "
    "sum needs a separate buffer",
    true};

}  // namespace

PassedChecks grade_ring(Grading& grading) {
  for (const Op op : {Op::reduce_scatter, Op::all_gather, Op::all_reduce}) check_all(grading, {op}, kRing);
  return {"sums over 2, 3 and 5 ranks of 1 to 1003 elements, with even, uneven and empty chunks",
          "order: chunk c is added cyclically from rank c + 1 to rank c, bitwise identical",
          "bytes: each rank sends all but one chunk per half, 2 (n - 1) / n of the array"};
}

}  // namespace tessera::lab
