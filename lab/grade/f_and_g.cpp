// Changes of placement and their gradients: what each rank has, what it sends, and that gradients are what the algebra
// says they are.
#include <fmt/format.h>

#include <array>

#include "autograd/ops.h"
#include "lab/compare.h"
#include "lab/exercise.h"
#include "parallel/placement.h"
#include "tensor/random.h"

namespace tessera::lab {
namespace {

constexpr int64_t kRows = 4, kColumns = 12;  // numbers that 2 and 3 ranks divide

std::vector<double> drawn(uint64_t name, int64_t count) {
  std::vector<double> out;
  for (int64_t i = 0; i < count; ++i) out.push_back(Philox(name).normal(static_cast<uint64_t>(i)));
  return out;
}

// The columns of a whole matrix that a rank has.
std::vector<double> columns(const std::vector<double>& whole, int n, int rank) {
  std::vector<double> out;
  const Range own = piece(kColumns, n, rank);
  for (int64_t row = 0; row < kRows; ++row)
    for (int64_t c = own.begin; c < own.end; ++c) out.push_back(whole[static_cast<size_t>(row * kColumns + c)]);
  return out;
}

// Parts of one matrix that the ranks of an axis have, in a placement: of P, parts whose sum it is.
struct Spread {
  int n;
  std::vector<std::vector<double>> rank;

  Spread(int ranks, const Placement& p, uint64_t name) : n(ranks) {
    const std::vector<double> whole = drawn(name, kRows * kColumns);
    for (int r = 0; r < n; ++r)
      rank.push_back(p == P ? drawn(name + 100 + static_cast<uint64_t>(r), kRows * kColumns)
                     : p.kind == Placement::Kind::sharded ? columns(whole, n, r)
                                                          : whole);
  }
  std::vector<double> sum() const {
    std::vector<double> out = rank[0];
    for (int r = 1; r < n; ++r) out = out + rank[static_cast<size_t>(r)];
    return out;
  }
  // The whole matrix of pieces.
  std::vector<double> joined() const {
    std::vector<double> out(static_cast<size_t>(kRows * kColumns));
    for (int r = 0; r < n; ++r) {
      const Range own = piece(kColumns, n, r);
      for (int64_t i = 0; i < kRows * own.size(); ++i)
        out[static_cast<size_t>(i / own.size() * kColumns + own.begin + i % own.size())] =
            rank[static_cast<size_t>(r)][static_cast<size_t>(i)];
    }
    return out;
  }
};

// The value that rank r has after a change of placement. Of a change to P only what comes from whole values.
std::vector<double> moved(const Spread& x, const Placement& from, const Placement& to, int r) {
  const bool cut = to.kind == Placement::Kind::sharded, was_cut = from.kind == Placement::Kind::sharded;
  if (was_cut && cut) return x.rank[static_cast<size_t>(r)];
  const std::vector<double> whole = from == P ? x.sum() : was_cut ? x.joined() : x.rank[0];
  if (from == P && to == P) return x.rank[static_cast<size_t>(r)];
  if (to == P && r > 0) return std::vector<double>(whole.size());
  return cut ? columns(whole, x.n, r) : whole;
}

struct ProductSeen {
  std::vector<double> value, gradient;
  int64_t sent_forward = 0, sent_backward = 0;
};

int64_t sent(const Communicator& world) {
  int64_t all = 0;
  for (const OpCount& c : world.counts()) all += c.sent;
  return all;
}

struct Case {
  const char* name;
  Placement from, to;
  std::string backward;  // in words
};

void check_case(const Case& c, int n) {
  const Spread x(n, c.from, 1), dy(n, dual(c.to), 2);
  std::vector<ProductSeen> ranks(static_cast<size_t>(n));
  const auto shape_of = [&](const std::vector<double>& v) { return Shape{kRows, std::ssize(v) / kRows}; };
  on_ranks(n, [&](Communicator& world) {
    const ArenaPtr arena = make_arena();
    ProductSeen& seen = ranks[static_cast<size_t>(world.rank())];
    const auto& mine = x.rank[static_cast<size_t>(world.rank())];
    const auto& seed = dy.rank[static_cast<size_t>(world.rank())];
    const Var leaf(Tensor::of<double>(mine, shape_of(mine), arena), true);
    const Var y = redistribute(scale(leaf, 1), world, c.from, c.to);
    seen.sent_forward = sent(world);
    seen.value = numbers(y.value());
    backward(y, {.seed = Tensor::of<double>(seed, shape_of(seed), arena)});
    seen.sent_backward = sent(world) - seen.sent_forward;
    seen.gradient = gradient_of(leaf);
  });
  const int64_t all = kRows * kColumns * 8;
  for (int r = n; r-- > 0;) {  // rank 0 has the same after some changes of different kinds
    const ProductSeen& seen = ranks[static_cast<size_t>(r)];
    const std::string where = fmt::format("{} ({} -> {}) on {} ranks, rank {}", c.name, c.from.str(), c.to.str(), n, r);
    expect_values(where + ", forward", seen.value, moved(x, c.from, c.to, r),
                  {{"the value is the rank's own, unchanged: nothing was moved in the forward pass",
                    x.rank[static_cast<size_t>(r)]}},
                  n, 1e-12);
    const std::vector<double> expected = moved(dy, dual(c.to), dual(c.from), r);
    const std::string way = fmt::format("{} -> {}", dual(c.to).str(), dual(c.from).str());
    std::vector<Guess> guesses{
        {fmt::format("the gradient is the rank's own, unchanged; expected {}: {}", c.backward, way),
         dy.rank[static_cast<size_t>(r)]}};
    if (dual(c.to) != P)
      guesses.push_back({"the gradient is summed although every rank has the same one", expected * n});
    else if (dy.rank[0].size() == expected.size())
      guesses.push_back({fmt::format("the gradient is the sum over the ranks; expected {}", c.backward), dy.sum()});
    const auto goes = [&](const Placement& from, const Placement& to, const char* names) {
      if (from.kind == Placement::Kind::sharded ? dual(c.to) != from : dual(c.to).kind == Placement::Kind::sharded)
        return;
      guesses.push_back({fmt::format("the gradient goes {} -> {}, which is {}; expected {}: dual(to) -> dual(from), "
                                     "between the duals",
                                     from.str(), to.str(), names, way),
                         moved(dy, from, to, r)});
    };
    goes(dual(c.from), dual(c.to), "dual(from) -> dual(to)");
    goes(c.to, c.from, "to -> from");
    goes(c.from, c.to, "from -> to");
    expect_values(where + ", gradient", seen.gradient, expected, guesses, n, 1e-12);
    const auto bytes = [&](const Placement& from, const Placement& to) {
      if (from == P && to.kind != Placement::Kind::sharded) return 2 * all - 2 * all / n;
      const bool scatters = from == P,
                 gathers = from.kind == Placement::Kind::sharded && to.kind != Placement::Kind::sharded;
      return scatters || gathers ? all - all / n : 0;
    };
    expect_bytes(where + ", forward", seen.sent_forward, bytes(c.from, c.to), "one collective, or none");
    expect_bytes(where + ", backward", seen.sent_backward, bytes(dual(c.to), dual(c.from)),
                 fmt::format("what {} takes", way));
  }
}

}  // namespace

Held grade_f_and_g() {
  const std::array<Case, 4> cases{
      {{"g", P, I, "the gradient as it is: every rank has all of it"},
       {"f", I, R, "the sum of all ranks' gradients"},
       {"f of sequence parallelism", S(1), R, "the sum of all ranks' gradients, cut"},
       {"g of sequence parallelism", P, S(1), "all ranks' pieces of the gradient, put together"}}};
  for (const int n : {2, 3})
    for (const Case& c : cases) check_case(c, n);
  return {"f: forward as it is, backward an all-reduce; g: forward an all-reduce, backward as it is",
          "with sequence parallelism an all-gather and a reduce-scatter in their places",
          "on 2 and 3 ranks, values, gradients and bytes"};
}

}  // namespace tessera::lab
