// Communicators of threads: every operation, by every algorithm, against sums made here; counts.
#include <gtest/gtest.h>

#include "parallel/comm/trace.h"
#include "tensor/random.h"
#include "tests/parallel/mpi/mpi_checks.h"

namespace tessera {
namespace {

using test::array_of;
using test::summed;
using test::values;

TEST(Comm, EveryOperationByEveryAlgorithm) {
  for (const int ranks : {1, 2, 3, 4, 8})
    for (const Algorithm algorithm : test::kByMessages)
      launch({.ranks = ranks, .timeout_s = 20, .algorithm = algorithm}, [](Communicator& world) {
        for (const int64_t n : {1, 2, 17, 1000, 5003})
          for (const DType dtype : {DType::float32, DType::bfloat16, DType::float64, DType::int32}) {
            test::check_sums(world, n, dtype, make_arena());
            test::check_roots(world, n, dtype, make_arena());
          }
        EXPECT_EQ(world.max(world.rank()), world.size() - 1);
        world.barrier();
      });
  EXPECT_EQ(test::failures, 0);
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
  for (const Algorithm algorithm : test::kByMessages)
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

// The log that a rank writes of its calls, read by another rank while it goes on.

TEST(CallLog, KeepsTheLastCalls) {
  CallLog log;
  EXPECT_EQ(log.made(), 0U);
  EXPECT_FALSE(log.find(0));
  EXPECT_FALSE(log.find(1));
  const Call scatter{
      .op = Op::scatter, .dtype = DType::bfloat16, .reduction = Reduction::max, .root = 5, .count = int64_t{1} << 40};
  EXPECT_EQ(log.add(scatter), 1U);
  EXPECT_TRUE(log.find(1)->matches(scatter));
  EXPECT_FALSE(log.find(1)->pieces);
  const UnevenPieces pieces{{1, 2}, {1, 5}}, others{{4, 5}, {2, 5}};  // two ranks' pieces, each of its own arrays
  log.add({.op = Op::all_to_all, .count = 3, .pieces = &pieces});
  EXPECT_TRUE(log.find(2)->matches({.op = Op::all_to_all, .count = 9, .pieces = &others}));
  EXPECT_FALSE(log.find(2)->matches({.op = Op::all_to_all, .count = 3}));
  for (int64_t i = 3; i <= 1000; ++i) log.add({.op = Op::broadcast, .count = i});
  EXPECT_EQ(log.made(), 1000U);
  EXPECT_FALSE(log.find(1));
  EXPECT_FALSE(log.find(1001));
  for (const int64_t i : {990, 1000}) EXPECT_EQ(log.find(static_cast<uint64_t>(i))->count, i);
}

TEST(CallLog, IsReadWhileItIsWritten) {
  CallLog log;
  constexpr int64_t kCalls = 20'000;
  std::jthread writer([&] {
    for (int64_t i = 1; i <= kCalls; ++i) log.add({.root = static_cast<int32_t>(i % 1000), .count = 3 * i});
  });
  int64_t found = 0;
  for (uint64_t made = 0; made < kCalls;) {
    made = log.made();
    const std::optional<Call> last = log.find(made);
    if (!last) continue;  // none yet, or written anew meanwhile
    ++found;
    ASSERT_EQ(last->count, 3 * static_cast<int64_t>(made));
    ASSERT_EQ(last->root, static_cast<int32_t>(made % 1000));
  }
  EXPECT_GT(found, 0);
}

}  // namespace
}  // namespace tessera
