// The walk of keys and values around the ring, beside plain attention in double over the whole sequence.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "autograd/ops.h"
#include "lab/compare.h"
#include "lab/exercise.h"
#include "parallel/context_parallel.h"
#include "tensor/random.h"

namespace tessera::lab {
namespace {

constexpr int64_t kHead = 4;  // numbers of a head; there is one head and one sequence

struct RingProblem {
  int ranks = 2;
  int64_t tokens = 8;
  Balance balance = Balance::zigzag;
  bool causal = true;

  std::vector<int64_t> positions(int rank) const { return context_positions(tokens, ranks, rank, balance); }
  // Number c of q, k or v (0, 1, 2) of a token.
  static double number(int64_t token, int which, int64_t c) {
    return Philox(3).normal(static_cast<uint64_t>((token * 3 + which) * kHead + c)) * (which == 0 ? 2 : 1);
  }
  std::string where(int rank) const {
    return fmt::format("{} tokens on {} ranks, {}{}, rank {}", tokens, ranks,
                       balance == Balance::zigzag ? "zig-zag" : "contiguous", causal ? ", causal" : "", rank);
  }
};

// Attention of one query to some keys, and the logarithm of its denominator.
struct Row {
  std::vector<double> out = std::vector<double>(kHead);
  double sum = 0;  // sum of exp(score)
};
template <class Sees>
Row attend(int64_t query, int64_t tokens, const Sees& sees) {
  Row row;
  for (int64_t key = 0; key < tokens; ++key) {
    if (!sees(key)) continue;
    double score = 0;
    for (int64_t c = 0; c < kHead; ++c) score += RingProblem::number(query, 0, c) * RingProblem::number(key, 1, c);
    const double weight = std::exp(score / std::sqrt(static_cast<double>(kHead)));
    row.sum += weight;
    for (int64_t c = 0; c < kHead; ++c) row.out[static_cast<size_t>(c)] += weight * RingProblem::number(key, 2, c);
  }
  for (double& x : row.out) x = row.sum > 0 ? x / row.sum : 0;
  return row;
}

// Outputs that rank r would have if queries were handled so: `of(query, rows by the rank that has the keys)`.
template <class Of>
std::vector<double> outputs(const RingProblem& p, int rank, const Of& of) {
  std::vector<int> holder(static_cast<size_t>(p.tokens));
  for (int r = 0; r < p.ranks; ++r)
    for (const int64_t t : p.positions(r)) holder[static_cast<size_t>(t)] = r;
  std::vector<double> out;
  for (const int64_t query : p.positions(rank)) {
    std::vector<Row> by_hop;
    for (int hop = 0; hop < p.ranks; ++hop)
      by_hop.push_back(attend(query, p.tokens, [&](int64_t key) {
        return holder[static_cast<size_t>(key)] == (rank + p.ranks - hop) % p.ranks && (!p.causal || key <= query);
      }));
    const std::vector<double> one = of(query, by_hop);
    out.insert(out.end(), one.begin(), one.end());
  }
  return out;
}

std::vector<double> expected(const RingProblem& p, int rank) {
  return outputs(p, rank, [&](int64_t query, const auto&) {
    return attend(query, p.tokens, [&](int64_t key) { return !p.causal || key <= query; }).out;
  });
}

std::vector<Guess> guesses(const RingProblem& p, int rank) {
  const auto parts = [&](const auto& f) { return outputs(p, rank, f); };
  const auto seen = [](const std::vector<Row>& rows) {
    return std::ranges::count_if(rows, [](const Row& r) { return r.sum > 0; });
  };
  return {
      {"it is the attention to this rank's own keys alone: the blocks of other ranks are not merged",
       parts([](int64_t, const auto& rows) { return rows[0].out; })},
      {"it is the attention to the keys of the last hop that the query sees: each block is written over the one "
       "before; "
       "merge them",
       parts([](int64_t, const auto& rows) {
         std::vector<double> last = rows[0].out;
         for (const Row& r : rows)
           if (r.sum > 0) last = r.out;
         return last;
       })},
      {"blocks are added as they are; each has its own denominator, so they must be weighted by exp(lse_i - lse)",
       parts([](int64_t, const auto& rows) {
         std::vector<double> all(kHead);
         for (const Row& r : rows) all = all + r.out;
         return all;
       })},
      {"blocks are averaged; they must be weighted by exp(lse_i - lse)", parts([&](int64_t, const auto& rows) {
         std::vector<double> all(kHead);
         for (const Row& r : rows) all = all + r.out;
         return all * (1.0 / static_cast<double>(std::max<int64_t>(1, seen(rows))));
       })},
      {"the block of the last hop is missing: there are as many hops as ranks, the first with the rank's own keys",
       parts([&](int64_t, const auto& rows) {
         double sum = 0;
         std::vector<double> all(kHead);
         for (size_t hop = 0; hop + 1 < rows.size(); ++hop) {
           sum += rows[hop].sum;
           all = all + rows[hop].out * rows[hop].sum;
         }
         return sum > 0 ? all * (1 / sum) : all;
       })},
      {"queries see keys that come after them: the causal mask counts positions in the sequence, and tiles(hop) says "
       "which tokens see which",
       parts([&](int64_t query, const auto&) { return attend(query, p.tokens, [](int64_t) { return true; }).out; })},
  };
}

struct Seen {
  std::vector<double> out, gradient;
  int64_t sent = 0, messages = 0;
};

Tensor packed(const std::vector<int64_t>& positions, const ArenaPtr& arena) {
  std::vector<double> all;
  for (const int64_t t : positions)
    for (int which = 0; which < 3; ++which)
      for (int64_t c = 0; c < kHead; ++c) all.push_back(RingProblem::number(t, which, c));
  return Tensor::of<double>(all, {1, std::ssize(positions), 3 * kHead}, arena);
}

// The gradient of the sum of all outputs, on one rank.
std::vector<double> gradient_alone(const RingProblem& p) {
  std::vector<double> out;
  on_ranks(1, [&](Communicator&) {
    const ArenaPtr arena = make_arena();
    std::vector<int64_t> all;
    for (int64_t t = 0; t < p.tokens; ++t) all.push_back(t);
    const Var qkv(packed(all, arena), true);
    const Var y = packed_attention(qkv, {.query = 1, .key = 1}, {.causal = p.causal});
    Tensor seed = y.value().make(y.shape());
    seed.fill(1);
    backward(y, {.seed = seed});
    out = numbers(qkv.grad());
  });
  return out;
}

void check_problem(const RingProblem& p) {
  std::vector<Seen> ranks(static_cast<size_t>(p.ranks));
  on_ranks(p.ranks, [&](Communicator& world) {
    const ArenaPtr arena = make_arena();
    const Var qkv(packed(p.positions(world.rank()), arena), true);
    const Var y = ring_attention(qkv, {.query = 1, .key = 1}, {.causal = p.causal}, world, p.balance);
    Seen& seen = ranks[static_cast<size_t>(world.rank())];
    const OpCount sends = world.counts()[static_cast<size_t>(Op::send)];
    seen.sent = sends.sent;
    seen.messages = sends.calls;
    seen.out = numbers(y.value());
    Tensor seed = y.value().make(y.shape());
    seed.fill(1);
    backward(y, {.seed = seed});
    seen.gradient = numbers(qkv.grad());
  });
  const std::vector<double> gradient = gradient_alone(p);
  const int64_t block = 2 * p.tokens / p.ranks * kHead * 8;
  for (int r = 0; r < p.ranks; ++r) {
    const Seen& seen = ranks[static_cast<size_t>(r)];
    expect_values(p.where(r), seen.out, expected(p, r), guesses(p, r), 1, 1e-10);
    expect_bytes(p.where(r), seen.sent, (p.ranks - 1) * block, "n - 1 blocks of its keys and values",
                 {{"there is a message too many: after the last hop nothing needs to travel", p.ranks * block}});
    std::vector<double> own;
    for (const int64_t t : p.positions(r))
      own.insert(own.end(), gradient.begin() + t * 3 * kHead, gradient.begin() + (t + 1) * 3 * kHead);
    expect_values(p.where(r) + ": gradient of q, k, v", seen.gradient, own, {}, 1, 1e-10);
  }
}

}  // namespace

Held grade_ring_attention() {
  for (const bool causal : {false, true})
    for (const Balance balance : {Balance::contiguous, Balance::zigzag})
      for (const int n : {2, 3, 4}) check_problem({n, 4 * n, balance, causal});
  return {"outputs and gradients of plain attention on 2, 3 and 4 ranks, to 1e-10, with the causal mask and without",
          "zig-zag and contiguous chunks", "bytes: n - 1 blocks of keys and values from each rank"};
}

}  // namespace tessera::lab
