// Ranks with a GPU each, over NCCL, real or emulated: what collectives leave, at once, in the background and in a
// graph; and how they end when a rank fails.

#include "tensor/cuda/copy.h"
#include "tensor/ops/elementwise.h"
#include "tensor/random.h"
#include "tests/parallel/arrays.h"
#include "tests/support/errors.h"
#include "tests/support/gpus.h"

namespace tessera {
namespace {

using NcclGpu = test::OnGpus;

constexpr DType kDTypes[] = {DType::float64, DType::float32, DType::bfloat16, DType::int32, DType::int64};

LaunchOptions over_nccl(int ranks, double timeout_s = 60) {
  return {.backend = Backend::nccl, .ranks = ranks, .timeout_s = timeout_s, .algorithm = Algorithm::native};
}

ArenaPtr gpu_of(const Communicator& world) {
  if constexpr (kWithCuda) cuda::use_gpu(world.rank_here());
  return make_arena(Device::cuda);
}

// Small whole numbers, whose sums are exact in any order and dtype.
Tensor brought(int rank, const Shape& shape, DType dtype, const ArenaPtr& arena) {
  const Philox random = Philox::named(31, "rank " + std::to_string(rank));
  std::vector<double> v(static_cast<size_t>(shape.numel()));
  for (size_t i = 0; i < v.size(); ++i) v[i] = static_cast<double>(random.below(17, i)) - 8;
  return Tensor::of<double>(v, shape, make_arena()).to(dtype).to(arena);
}

std::vector<double> values_of(const Tensor& t) { return t.on_host().to(DType::float64).to_vector<double>(); }

using Results = std::vector<std::vector<double>>;

void every_operation(Communicator& c, const ArenaPtr& arena, int64_t n, DType dtype, Results& out) {
  const int me = c.rank(), ranks = c.size();
  const Tensor mine = brought(me, {n}, dtype, arena);
  const int64_t own = piece(n, ranks, me).size();
  for (const Reduction reduction : {Reduction::sum, Reduction::max}) {
    const Tensor x = mine.clone(), part = Tensor::empty({own}, dtype, arena);
    c.all_reduce(x, reduction);
    c.reduce_scatter(mine, part, reduction);
    for (const Tensor& t : {x, part}) out.push_back(values_of(t));
  }
  const Tensor part = brought(me, {own}, dtype, arena), whole = Tensor::zeros({n}, dtype, arena);
  c.all_gather(part, whole);
  out.push_back(values_of(whole));
  for (int root = 0; root < ranks; ++root) {
    const Tensor x = mine.clone(), y = mine.clone(), got = Tensor::zeros({own}, dtype, arena);
    c.broadcast(x, root);
    c.reduce(y, root);
    const Tensor all = me == root ? Tensor::zeros({n}, dtype, arena) : Tensor::meta({n}, dtype);
    c.gather(part, all, root);
    c.scatter(me == root ? whole : all, got, root);
    for (const Tensor& t : {x, got}) out.push_back(values_of(t));
    if (me == root)
      for (const Tensor& t : {y, all}) out.push_back(values_of(t));
  }
  const Tensor in = brought(me, {3 * ranks}, dtype, arena), turned = Tensor::zeros({3 * ranks}, dtype, arena);
  c.all_to_all(in, turned);
  EXPECT_TRUE(test::exchanges_uneven(c, dtype, arena));
  for (const Tensor& t : {turned, mine}) out.push_back(values_of(t));
  c.barrier();
}

struct Ran {
  std::vector<Results> results;  // results by rank
  std::vector<OpCounts> counts;
  bool operator==(const Ran&) const = default;
};

Ran run(const LaunchOptions& options,
        const std::function<void(Communicator& world, const ArenaPtr& arena, Results& results)>& body) {
  const auto ranks = static_cast<size_t>(options.ranks);
  Ran ran{std::vector<Results>(ranks), std::vector<OpCounts>(ranks)};
  launch(options, [&](Communicator& world) {
    const auto rank = static_cast<size_t>(world.rank());
    const ArenaPtr arena = options.backend == Backend::nccl ? gpu_of(world) : make_arena();
    body(world, arena, ran.results[rank]);
    ran.counts[rank] = world.counts();
  });
  return ran;
}

TEST_F(NcclGpu, EveryOperationLeavesWhatThreadsLeave) {
  for (int ranks = 2; ranks <= std::min(gpus, 4); ++ranks) {
    const auto body = [](Communicator& world, const ArenaPtr& arena, Results& out) {
      for (const int64_t n : {1, 2, 17, 1000, 5003})
        for (const DType dtype : kDTypes) every_operation(world, arena, n, dtype, out);
    };
    EXPECT_TRUE(run(over_nccl(ranks), body) == run({.ranks = ranks, .timeout_s = 60}, body)) << ranks << " ranks";
  }
}

// Pieces of the whole in its own memory.
TEST_F(NcclGpu, PiecesMayLieInsideTheWhole) {
  const auto body = [](Communicator& world, const ArenaPtr& arena, Results& out) {
    for (const int64_t n : {1000, 1001}) {
      const Tensor x = brought(world.rank(), {n}, DType::float32, arena);
      const Range own = piece(n, world.size(), world.rank());
      const Tensor part = x.narrow(0, own.begin, own.size());
      world.reduce_scatter(x, part);
      world.all_gather(part, x);
      out.push_back(values_of(x));
    }
  };
  EXPECT_TRUE(run(over_nccl(2), body).results == run({.ranks = 2, .timeout_s = 60}, body).results);
}

// Calls that are started on one communicator and calls that are done at once on another keep one order.
TEST_F(NcclGpu, CommunicatorsOfARankKeepOneOrder) {
  if (gpus < 4) GTEST_SKIP() << "this machine has no four GPUs";
  const auto body = [](Communicator& world, const ArenaPtr& arena, Results& out) {
    const auto row = world.split(world.rank() / 2, world.rank(), "row"),
               column = world.split(world.rank() % 2, world.rank(), "column");
    for (int turn = 0; turn < 20; ++turn) {
      const auto fresh = [&](int64_t n) { return brought(world.rank() + turn, {n}, DType::float32, arena); };
      const Tensor a = fresh(300), b = fresh(400), c = fresh(500), d = fresh(20);
      Pending in_row = row->start_all_reduce(a), in_column = column->start_all_reduce(b);
      world.all_reduce(c);
      row->all_reduce(d);
      in_column.wait();
      in_row.wait();
      for (const Tensor& t : {a, b, c, d}) out.push_back(values_of(t));
    }
  };
  EXPECT_TRUE(run(over_nccl(4), body).results == run({.ranks = 4, .timeout_s = 60}, body).results);
}

std::string failure(const LaunchOptions& options, const std::function<void(Communicator&, const ArenaPtr&)>& body) {
  return error_of([&] { launch(options, [&](Communicator& world) { body(world, gpu_of(world)); }); },
                  Status::communication);
}

TEST_F(NcclGpu, ARankThatFailsEndsTheOthers) {
  for (const bool background : {false, true}) {
    const std::string what = failure(over_nccl(2), [&](Communicator& world, const ArenaPtr& arena) {
      const Tensor x = brought(world.rank(), {1000}, DType::float32, arena);
      world.all_reduce(x);
      if (world.rank() == 1) throw CommError("the cause");
      if (background)
        world.start_all_reduce(x).wait();
      else
        world.all_reduce(x);
    });
    EXPECT_EQ(what, "[rank 1] the cause");
  }
}

TEST_F(NcclGpu, ARankThatDoesNotComeIsNoticed) {
  const std::string what = failure(over_nccl(2, 0.3), [](Communicator& world, const ArenaPtr& arena) {
    const Tensor x = brought(world.rank(), {1000}, DType::float32, arena);
    if (world.rank() == 0)
      world.all_reduce(x);
    else
      world.recv(x, 0);
  });
  EXPECT_NE(what.find("within 0.3 s"), std::string::npos) << what;
}

TEST_F(NcclGpu, ARankThatIsLateIsNamedWithWhatItDidLast) {
  std::atomic<bool> noticed = false;
  const std::string what = failure(over_nccl(2, 1), [&](Communicator& world, const ArenaPtr& arena) {
    const Tensor x = brought(world.rank(), {1000}, DType::float32, arena);
    world.all_reduce(x);
    while (world.rank() == 1 && !noticed) std::this_thread::sleep_for(std::chrono::milliseconds(5));
    try {
      world.broadcast(x, 0);
    } catch (const Error&) {
      noticed = true;
      throw;
    }
  });
  EXPECT_EQ(what,
            "[rank 0] world axis, broadcast of 4000 bytes (float32, root 0, on a GPU): rank 1 did not come within 1 s; "
            "the last it came to was all_reduce of 4000 bytes (float32, on a GPU)");
}

// Seen before NCCL is asked, which would wait for ever.
TEST_F(NcclGpu, RanksThatAskForDifferentThingsEnd) {
  const std::vector<std::function<void(Communicator&, const Tensor&)>> different = {
      [](Communicator& c, const Tensor& x) { c.all_reduce(x.narrow(0, 0, 100 + c.rank())); },
      [](Communicator& c, const Tensor& x) { c.all_reduce(x, c.rank() == 0 ? Reduction::sum : Reduction::max); },
      [](Communicator& c, const Tensor& x) { c.all_reduce(c.rank() == 0 ? x : x.to(DType::int32)); },
      [](Communicator& c, const Tensor& x) { c.rank() == 0 ? c.all_reduce(x) : c.broadcast(x, 0); },
      [](Communicator& c, const Tensor& x) { c.broadcast(x, c.rank()); },
  };
  for (const auto& ask : different) {
    const std::string what = failure(over_nccl(2, 20), [&](Communicator& world, const ArenaPtr& arena) {
      ask(world, brought(world.rank(), {1000}, DType::float32, arena));
    });
    EXPECT_NE(what.find(" asks for "), std::string::npos) << what;
    EXPECT_NE(what.find("every rank must communicate in the same order"), std::string::npos) << what;
  }
}

// Collectives of two communicators in one graph, some beside kernels, with other numbers at each launch.
TEST_F(NcclGpu, AGraphHoldsCollectives) {
  if constexpr (kWithCuda)
    launch(over_nccl(2), [](Communicator& world) {
      const ArenaPtr arena = gpu_of(world);
      const auto all = world.split(0, world.rank(), "all");
      const Tensor x = Tensor::zeros({1000}, DType::float32, arena), y = x.clone(), sums = x.clone();
      const Tensor mine = Tensor::zeros({500}, DType::float32, arena), gathered = x.clone();
      const auto work = [&] {
        Tensor doubled = x.clone();
        scale_(doubled, 2);
        Pending reducing = world.start_all_reduce(doubled);
        Tensor(y).copy_from(x);
        all->all_reduce(y);
        Tensor z = y.clone();  // 3
        Pending cut = world.start_reduce_scatter(z, mine);
        scale_(z = y.clone(), 10);
        reducing.wait();
        add_(z, doubled);  // 30 + 6
        cut.wait();
        Tensor(sums).copy_from(z);
        world.all_gather(mine, gathered);
      };
      work();
      const OpCounts once = world.counts();
      world.reset_counts();
      cuda::synchronize(*arena);
      Tensor(sums).fill(0);
      const cuda::Graph graph(arena, work);
      EXPECT_EQ(world.counts(), once);
      EXPECT_EQ(values_of(sums), std::vector<double>(1000, 0));
      for (const double times : {1, 5}) {
        Tensor(x).fill(times * (world.rank() + 1));
        graph.launch();
        world.wait_for_gpu(*arena, "the graph");
        EXPECT_EQ(values_of(sums), std::vector<double>(1000, 36 * times));
        EXPECT_EQ(values_of(gathered), std::vector<double>(1000, 6 * times));
      }
      EXPECT_EQ(world.counts(), once);
      world.barrier();
    });
}

TEST_F(NcclGpu, ACollectiveThatNobodyWaitsForBreaksTheCapture) {
  if constexpr (kWithCuda)
    launch(over_nccl(2), [](Communicator& world) {
      const ArenaPtr arena = gpu_of(world);
      const Tensor x = Tensor::zeros({100}, DType::float32, arena);
      world.all_reduce(x);
      Pending forgotten;
      EXPECT_THROW(cuda::Graph(arena, [&] { forgotten = world.start_all_reduce(x); }), Error);
      world.barrier();
      world.all_reduce(x);  // all goes on as before
      cuda::synchronize(*arena);
    });
}

TEST_F(NcclGpu, ARankThatFailsInsideAGraphEndsTheOthers) {
  if constexpr (kWithCuda)
    for (const bool late : {false, true}) {
      const std::string what = failure(over_nccl(2, late ? 0.5 : 20), [&](Communicator& world, const ArenaPtr& arena) {
        const Tensor x = Tensor::zeros({100}, DType::float32, arena);
        const auto other = world.split(0, world.rank(), "other");
        other->all_reduce(x);
        const auto graph = std::make_unique<cuda::Graph>(arena, [&] { other->all_reduce(x); });
        world.barrier();
        if (world.rank() == 1) {
          if (!late) throw CommError("the cause");
          return world.recv(x, 0);
        }
        graph->launch();
        world.wait_for_gpu(*arena, "the step");
      });
      if (late)
        EXPECT_NE(what.find("within 0.5 s"), std::string::npos) << what;
      else
        EXPECT_EQ(what, "[rank 1] the cause");
    }
}

}  // namespace
}  // namespace tessera
