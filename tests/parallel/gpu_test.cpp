// Ranks with GPUs: ranks that share a GPU match CPU ranks bitwise; ranks over NCCL, real or emulated, match threads, in
// blocking calls, in the background and in a graph; and failures end all ranks.

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "autograd/ops.h"
#include "parallel/comm/nccl/transport.h"
#include "parallel/placement.h"
#include "tensor/cuda/copy.h"
#include "tests/parallel/arrays.h"
#include "tests/support/errors.h"
#include "tests/support/gpus.h"
#include "tests/support/tensors.h"
#include "verify/defects/transports.h"

namespace tessera {
namespace {

using test::values;

using CommGpu = test::OnGpu;

constexpr DType kDTypes[] = {DType::float64, DType::float32, DType::bfloat16, DType::int32, DType::int64};

// A rank's input: fractions, whose sums depend on their order.
Tensor rank_input(int rank, const Shape& shape, DType dtype, const ArenaPtr& arena) {
  const Tensor sample = test::normal(shape, DType::float64, 31, ("rank " + std::to_string(rank)).c_str());
  return scale(sample, 100).to(dtype).to(arena);
}

// Small integers, whose sums are exact in any order and dtype.
Tensor integers(int rank, const Shape& shape, DType dtype, const ArenaPtr& arena) {
  const Philox random = Philox::named(31, "rank " + std::to_string(rank));
  std::vector<double> v(static_cast<size_t>(shape.numel()));
  for (size_t i = 0; i < v.size(); ++i) v[i] = static_cast<double>(random.below(17, i)) - 8;
  return Tensor::of<double>(v, shape, make_arena()).to(dtype).to(arena);
}

std::vector<std::byte> as_bytes(const Tensor& t) {
  const Tensor here = t.on_host().contiguous();
  return {here.raw(), here.raw() + here.nbytes()};
}

using Results = std::vector<std::vector<std::byte>>;
using Body = std::function<void(Communicator& world, const ArenaPtr& arena, Results& results)>;

struct Ran {
  std::vector<Results> results;  // results by rank
  std::vector<OpCounts> counts;
  bool operator==(const Ran&) const = default;
};

ArenaPtr make_gpu_arena(const Communicator& world) {
  if constexpr (kWithCuda) cuda::use_gpu(world.local_rank());
  return make_arena(Device::cuda);
}

Ran run(const LaunchOptions& options, const Body& body, Device device = Device::cpu) {
  const auto ranks = static_cast<size_t>(options.ranks);
  Ran ran{std::vector<Results>(ranks), std::vector<OpCounts>(ranks)};
  launch(options, [&](Communicator& world) {
    const auto rank = static_cast<size_t>(world.rank());
    const ArenaPtr arena = options.backend == Backend::nccl ? make_gpu_arena(world) : make_arena(device);
    body(world, arena, ran.results[rank]);
    ran.counts[rank] = world.counts();
    world.barrier();
    EXPECT_EQ(arena->total().live, 0) << to_string(device);
  });
  return ran;
}

// Checks that results, calls and bytes sent are equal on both devices.
void expect_same(const LaunchOptions& options, const Body& body) {
  const Ran cpu = run(options, body), gpu = run(options, body, Device::cuda);
  EXPECT_TRUE(gpu.results == cpu.results) << to_string(options.algorithm) << ", " << options.ranks << " ranks";
  EXPECT_TRUE(gpu.counts == cpu.counts);
}

void every_operation(Communicator& c, const ArenaPtr& arena, int64_t n, DType dtype, Results& out,
                     decltype(rank_input) make_input = rank_input) {
  const int me = c.rank(), ranks = c.size();
  const Tensor mine = make_input(me, {n}, dtype, arena);
  const int64_t own = chunk_range(n, ranks, me).size();
  for (const Reduction reduction : {Reduction::sum, Reduction::max}) {
    const Tensor x = mine.clone(), part = Tensor::empty({own}, dtype, arena);
    c.all_reduce(x, reduction);
    c.reduce_scatter(mine, part, reduction);
    for (const Tensor& t : {x, part}) out.push_back(as_bytes(t));
  }
  const Tensor part = make_input(me, {own}, dtype, arena), full = Tensor::zeros({n}, dtype, arena);
  c.all_gather(part, full);
  out.push_back(as_bytes(full));
  for (int root = 0; root < ranks; ++root) {
    const Tensor x = mine.clone(), y = mine.clone(), got = Tensor::zeros({own}, dtype, arena);
    c.broadcast(x, root);
    c.reduce(y, root);
    Tensor all = me == root ? Tensor::zeros({n}, dtype, arena) : Tensor::meta({n}, dtype);
    c.gather(part, all, root);
    c.scatter(me == root ? full : all, got, root);
    for (const Tensor& t : {x, got}) out.push_back(as_bytes(t));
    if (me == root || make_input == rank_input) out.push_back(as_bytes(y));  // undefined on other ranks over NCCL
    if (me == root) out.push_back(as_bytes(all));
  }
  const Tensor in = make_input(me, {3 * ranks}, dtype, arena), turned = Tensor::zeros({3 * ranks}, dtype, arena);
  c.all_to_all(in, turned);
  EXPECT_TRUE(test::exchanges_uneven(c, dtype, arena));
  for (const Tensor& t : {turned, mine}) out.push_back(as_bytes(t));  // `mine` is not modified
}

TEST_F(CommGpu, EveryOperationMatchesCpuWithEveryAlgorithm) {
  for (const int ranks : {1, 2, 3, 4})
    for (const Algorithm algorithm : test::kByMessages)
      expect_same({.ranks = ranks, .timeout_s = 60, .algorithm = algorithm},
                  [](Communicator& world, const ArenaPtr& memory, Results& out) {
                    for (const int64_t n : {1, 2, 17, 1000, 5003})
                      for (const DType dtype : kDTypes) every_operation(world, memory, n, dtype, out);
                  });
}

// Chunks inside the full array, and arrays at any element offset.
TEST_F(CommGpu, AcceptsChunksInsideFullArray) {
  for (const Algorithm algorithm : {Algorithm::direct, Algorithm::ring, Algorithm::root})
    expect_same({.ranks = 3, .timeout_s = 60, .algorithm = algorithm},
                [](Communicator& world, const ArenaPtr& memory, Results& out) {
                  for (const int64_t first : {0, 1, 5, 8}) {
                    const Tensor x = rank_input(world.rank(), {2000}, DType::bfloat16, memory).narrow(0, first, 1000);
                    const Range own = chunk_range(1000, 3, world.rank());
                    const Tensor part = x.narrow(0, own.begin, own.size());
                    world.reduce_scatter(x, part);
                    out.push_back(as_bytes(x));
                    world.all_gather(part, x);
                    out.push_back(as_bytes(x));
                  }
                });
}

TEST_F(CommGpu, MessagesArriveInOrderPerTag) {
  expect_same({.ranks = 3, .timeout_s = 60}, [](Communicator& world, const ArenaPtr& memory, Results& out) {
    const int next = (world.rank() + 1) % 3, previous = (world.rank() + 2) % 3;
    for (int i = 0; i < 10; ++i) {
      Tensor x = rank_input(world.rank() + 10 * i, {100 + i}, DType::float32, memory);
      world.send(x, next, i % 2);
      x.fill(0);  // the message has the earlier values
    }
    for (const int i : {1, 0, 3, 5, 2, 7, 4, 6, 8, 9}) {
      const Tensor x = Tensor::zeros({100 + i}, DType::float32, memory);
      world.recv(x, previous, i % 2);
      out.push_back(as_bytes(x));
    }
  });
}

TEST_F(CommGpu, BackgroundOperationsMatchCpu) {
  for (const Algorithm algorithm : test::kByMessages)
    expect_same({.ranks = 4, .timeout_s = 60, .algorithm = algorithm},
                [](Communicator& world, const ArenaPtr& memory, Results& out) {
                  const auto row = world.split(world.rank() / 2, world.rank(), "row");
                  std::vector<Tensor> x;
                  std::vector<Work> pending;
                  for (int i = 0; i < 4; ++i) {
                    x.push_back(rank_input(world.rank() + i, {3000 + i}, DType::float32, memory));
                    pending.push_back(world.start_all_reduce(x.back()));
                    const Tensor concurrent = rank_input(world.rank(), {500}, DType::float32, memory);
                    row->all_reduce(concurrent);
                    out.push_back(as_bytes(concurrent));
                  }
                  for (size_t i = 0; i < x.size(); ++i) {
                    pending[i].wait();
                    out.push_back(as_bytes(x[i]));
                  }
                });
}

// Conversions between placements use these operations and corner copies.
TEST_F(CommGpu, RedistributionMatchesCpu) {
  const std::array<Placement, 5> all{R, I, P, S(0), S(1)};
  expect_same({.ranks = 3, .timeout_s = 60}, [&](Communicator& world, const ArenaPtr& memory, Results& out) {
    // Uneven chunks of both dims, and even ones of the second: odd rows, and word-aligned rows.
    for (const auto& [full, dtype] : {std::pair{Shape{7, 8}, DType::float32},
                                      {Shape{5, 9}, DType::float32},
                                      {Shape{4, 96}, DType::float32},
                                      {Shape{4, 96}, DType::bfloat16}})
      for (const Placement& from : all)
        for (const Placement& to : all) {
          Shape shape = full;
          const bool cut = from.kind == Placement::Kind::sharded;
          if (cut) shape[from.dim] = chunk_range(shape[from.dim], 3, world.rank()).size();
          const Placement source = cut ? S(from.dim, full[from.dim]) : from;
          const Tensor x = rank_input(world.rank(), shape, dtype, memory);
          out.push_back(as_bytes(redistribute(x.clone(), world, source, to)));
          out.push_back(as_bytes(start_redistribute(x.clone(), world, source, to).wait()));
        }
  });
}

std::string failure(const LaunchOptions& options, const std::function<void(Communicator&)>& body) {
  return error_message([&] { launch(options, body); }, Status::communication);
}

TEST_F(CommGpu, FailedRankAbortsAllRanks) {
  const std::string what = failure({.ranks = 3, .timeout_s = 20}, [](Communicator& world) {
    const Tensor x = rank_input(world.rank(), {1000}, DType::float32, make_arena(Device::cuda));
    world.all_reduce(x);
    if (world.rank() == 1) throw CommError("the cause");
    world.all_reduce(x);
  });
  EXPECT_EQ(what, "[rank 1] the cause");
  const std::string late = failure({.ranks = 2, .timeout_s = 0.2}, [](Communicator& world) {
    const Tensor x = rank_input(world.rank(), {1000}, DType::float32, make_arena(Device::cuda));
    if (world.rank() == 0) world.recv(x, 1);
  });
  EXPECT_TRUE(has(late, "recv of 4000 bytes: rank 1 sent nothing within 0.2 s"));
}

TEST_F(CommGpu, RejectsMixedDevices) {
  const auto tensor = [](Communicator& world) {
    return rank_input(world.rank(), {100}, DType::float32, make_arena(world.rank() == 0 ? Device::cpu : Device::cuda));
  };
  const std::string reduce =
      failure({.ranks = 2, .timeout_s = 20}, [&](Communicator& world) { world.all_reduce(tensor(world)); });
  EXPECT_TRUE(has(reduce, "all_reduce of 400 bytes (float32, on a GPU)"));
  const std::string message = failure({.ranks = 2, .timeout_s = 20}, [&](Communicator& world) {
    world.rank() == 0 ? world.send(tensor(world), 1) : world.recv(tensor(world), 0);
  });
  EXPECT_TRUE(has(message, "rank 0 sent from the host's memory; expected a GPU's"));
}

// A lost message and a missing rank are detected as on the CPU.
TEST_F(CommGpu, DetectsLostMessagesAndMissingRanks) {
  LaunchOptions o{.ranks = 2, .timeout_s = 0.5};
  o.around = with_faults({{1, {{.kind = Fault::Kind::drop}}}});
  const std::string lost = failure(o, [](Communicator& world) {
    const Tensor x = rank_input(world.rank(), {10}, DType::float32, make_arena(Device::cuda));
    world.rank() == 1 ? world.send(x, 0) : world.recv(x, 1);
  });
  EXPECT_TRUE(has(lost, "sent nothing within"));
  const std::string away = failure(o, [](Communicator& world) {
    world.all_reduce(rank_input(world.rank(), {10}, DType::float32, make_arena(Device::cuda)));
  });
  EXPECT_TRUE(has(away, "did not arrive within"));
}

// Ranks with one GPU each, over NCCL.
using NcclGpu = test::OnGpus;

LaunchOptions over_nccl(int ranks, double timeout_s = 60) {
  return {.backend = Backend::nccl, .ranks = ranks, .timeout_s = timeout_s, .algorithm = Algorithm::native};
}

TEST_F(NcclGpu, EveryOperationMatchesThreadRanks) {
  for (int ranks = 2; ranks <= std::min(gpus, 4); ++ranks) {
    const auto body = [](Communicator& world, const ArenaPtr& arena, Results& out) {
      for (const int64_t n : {1, 2, 17, 1000, 5003})
        for (const DType dtype : kDTypes) every_operation(world, arena, n, dtype, out, integers);
    };
    EXPECT_TRUE(run(over_nccl(ranks), body) == run({.ranks = ranks, .timeout_s = 60}, body)) << ranks << " ranks";
  }
}

// Chunks inside the full array.
TEST_F(NcclGpu, AcceptsChunksInsideFullArray) {
  const auto body = [](Communicator& world, const ArenaPtr& arena, Results& out) {
    for (const int64_t n : {1000, 1001}) {
      const Tensor x = integers(world.rank(), {n}, DType::float32, arena);
      const Range own = chunk_range(n, world.size(), world.rank());
      const Tensor part = x.narrow(0, own.begin, own.size());
      world.reduce_scatter(x, part);
      world.all_gather(part, x);
      out.push_back(as_bytes(x));
    }
  };
  EXPECT_TRUE(run(over_nccl(2), body).results == run({.ranks = 2, .timeout_s = 60}, body).results);
}

// Background calls of one communicator and blocking calls of another share one order.
TEST_F(NcclGpu, CommunicatorsOfOneRankShareOneOrder) {
  if (gpus < 4) GTEST_SKIP() << "this machine has no four GPUs";
  const auto body = [](Communicator& world, const ArenaPtr& arena, Results& out) {
    const auto row = world.split(world.rank() / 2, world.rank(), "row"),
               column = world.split(world.rank() % 2, world.rank(), "column");
    for (int turn = 0; turn < 20; ++turn) {
      const auto fresh = [&](int64_t n) { return integers(world.rank() + turn, {n}, DType::float32, arena); };
      const Tensor a = fresh(300), b = fresh(400), c = fresh(500), d = fresh(20);
      Work in_row = row->start_all_reduce(a), in_column = column->start_all_reduce(b);
      world.all_reduce(c);
      row->all_reduce(d);
      in_column.wait();
      in_row.wait();
      for (const Tensor& t : {a, b, c, d}) out.push_back(as_bytes(t));
    }
  };
  EXPECT_TRUE(run(over_nccl(4), body).results == run({.ranks = 4, .timeout_s = 60}, body).results);
}

std::string failure(const LaunchOptions& options, const std::function<void(Communicator&, const ArenaPtr&)>& body) {
  return failure(options, [&](Communicator& world) { body(world, make_gpu_arena(world)); });
}

TEST_F(NcclGpu, FailedRankAbortsAllRanks) {
  for (const bool background : {false, true}) {
    const std::string what = failure(over_nccl(2), [&](Communicator& world, const ArenaPtr& arena) {
      const Tensor x = integers(world.rank(), {1000}, DType::float32, arena);
      world.all_reduce(x);
      if (world.rank() == 1) throw CommError("the cause");
      background ? world.start_all_reduce(x).wait() : world.all_reduce(x);
    });
    EXPECT_EQ(what, "[rank 1] the cause");
  }
}

TEST_F(NcclGpu, DetectsMissingRank) {
  const std::string what = failure(over_nccl(2, 0.3), [](Communicator& world, const ArenaPtr& arena) {
    const Tensor x = integers(world.rank(), {1000}, DType::float32, arena);
    world.rank() == 0 ? world.all_reduce(x) : world.recv(x, 0);
  });
  EXPECT_TRUE(has(what, "within 0.3 s"));
}

TEST_F(NcclGpu, NamesLateRankAndItsLastCall) {
  std::atomic<bool> noticed = false;
  const std::string what = failure(over_nccl(2, 1), [&](Communicator& world, const ArenaPtr& arena) {
    const Tensor x = integers(world.rank(), {1000}, DType::float32, arena);
    world.all_reduce(x);
    while (world.rank() == 1 && !noticed) std::this_thread::sleep_for(std::chrono::milliseconds(5));
    try {
      world.broadcast(x, 0);
    } catch (const Error&) {
      noticed = true;
      throw;
    }
  });
  EXPECT_EQ(
      what,
      "[rank 0] world axis, broadcast of 4000 bytes (float32, root 0, on a GPU): rank 1 did not arrive within 1 s; "
      "its last operation was all_reduce of 4000 bytes (float32, on a GPU)");
}

// Detected before NCCL is called, which would hang.
TEST_F(NcclGpu, MismatchedCallsAbortAllRanks) {
  for (const auto& [what, ask] : test::kOddCalls) {
    const std::string message = failure(over_nccl(2, 20), [&, &ask = ask](Communicator& world, const ArenaPtr& arena) {
      ask(world, integers(world.rank(), {1000}, DType::float32, arena), world.rank() == 1);
    });
    EXPECT_TRUE(has(message, " calls ")) << what;
    EXPECT_TRUE(has(message, "all ranks must make the same calls in the same order")) << what;
  }
}

// Collectives of two communicators in one graph, some concurrent with kernels, with different values at each launch.
TEST_F(NcclGpu, GraphReplaysCollectives) {
  if constexpr (kWithCuda)
    launch(over_nccl(2), [](Communicator& world) {
      const ArenaPtr arena = make_gpu_arena(world);
      const auto all = world.split(0, world.rank(), "all");
      const Tensor x = Tensor::zeros({1000}, DType::float32, arena), y = x.clone(), sums = x.clone();
      const Tensor mine = Tensor::zeros({500}, DType::float32, arena), gathered = x.clone();
      const auto work = [&] {
        Tensor doubled = x.clone();
        scale_(doubled, 2);
        Work reducing = world.start_all_reduce(doubled);
        Tensor(y).copy_from(x);
        all->all_reduce(y);
        Tensor z = y.clone();  // 3
        Work cut = world.start_reduce_scatter(z, mine);
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
      EXPECT_EQ(values(sums), std::vector<double>(1000, 0));
      for (const double times : {1, 5}) {
        Tensor(x).fill(times * (world.rank() + 1));
        graph.launch();
        world.wait_for_gpu(*arena, "the graph");
        EXPECT_EQ(values(sums), std::vector<double>(1000, 36 * times));
        EXPECT_EQ(values(gathered), std::vector<double>(1000, 6 * times));
      }
      EXPECT_EQ(world.counts(), once);
      world.barrier();
    });
}

TEST_F(NcclGpu, CollectiveWithoutWaitInvalidatesCapture) {
  if constexpr (kWithCuda)
    launch(over_nccl(2), [](Communicator& world) {
      const ArenaPtr arena = make_gpu_arena(world);
      const Tensor x = Tensor::zeros({100}, DType::float32, arena);
      world.all_reduce(x);
      Work forgotten;
      EXPECT_THROW(cuda::Graph(arena, [&] { forgotten = world.start_all_reduce(x); }), Error);
      world.barrier();
      world.all_reduce(x);  // still works
      cuda::synchronize(*arena);
    });
}

TEST_F(NcclGpu, FailureInsideGraphAbortsAllRanks) {
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
        EXPECT_TRUE(has(what, "within 0.5 s"));
      else
        EXPECT_EQ(what, "[rank 1] the cause");
    }
}

// NCCL with one rank, for machines with one GPU: the library loads and starts, a collective is captured and launched
// repeatedly, and everything is destroyed.

class NcclOneGpu : public test::OnGpu {
 protected:
  void SetUp() override {
    OnGpu::SetUp();
    if (!IsSkipped() && !kWithNccl) GTEST_SKIP() << "a build without NCCL";
  }
};

template <class F>
bool soon(const F& done) {
  using Clock = std::chrono::steady_clock;
  for (const auto start = Clock::now(); Clock::now() - start < std::chrono::seconds(60);) {
    if (done()) return true;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return false;
}

TEST_F(NcclOneGpu, InitializesCapturesAndShutsDown) {
  if constexpr (kWithCuda && kWithNccl) {
    prepare_for_nccl();
    const std::unique_ptr<NcclApi> nccl = real_nccl(0, 1);
    nccl->begin(1, nccl->make_id(), 0);
    ASSERT_TRUE(soon([&] { return nccl->queued(); }));
    Tensor x = Tensor::zeros({1000}, DType::float32, arena), sum = Tensor::zeros({1000}, DType::float32, arena);
    const auto add_up = [&] {
      nccl->after(*arena);
      nccl->all_reduce(x.address(), sum.address(), 1000, DType::float32, Reduction::sum);
    };
    add_up();
    ASSERT_TRUE(soon([&] { return nccl->queued(); }));
    nccl->join(*arena, nccl->point());
    cuda::synchronize(*arena);
    {
      const cuda::Graph graph(arena, [&] {
        add_up();
        soon([&] { return nccl->queued(); });
        nccl->join(*arena, nccl->point());
      });
      for (const float value : {3.0f, 5.0f}) {
        x.fill(value);
        graph.launch();
        EXPECT_EQ(sum.on_host().to_vector<float>(), std::vector<float>(1000, value));
      }
    }  // graphs must be destroyed before communicators
    EXPECT_TRUE(soon([&] { return nccl->finished(); }));
    nccl->abort();
  }
}

}  // namespace
}  // namespace tessera
