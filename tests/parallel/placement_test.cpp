// Placements: every conversion preserves the represented tensor, and its backward pass is its adjoint; traffic; sharded
// matmuls. Meshes: groups along axes, and invalid arguments.
#include "parallel/placement.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <numeric>
#include <string>
#include <vector>

#include "autograd/ops.h"
#include "parallel/comm/launch.h"
#include "parallel/mesh.h"
#include "tests/support/errors.h"
#include "tests/support/tensors.h"

namespace tessera {
namespace {

constexpr uint64_t kTogether = 1000;  // RNG stream shared by all ranks

Tensor random_tensor(const Shape& shape, const ArenaPtr& arena, uint64_t name, uint64_t of) {
  return test::normal(shape, DType::float64, name * (kTogether + 1) + of, "placement", arena);
}

double dot(const Tensor& a, const Tensor& b) {
  EXPECT_EQ(a.shape(), b.shape());
  const std::vector<double> x = a.to_vector<double>(), y = b.to_vector<double>();
  return std::inner_product(x.begin(), x.end(), y.begin(), 0.0);
}

// This rank's local tensor for a tensor of shape `full`: equal on all ranks in R and I, random on every rank in P.
Tensor placed(const Placement& p, const Shape& full, const Communicator& axis, const ArenaPtr& arena, uint64_t name) {
  if (p == P) return random_tensor(full, arena, name, static_cast<uint64_t>(axis.rank()));
  const Tensor all = random_tensor(full, arena, name, kTogether);
  if (p.kind != Placement::Kind::sharded) return all;
  const Range own = chunk_range(full[p.dim], axis.size(), axis.rank());
  return all.narrow(p.dim, own.begin, own.size()).clone();
}

// The represented tensor, as created by placed().
Tensor represented(const Placement& p, const Shape& full, const Communicator& axis, const ArenaPtr& arena,
                   uint64_t name) {
  if (!(p == P)) return random_tensor(full, arena, name, kTogether);
  Tensor sum = random_tensor(full, arena, name, 0);
  for (int r = 1; r < axis.size(); ++r) {
    const Tensor one = random_tensor(full, arena, name, static_cast<uint64_t>(r));
    for (int64_t i = 0; i < sum.numel(); ++i) sum.data<double>()[i] += one.data<double>()[i];
  }
  return sum;
}

// <value, gradient> for a value in p and its gradient in dual(p), summed over ranks, except in I, where each rank has
// the full value and gradient.
double paired(const Placement& p, const Tensor& value, const Tensor& gradient, Communicator& axis) {
  const double own = dot(value, gradient);
  return p == I ? own : axis.sum(own);
}

void expect_near(const Tensor& a, const Tensor& b, double tolerance, const std::string& what) {
  ASSERT_EQ(a.shape(), b.shape()) << what;
  const std::vector<double> x = a.to_vector<double>(), y = b.to_vector<double>();
  for (size_t i = 0; i < x.size(); ++i) ASSERT_NEAR(x[i], y[i], tolerance) << what << " at " << i;
}

// Checks that this rank's local result, in P summed over ranks, matches the original.
void expect_unchanged(const Placement& from, const Placement& to, const Tensor& got, const Shape& full,
                      Communicator& axis, uint64_t name, const std::string& what) {
  const ArenaPtr& arena = got.arena();
  Tensor expected = represented(from, full, axis, arena, name), sum = got.clone();
  if (to.kind == Placement::Kind::sharded) {
    const Range own = chunk_range(full[to.dim], axis.size(), axis.rank());
    expected = expected.narrow(to.dim, own.begin, own.size());
  }
  if (to == P) axis.all_reduce(sum);
  expect_near(sum, expected, 1e-13, what);
}

void check_conversion(Communicator& axis, const ArenaPtr& arena, Placement from, Placement to, const Shape& full,
                      uint64_t name) {
  const std::string what =
      fmt::format("{} -> {} of {} on {} of {}", from.str(), to.str(), full.str(), axis.rank(), axis.size());
  if (from.kind == Placement::Kind::sharded) from.full_size = full[from.dim];
  const Var x(placed(from, full, axis, arena, name), true);
  const Tensor before = x.value().clone();
  const Var y = redistribute(scale(x, 1), axis, from, to);
  expect_unchanged(from, to, y.value(), full, axis, name, what);
  // dual() determines the gradient's placement: for P it is R, so the gradient is equal on all ranks.
  const Tensor dy = placed(dual(to), full, axis, arena, name + 1);
  const double forward = paired(to, y.value(), dy, axis);
  backward(y, {.seed = dy.clone()});
  const double adjoint = paired(from, before, x.grad(), axis);
  EXPECT_NEAR(forward, adjoint, 1e-12 * (1 + std::abs(forward))) << what;
  if (dual(from) == R || dual(from) == I) {
    const Tensor mean = x.grad().clone();
    axis.all_reduce(mean);
    expect_near(scale(mean, 1.0 / axis.size()), x.grad(), 1e-13, what + ": the gradient is not the same everywhere");
  }
}

Placement random_placement(const Philox& random, uint64_t at, int kind, int rank) {
  if (kind < 2) return kind == 0 ? R : I;
  if (kind == 3) return P;
  return S(static_cast<int>(random.below(static_cast<uint64_t>(rank), at)));
}

TEST(Placement, BackwardOfEveryConversionIsItsAdjoint) {
  for (const int ranks : {1, 2, 3, 4})
    launch({.ranks = ranks, .threads_per_rank = 1, .timeout_s = 60}, [](Communicator& axis) {
      const Philox random = Philox::named(3, "shapes");
      const ArenaPtr arena = make_arena();
      uint64_t name = 0;
      for (int from = 0; from < 4; ++from)
        for (int to = 0; to < 4; ++to)
          for (int trial = 0; trial < 25; ++trial, name += 2) {
            const int rank = 1 + static_cast<int>(random.below(4, 10 * name));
            Shape full;
            for (int d = 0; d < rank; ++d)
              full.push_back(1 + static_cast<int64_t>(random.below(7, 10 * name + 1 + static_cast<uint64_t>(d))));
            check_conversion(axis, arena, random_placement(random, 10 * name + 6, from, rank),
                             random_placement(random, 10 * name + 7, to, rank), full, name);
          }
    });
}

TEST(Placement, EvenChunksRequireNoFullShape) {
  launch({.ranks = 3, .timeout_s = 20}, [](Communicator& axis) {
    const ArenaPtr arena = make_arena();
    const Shape full{2, 6, 3};
    const Tensor all = random_tensor(full, arena, 1, kTogether);
    const Tensor mine = placed(S(-2), full, axis, arena, 1);
    expect_near(redistribute(mine, axis, S(-2), R), all, 0, "S(-2) -> R");
    expect_near(redistribute(mine, axis, S(1), S(-1)), all.narrow(2, axis.rank(), 1), 0, "S(1) -> S(-1)");
  });
}

OpCounts sent_by(Communicator& axis, const Tensor& x, Placement from, Placement to) {
  axis.reset_counts();
  redistribute(x, axis, from, to);
  return axis.counts();
}

OpCounts only(Op op, int64_t sent) {
  OpCounts counts{};
  counts[static_cast<size_t>(op)] = {1, sent};
  return counts;
}

TEST(Placement, TrafficMatchesFormulas) {
  launch({.ranks = 4, .timeout_s = 20}, [](Communicator& axis) {
    const ArenaPtr arena = make_arena();
    const Tensor full = Tensor::zeros({8, 4}, DType::float32, arena);  // 128 bytes
    const Tensor rows = Tensor::zeros({2, 4}, DType::float32, arena),
                 columns = Tensor::zeros({8, 1}, DType::float32, arena);
    EXPECT_EQ(sent_by(axis, full, P, I), only(Op::all_reduce, 192));  // 2 (n - 1) / n
    EXPECT_EQ(sent_by(axis, full, P, R), only(Op::all_reduce, 192));
    EXPECT_EQ(sent_by(axis, full, P, S(0)), only(Op::reduce_scatter, 96));  // (n - 1) / n
    EXPECT_EQ(sent_by(axis, full, P, S(1)), only(Op::reduce_scatter, 96));
    EXPECT_EQ(sent_by(axis, rows, S(0), R), only(Op::all_gather, 96));
    EXPECT_EQ(sent_by(axis, columns, S(1), I), only(Op::all_gather, 96));
    EXPECT_EQ(sent_by(axis, rows, S(0), S(1)), only(Op::all_to_all, 24));  // (n - 1) / n of a rank's shard
    for (const Placement& from : {R, I})
      for (const Placement& to : {R, I, P, S(0), S(1)}) EXPECT_EQ(sent_by(axis, full, from, to), OpCounts{});
    EXPECT_EQ(sent_by(axis, rows, S(0), P), OpCounts{});
    // Six rows are split 1, 2, 1, 2: two rows of four elements to each of three.
    const Tensor own = Tensor::zeros({chunk_range(6, 4, axis.rank()).size(), 4}, DType::float32, arena);
    EXPECT_EQ(sent_by(axis, own, S(0, 6), R), only(Op::all_gather, 96));
  });
}

TEST(Placement, OneRankAxisSendsNothing) {
  launch({.ranks = 1}, [](Communicator& axis) {
    const Var x(random_tensor({3, 2}, make_arena(), 1, 0), true);
    for (const Placement& from : {R, I, P, S(0), S(1)})
      for (const Placement& to : {R, I, P, S(0), S(1)})
        EXPECT_EQ(redistribute(x, axis, from, to).value().raw(), x.value().raw());
  });
}

TEST(Placement, ReusesUniquelyOwnedTensors) {
  launch({.ranks = 2, .timeout_s = 20}, [](Communicator& axis) {
    const ArenaPtr arena = make_arena();
    Tensor x = random_tensor({4}, arena, 1, 0);
    const std::byte* const memory = x.raw();
    const Tensor held = x, copy = x.clone();
    EXPECT_NE(redistribute(x, axis, P, I).raw(), memory);
    expect_near(held, copy, 0, "a value with another owner");
    Tensor alone = random_tensor({4}, arena, 1, 0);
    const std::byte* const there = alone.raw();
    EXPECT_EQ(redistribute(std::move(alone), axis, P, I).raw(), there);
  });
}

std::string refusal(Communicator& axis, const Shape& shape, Placement from, Placement to) {
  return error_message([&] { redistribute(Tensor::zeros(shape, DType::float32, make_arena()), axis, from, to); });
}

TEST(Placement, RejectsInvalidConversions) {
  launch({.ranks = 2, .timeout_s = 20}, [](Communicator& axis) {
    const std::string of = " of float32 (2, 3): ", head = "[redistribute] world axis, ";
    EXPECT_EQ(refusal(axis, {2, 3}, S(2), R), head + "S(2) -> R" + of + "dim out of range");
    EXPECT_EQ(refusal(axis, {2, 3}, P, S(-3)), head + "P -> S(-3)" + of + "dim out of range");
    EXPECT_EQ(refusal(axis, {2, 3}, R, S(1, 4)), head + "R -> S(1)" + of + "dim 1 has 3; expected 4");
    const std::string rank = std::to_string(axis.rank());
    EXPECT_EQ(refusal(axis, {2, 3}, S(0, 6), I),
              head + "S(0) -> I" + of + "rank " + rank + " of 2 has 2 of 6 along dim 0; expected 3");
  });
}

// Two matmuls sharded only by placements, the first by columns and the second by rows (Shoeybi et al. 2019, section 3),
// with replicated or token-sharded activations between (Korthikanti et al. 2022): gradients match one rank.

constexpr int64_t kTokens = 7, kIn = 5, kHidden = 11, kOut = 6;

// y = gelu(x w1^T + b1) w2^T + b2, and the loss sum(y t).
struct Layers {
  Var x, w1, b1, w2, b2;
  Tensor t;
};

Layers full(const ArenaPtr& arena) {
  const auto normal = [&](const char* name, const Shape& shape) {
    return test::normal(shape, DType::float64, 11, name, arena);
  };
  const auto leaf = [&](const char* name, const Shape& shape) { return Var(normal(name, shape), true); };
  return {leaf("x", {kTokens, kIn}),   leaf("w1", {kHidden, kIn}), leaf("b1", {kHidden}),
          leaf("w2", {kOut, kHidden}), leaf("b2", {kOut}),         normal("t", {kTokens, kOut})};
}

Layers one_rank(const ArenaPtr& arena) {
  Layers l = full(arena);
  const Var y = linear(unary<Gelu>(linear(l.x, l.w1, l.b1)), l.w2, l.b2);
  backward(sum(y * Var(l.t)));
  return l;
}

Tensor cut(const Tensor& t, int dim, const Communicator& axis) {
  const Range own = chunk_range(t.dim(dim), axis.size(), axis.rank());
  return t.narrow(dim, own.begin, own.size()).contiguous();
}

// With `between` = S(0), rank r's loss is a partial sum, so it is a P, whose gradient is one on all ranks.
Layers on_ranks(Communicator& axis, Placement between, const ArenaPtr& arena) {
  Layers l = full(arena);
  l.w1 = Var(cut(l.w1.value(), 0, axis), true);
  l.b1 = Var(cut(l.b1.value(), 0, axis), true);
  l.w2 = Var(cut(l.w2.value(), 1, axis), true);
  if (between.kind == Placement::Kind::sharded) {
    l.x = Var(cut(l.x.value(), 0, axis), true);
    l.t = cut(l.t, 0, axis);
  }
  const Var h = unary<Gelu>(linear(redistribute(l.x, axis, between, R), l.w1, l.b1));
  const Var y =
      redistribute(linear(h, l.w2, Var()), axis, P, between) + redistribute(l.b2, axis, I, between == I ? I : R);
  backward(sum(y * Var(l.t)));
  return l;
}

TEST(TwoLayers, GradientsMatchOneRank) {
  for (const int ranks : {1, 2, 3, 4})
    launch({.ranks = ranks, .threads_per_rank = 1, .timeout_s = 20}, [](Communicator& axis) {
      const ArenaPtr arena = make_arena();
      const Layers one = one_rank(arena);
      for (const Placement& between : {I, S(0, kTokens)}) {
        axis.reset_counts();
        const Layers got = on_ranks(axis, between, arena);
        const auto expect = [&](const char* name, const Var& found, const Tensor& expected) {
          SCOPED_TRACE(between.str() + ", rank " + std::to_string(axis.rank()));
          ASSERT_EQ(found.shape(), expected.shape()) << name;
          // Without a floor, the distance between zeros is NaN.
          EXPECT_LE(test::distance(test::host_values(found.grad()), test::host_values(expected), 0), 1e-14) << name;
        };
        expect("x", got.x, between == I ? one.x.grad() : cut(one.x.grad(), 0, axis));
        expect("w1", got.w1, cut(one.w1.grad(), 0, axis));
        expect("b1", got.b1, cut(one.b1.grad(), 0, axis));
        expect("w2", got.w2, cut(one.w2.grad(), 1, axis));
        expect("b2", got.b2, one.b2.grad());
        const auto calls = [&](Op op) { return axis.counts()[static_cast<size_t>(op)].calls; };
        const int64_t parallel = axis.size() > 1 ? 1 : 0;
        const bool by_tokens = !(between == I);
        EXPECT_EQ(calls(Op::all_reduce), parallel * (by_tokens ? 1 : 2));  // b2, or y and the gradient of x
        EXPECT_EQ(calls(Op::all_gather), parallel * (by_tokens ? 2 : 0));
        EXPECT_EQ(calls(Op::reduce_scatter), parallel * (by_tokens ? 2 : 0));
      }
    });
}

// Meshes: groups along axes, and invalid arguments.

std::vector<int> members(const Communicator& group) {
  std::vector<int> ranks;
  for (int r = 0; r < group.size(); ++r) ranks.push_back(group.world_rank(r));
  return ranks;
}

// The error of creating or using the mesh.
std::string refusal(
    Communicator& world, const std::vector<MeshAxis>& axes, const std::function<void(Mesh&)>& use = [](Mesh&) {}) {
  return error_message([&] {
    Mesh mesh(world, axes);
    use(mesh);
  });
}

TEST(Mesh, LastAxisConnectsAdjacentRanks) {
  launch({.ranks = 8, .timeout_s = 20}, [](Communicator& world) {
    Mesh mesh(world, {{"pp", 2}, {"dp", 2}, {"tp", 2}});
    const int pp = world.rank() / 4, dp = world.rank() / 2 % 2, tp = world.rank() % 2;
    EXPECT_EQ(mesh.coordinate("pp"), pp);
    EXPECT_EQ(mesh.coordinate("dp"), dp);
    EXPECT_EQ(mesh.coordinate("tp"), tp);
    EXPECT_EQ(members(mesh["tp"]), std::vector<int>({4 * pp + 2 * dp, 4 * pp + 2 * dp + 1}));
    EXPECT_EQ(members(mesh["dp"]), std::vector<int>({4 * pp + tp, 4 * pp + 2 + tp}));
    EXPECT_EQ(members(mesh["pp"]), std::vector<int>({2 * dp + tp, 4 + 2 * dp + tp}));
    EXPECT_EQ(mesh["pp"].rank(), pp);
    EXPECT_EQ(mesh["dp"].axis(), "dp");
    EXPECT_EQ(members(mesh.flat({"pp", "dp"})), std::vector<int>({tp, 2 + tp, 4 + tp, 6 + tp}));
    EXPECT_EQ(members(mesh.flat({"dp", "pp"})), std::vector<int>({tp, 4 + tp, 2 + tp, 6 + tp}));
    EXPECT_EQ(mesh.flat({"pp", "dp", "tp"}).size(), 8);
    EXPECT_EQ(mesh.flat({"dp", "tp"}).axis(), "dp+tp");
    EXPECT_EQ(&mesh.flat({"dp", "tp"}), &mesh.flat({"dp", "tp"}));
    EXPECT_EQ(&mesh.flat({"dp"}), &mesh["dp"]);
    EXPECT_EQ(mesh.flat({"dp", "tp"}).sum(world.rank()), 16 * pp + 6);
  });
}

TEST(Mesh, SupportsUnevenSizes) {
  launch({.ranks = 6, .timeout_s = 20}, [](Communicator& world) {
    Mesh mesh(world, {{"a", 3}, {"none", 1}, {"b", 2}});
    for (int rank = 0; rank < 6; ++rank) EXPECT_EQ(mesh.rank_at(mesh.coordinates(rank)), rank);
    EXPECT_EQ(mesh.coordinates(5), std::vector<int>({2, 0, 1}));
    EXPECT_EQ(mesh["a"].sum(1), 3);
    EXPECT_EQ(mesh.size("b"), 2);
    EXPECT_EQ(mesh.describe(), "a 3 x none 1 x b 2");
  });
}

TEST(Mesh, OneRankAxisSendsNothing) {
  launch({.ranks = 2, .timeout_s = 20}, [](Communicator& world) {
    world.reset_counts();
    Mesh mesh(world, {{"dp", 1}, {"tp", 2}, {"cp", 1}});
    Communicator &one = mesh["dp"], &both = mesh.flat({"dp", "cp"});
    for (Communicator* c : {&one, &both, &mesh.flat({})}) {
      EXPECT_EQ(c->size(), 1);
      EXPECT_EQ(c->world_rank(0), world.rank());
      EXPECT_EQ(c->sum(3), 3);
      c->barrier();
      EXPECT_EQ(c->counts(), OpCounts{});
      EXPECT_EQ(c->kind(), "threads");
      EXPECT_EQ(c->split(0, 0, "part")->size(), 1);
    }
    EXPECT_EQ(members(mesh.flat({"dp", "tp"})), std::vector<int>({0, 1}));
  });
}

TEST(Mesh, RejectsInvalidAxes) {
  launch({.ranks = 4, .timeout_s = 20}, [](Communicator& world) {
    EXPECT_EQ(refusal(world, {{"dp", 2}, {"tp", 3}}), "[mesh] dp 2 x tp 3 has 6 ranks; the world has 4");
    EXPECT_EQ(refusal(world, {}), "[mesh] no axis has 1 ranks; the world has 4");
    EXPECT_EQ(refusal(world, {{"dp", 4}, {"tp", 0}}), "[mesh] axis tp has size 0; expected at least 1");
    EXPECT_EQ(refusal(world, {{"dp", 2}, {"dp", 2}}), "[mesh] two axes of dp 2 x dp 2 are named dp");
    EXPECT_EQ(refusal(world, {{"", 4}}), "[mesh] an axis of  4 has no name");
    EXPECT_TRUE(has(refusal(world, {{"a", 65536}, {"b", 65536}, {"c", 65536}}), "; the world has 4"));
    const auto refused = [&](const std::function<void(Mesh&)>& use) {
      return refusal(world, {{"dp", 2}, {"tp", 2}}, use);
    };
    const std::string tail = "; the mesh is dp 2 x tp 2";
    EXPECT_EQ(refused([](Mesh& m) { m["ep"]; }), "[mesh] unknown axis 'ep'" + tail);
    EXPECT_EQ(refused([](Mesh& m) { m.flat({"tp", "ep"}); }), "[mesh] unknown axis 'ep'" + tail);
    EXPECT_EQ(refused([](Mesh& m) { m.flat({"tp", "tp"}); }), "[mesh] axis tp occurs twice in tp+tp");
    EXPECT_EQ(refused([](Mesh& m) { m.rank_at({1, 2}); }), "[mesh] coordinate out of range: 2 on axis tp" + tail);
    EXPECT_EQ(refused([](Mesh& m) { m.rank_at({1}); }), "[mesh] 1 coordinates" + tail);
  });
}

}  // namespace
}  // namespace tessera
