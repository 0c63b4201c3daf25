// Communicators of threads: every operation, by every algorithm, against sums made here; counts.
#include <gtest/gtest.h>

#include <atomic>

#include "parallel/comm/launch.h"
#include "parallel/comm/trace.h"
#include "tensor/random.h"
#include "tests/parallel/arrays.h"

namespace tessera {
namespace {

using test::array_of;
using test::brought;
using test::cut;
using test::summed;
using test::values;

void check_all(Communicator& c, int64_t n, DType dtype) {
  const ArenaPtr arena = make_arena();
  const int ranks = c.size(), me = c.rank();
  const std::vector<double> total = summed(ranks, n);
  const int64_t own = piece(n, ranks, me).size();
  const Tensor mine = array_of(me, n, dtype, arena);
  Tensor x = mine.clone();
  c.all_reduce(x);
  EXPECT_EQ(values(x), total);
  Tensor part = Tensor::empty({own}, dtype, arena);
  c.reduce_scatter(mine, part);
  EXPECT_EQ(values(part), cut(total, ranks, me));
  EXPECT_EQ(values(mine), values(array_of(me, n, dtype, arena)));  // left alone
  Tensor whole = Tensor::zeros({n}, dtype, arena);
  c.all_gather(part, whole);
  EXPECT_EQ(values(whole), total);
  for (int root = 0; root < ranks; ++root) {
    x = mine.clone();
    c.broadcast(x, root);
    EXPECT_EQ(values(x), values(array_of(root, n, dtype, arena)));
    x = mine.clone();
    c.reduce(x, root);
    EXPECT_EQ(values(x), me == root ? total : values(mine));
    whole = me == root ? Tensor::zeros({n}, dtype, arena) : Tensor::meta({n}, dtype);
    c.gather(part, whole, root);
    if (me == root) {
      EXPECT_EQ(values(whole), total);
    }
    const Tensor got = Tensor::zeros({own}, dtype, arena);
    c.scatter(whole, got, root);
    EXPECT_EQ(values(got), values(part));
  }
  const Tensor in = array_of(me, ranks * 3, dtype, arena), out = Tensor::zeros({ranks * 3}, dtype, arena);
  c.all_to_all(in, out);
  for (int r = 0; r < ranks; ++r)
    EXPECT_EQ(values(out.narrow(0, 3 * r, 3)), values(array_of(r, ranks * 3, dtype, arena).narrow(0, 3 * me, 3)));
  EXPECT_TRUE(test::exchanges_uneven(c, dtype, arena));
  EXPECT_EQ(c.max(me), ranks - 1);
  c.barrier();
}

TEST(Comm, EveryOperationByEveryAlgorithm) {
  for (const int ranks : {1, 2, 3, 4, 8})
    for (const Algorithm algorithm : {Algorithm::direct, Algorithm::ring, Algorithm::tree, Algorithm::root})
      launch({.ranks = ranks, .timeout_s = 20, .algorithm = algorithm}, [](Communicator& world) {
        for (const int64_t n : {1, 2, 17, 1000, 5003})
          for (const DType dtype : {DType::float32, DType::bfloat16, DType::float64, DType::int32})
            check_all(world, n, dtype);
      });
}

TEST(Comm, PiecesMayLieInsideTheWhole) {
  for (const Algorithm algorithm : {Algorithm::direct, Algorithm::ring, Algorithm::root})
    launch({.ranks = 3, .timeout_s = 20, .algorithm = algorithm}, [](Communicator& world) {
      const ArenaPtr arena = make_arena();
      const Tensor x = array_of(world.rank(), 1000, DType::float32, arena);
      const Range own = piece(1000, 3, world.rank());
      const Tensor part = x.narrow(0, own.begin, own.size());
      world.reduce_scatter(x, part);
      EXPECT_EQ(values(part), cut(summed(3, 1000), 3, world.rank()));
      world.all_gather(part, x);
      EXPECT_EQ(values(x), summed(3, 1000));
    });
}

// The order of float32 sums is the documented one.
TEST(Comm, SumsHaveTheirOrder) {
  constexpr int kRanks = 5;
  constexpr int64_t kSize = 203;
  std::vector<std::vector<float>> in(kRanks, std::vector<float>(kSize));
  for (int r = 0; r < kRanks; ++r)
    for (size_t i = 0; i < kSize; ++i)
      in[static_cast<size_t>(r)][i] =
          static_cast<float>(Philox::named(7, "order").normal(i * kRanks + static_cast<uint64_t>(r)));
  const auto expected = [&](Algorithm algorithm, size_t i) {
    const auto at = [&](int r) { return in[static_cast<size_t>(r % kRanks)][i]; };
    if (algorithm == Algorithm::tree) return ((at(0) + at(1)) + (at(2) + at(3))) + at(4);
    int first = 0;
    if (algorithm == Algorithm::ring)
      for (int c = 0; c < kRanks; ++c)
        if (static_cast<int64_t>(i) >= piece(kSize, kRanks, c).begin) first = c + 1;
    float sum = at(first);
    for (int r = 1; r < kRanks; ++r) sum += at(first + r);
    return sum;
  };
  for (const Algorithm algorithm : {Algorithm::direct, Algorithm::ring, Algorithm::tree, Algorithm::root})
    launch({.ranks = kRanks, .timeout_s = 20, .algorithm = algorithm}, [&](Communicator& world) {
      const Tensor x = Tensor::of<float>(in[static_cast<size_t>(world.rank())], {kSize}, make_arena());
      world.all_reduce(x);
      for (size_t i = 0; i < kSize; ++i)
        ASSERT_EQ(x.data<float>()[i], expected(algorithm, i)) << name_of(algorithm) << i;
    });
}

TEST(Comm, BytesAreThoseOfTheFormulas) {
  struct Sent {
    Algorithm algorithm;
    Op op;
    double arrays;  // whole arrays sent by all ranks together, of n = 4
  };
  const std::vector<Sent> cases = {{Algorithm::direct, Op::all_reduce, 6},     {Algorithm::ring, Op::all_reduce, 6},
                                   {Algorithm::root, Op::all_reduce, 6},       {Algorithm::tree, Op::all_reduce, 6},
                                   {Algorithm::direct, Op::reduce_scatter, 3}, {Algorithm::ring, Op::reduce_scatter, 3},
                                   {Algorithm::direct, Op::all_gather, 3},     {Algorithm::ring, Op::all_gather, 3},
                                   {Algorithm::direct, Op::broadcast, 3},      {Algorithm::tree, Op::broadcast, 3},
                                   {Algorithm::direct, Op::reduce, 3}};
  for (const Sent& c : cases) {
    std::atomic<int64_t> sent{0}, calls{0};
    launch({.ranks = 4, .timeout_s = 20, .algorithm = c.algorithm}, [&](Communicator& world) {
      const ArenaPtr arena = make_arena();
      const Tensor x = Tensor::zeros({1000}, DType::float32, arena), part = Tensor::zeros({250}, DType::float32, arena);
      if (c.op == Op::all_reduce) world.all_reduce(x);
      if (c.op == Op::reduce_scatter) world.reduce_scatter(x, part);
      if (c.op == Op::all_gather) world.all_gather(part, x);
      if (c.op == Op::broadcast) world.broadcast(x, 1);
      if (c.op == Op::reduce) world.reduce(x, 1);
      sent += world.counts()[static_cast<size_t>(c.op)].sent;
      calls += world.counts()[static_cast<size_t>(c.op)].calls;
    });
    EXPECT_EQ(static_cast<double>(sent), 4000 * c.arrays) << name_of(c.algorithm) << " " << name_of(c.op);
    EXPECT_EQ(calls, 4);
  }
}

TEST(Comm, MessagesKeepTheirOrderByTag) {
  launch({.ranks = 2, .timeout_s = 20}, [](Communicator& world) {
    const ArenaPtr arena = make_arena();
    if (world.rank() == 0) {
      for (int i = 0; i < 10; ++i) world.send(array_of(i, 100 + i, DType::float32, arena), 1, i % 2);
    } else {
      for (const int i : {1, 0, 3, 5, 2, 7, 4, 6, 8, 9}) {
        const Tensor x = Tensor::zeros({100 + i}, DType::float32, arena);
        world.recv(x, 0, i % 2);
        EXPECT_EQ(values(x), values(array_of(i, 100 + i, DType::float32, arena)));
      }
    }
  });
}

TEST(Comm, SplitsIntoRowsAndColumns) {
  launch({.ranks = 6, .timeout_s = 20}, [](Communicator& world) {
    const int row = world.rank() / 3, column = world.rank() % 3;
    const auto in_row = world.split(row, -column, "row"), in_column = world.split(column, row, "column");
    EXPECT_EQ(in_row->size(), 3);
    EXPECT_EQ(in_row->rank(), 2 - column);  // the key turns the order around
    EXPECT_EQ(in_row->world_rank(0), 3 * row + 2);
    EXPECT_EQ(in_column->rank(), row);
    EXPECT_EQ(in_row->sum(column + 1), 6);
    EXPECT_EQ(in_column->sum(row), 1);
  });
}

TEST(Comm, RunsInTheBackground) {
  Trace trace;
  launch({.ranks = 2, .timeout_s = 20}, [&](Communicator& world) {
    const ArenaPtr arena = make_arena();
    if (world.rank() == 0) world.set_trace(&trace);
    std::vector<Tensor> x;
    std::vector<Pending> pending;
    for (int i = 0; i < 5; ++i) {
      x.push_back(array_of(world.rank(), 3000 + i, DType::float32, arena));
      pending.push_back(world.start_all_reduce(x.back()));
    }
    EXPECT_EQ(world.sum(1), 2);  // after those
    for (size_t i = 0; i < 5; ++i) {
      pending[i].wait();
      EXPECT_EQ(values(x[i]), summed(2, 3000 + static_cast<int64_t>(i)));
    }
  });
  EXPECT_EQ(trace.events().size(), 6U);
}

}  // namespace
}  // namespace tessera
