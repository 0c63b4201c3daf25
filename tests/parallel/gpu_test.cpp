// Ranks that share a GPU: every operation by every algorithm leaves the bits that it leaves on the CPU.
#include "tests/support/gpu.h"

#include <cstring>

#include "autograd/ops.h"
#include "parallel/placement.h"
#include "tests/parallel/arrays.h"
#include "tests/support/errors.h"
#include "verify/defects/transports.h"

namespace tessera {
namespace {

using CommGpu = test::OnGpu;

constexpr DType kDTypes[] = {DType::float64, DType::float32, DType::bfloat16, DType::int32, DType::int64};

// The array that a rank brings: fractions, whose sums depend on their order.
Tensor brought(int rank, const Shape& shape, DType dtype, const ArenaPtr& arena) {
  const Philox random = Philox::named(31, "rank " + std::to_string(rank));
  std::vector<double> v(static_cast<size_t>(shape.numel()));
  for (size_t i = 0; i < v.size(); ++i) v[i] = 100 * random.normal(i);
  return Tensor::of<double>(v, shape, make_arena()).to(dtype).to(arena);
}

std::vector<std::byte> bytes_of(const Tensor& t) {
  const Tensor here = t.on_host().contiguous();
  return {here.raw(), here.raw() + here.nbytes()};
}

using Results = std::vector<std::vector<std::byte>>;
using Body = std::function<void(Communicator& world, const ArenaPtr& arena, Results& results)>;

struct Ran {
  std::vector<Results> results;  // results by rank
  std::vector<OpCounts> counts;
};

Ran run(const LaunchOptions& options, Device device, const Body& body) {
  const auto ranks = static_cast<size_t>(options.ranks);
  Ran ran{std::vector<Results>(ranks), std::vector<OpCounts>(ranks)};
  launch(options, [&](Communicator& world) {
    const auto rank = static_cast<size_t>(world.rank());
    const ArenaPtr arena = make_arena(device);
    body(world, arena, ran.results[rank]);
    ran.counts[rank] = world.counts();
    world.barrier();
    EXPECT_EQ(arena->total().live, 0) << name_of(device);
  });
  return ran;
}

// The same on both devices: results, calls and bytes sent.
void expect_same(const LaunchOptions& options, const Body& body) {
  const Ran cpu = run(options, Device::cpu, body), gpu = run(options, Device::cuda, body);
  EXPECT_TRUE(gpu.results == cpu.results) << name_of(options.algorithm) << ", " << options.ranks << " ranks";
  EXPECT_TRUE(gpu.counts == cpu.counts);
}

void every_operation(Communicator& c, const ArenaPtr& arena, int64_t n, DType dtype, Results& out) {
  const int me = c.rank(), ranks = c.size();
  const Tensor mine = brought(me, {n}, dtype, arena);
  const int64_t own = piece(n, ranks, me).size();
  for (const Reduction reduction : {Reduction::sum, Reduction::max}) {
    const Tensor x = mine.clone(), part = Tensor::empty({own}, dtype, arena);
    c.all_reduce(x, reduction);
    c.reduce_scatter(mine, part, reduction);
    out.push_back(bytes_of(x));
    out.push_back(bytes_of(part));
  }
  const Tensor part = brought(me, {own}, dtype, arena), whole = Tensor::zeros({n}, dtype, arena);
  c.all_gather(part, whole);
  out.push_back(bytes_of(whole));
  for (int root = 0; root < ranks; ++root) {
    const Tensor x = mine.clone(), y = mine.clone(), got = Tensor::zeros({own}, dtype, arena);
    c.broadcast(x, root);
    c.reduce(y, root);
    Tensor all = me == root ? Tensor::zeros({n}, dtype, arena) : Tensor::meta({n}, dtype);
    c.gather(part, all, root);
    c.scatter(me == root ? whole : all, got, root);
    for (const Tensor& t : {x, y, got}) out.push_back(bytes_of(t));
    if (me == root) out.push_back(bytes_of(all));
  }
  const Tensor in = brought(me, {3 * ranks}, dtype, arena), turned = Tensor::zeros({3 * ranks}, dtype, arena);
  c.all_to_all(in, turned);
  EXPECT_TRUE(test::exchanges_uneven(c, dtype, arena));
  out.push_back(bytes_of(turned));
  out.push_back(bytes_of(mine));  // left alone
}

TEST_F(CommGpu, EveryOperationByEveryAlgorithm) {
  for (const int ranks : {1, 2, 3, 4})
    for (const Algorithm algorithm : test::kByMessages)
      expect_same({.ranks = ranks, .timeout_s = 60, .algorithm = algorithm},
                  [](Communicator& world, const ArenaPtr& memory, Results& out) {
                    for (const int64_t n : {1, 2, 17, 1000, 5003})
                      for (const DType dtype : kDTypes) every_operation(world, memory, n, dtype, out);
                  });
}

// Pieces of the whole in its own memory, and arrays that begin at any element.
TEST_F(CommGpu, PiecesMayLieInsideTheWhole) {
  for (const Algorithm algorithm : {Algorithm::direct, Algorithm::ring, Algorithm::root})
    expect_same({.ranks = 3, .timeout_s = 60, .algorithm = algorithm},
                [](Communicator& world, const ArenaPtr& memory, Results& out) {
                  for (const int64_t first : {0, 1, 5, 8}) {
                    const Tensor x = brought(world.rank(), {2000}, DType::bfloat16, memory).narrow(0, first, 1000);
                    const Range own = piece(1000, 3, world.rank());
                    const Tensor part = x.narrow(0, own.begin, own.size());
                    world.reduce_scatter(x, part);
                    out.push_back(bytes_of(x));
                    world.all_gather(part, x);
                    out.push_back(bytes_of(x));
                  }
                });
}

TEST_F(CommGpu, MessagesKeepTheirOrderByTag) {
  expect_same({.ranks = 3, .timeout_s = 60}, [](Communicator& world, const ArenaPtr& memory, Results& out) {
    const int next = (world.rank() + 1) % 3, previous = (world.rank() + 2) % 3;
    for (int i = 0; i < 10; ++i) {
      Tensor x = brought(world.rank() + 10 * i, {100 + i}, DType::float32, memory);
      world.send(x, next, i % 2);
      x.fill(0);  // the message keeps the numbers from before
    }
    for (const int i : {1, 0, 3, 5, 2, 7, 4, 6, 8, 9}) {
      const Tensor x = Tensor::zeros({100 + i}, DType::float32, memory);
      world.recv(x, previous, i % 2);
      out.push_back(bytes_of(x));
    }
  });
}

TEST_F(CommGpu, RunsInTheBackground) {
  for (const Algorithm algorithm : test::kByMessages)
    expect_same({.ranks = 4, .timeout_s = 60, .algorithm = algorithm},
                [](Communicator& world, const ArenaPtr& memory, Results& out) {
                  const auto row = world.split(world.rank() / 2, world.rank(), "row");
                  std::vector<Tensor> x;
                  std::vector<Pending> pending;
                  for (int i = 0; i < 4; ++i) {
                    x.push_back(brought(world.rank() + i, {3000 + i}, DType::float32, memory));
                    pending.push_back(world.start_all_reduce(x.back()));
                    const Tensor beside = brought(world.rank(), {500}, DType::float32, memory);
                    row->all_reduce(beside);
                    out.push_back(bytes_of(beside));
                  }
                  for (size_t i = 0; i < x.size(); ++i) {
                    pending[i].wait();
                    out.push_back(bytes_of(x[i]));
                  }
                });
}

// Conversions between placements are made of these operations and of copies of corners.
TEST_F(CommGpu, ArraysAreRedistributed) {
  const std::array<Placement, 5> all{R, I, P, S(0), S(1)};
  expect_same({.ranks = 3, .timeout_s = 60}, [&](Communicator& world, const ArenaPtr& memory, Results& out) {
    // Uneven pieces of both dims, and even ones of the second: odd rows, and rows of whole words.
    for (const auto& [whole, dtype] : {std::pair{Shape{7, 8}, DType::float32},
                                       {Shape{5, 9}, DType::float32},
                                       {Shape{4, 96}, DType::float32},
                                       {Shape{4, 96}, DType::bfloat16}})
      for (const Placement& from : all)
        for (const Placement& to : all) {
          Shape shape = whole;
          const bool cut = from.kind == Placement::Kind::sharded;
          if (cut) shape[from.dim] = piece(shape[from.dim], 3, world.rank()).size();
          const Placement source = cut ? S(from.dim, whole[from.dim]) : from;
          const Tensor x = brought(world.rank(), shape, dtype, memory);
          out.push_back(bytes_of(redistribute(x.clone(), world, source, to)));
          out.push_back(bytes_of(start_redistribute(x.clone(), world, source, to).wait()));
        }
  });
}

std::string failure(const LaunchOptions& options, const std::function<void(Communicator&)>& body) {
  return error_of([&] { launch(options, body); }, Status::communication);
}

TEST_F(CommGpu, ARankThatFailsEndsTheOthers) {
  const std::string what = failure({.ranks = 3, .timeout_s = 20}, [](Communicator& world) {
    const ArenaPtr gpu = make_arena(Device::cuda);
    const Tensor x = brought(world.rank(), {1000}, DType::float32, gpu);
    world.all_reduce(x);
    if (world.rank() == 1) throw CommError("the cause");
    world.all_reduce(x);
  });
  EXPECT_EQ(what, "[rank 1] the cause");
  const std::string late = failure({.ranks = 2, .timeout_s = 0.2}, [](Communicator& world) {
    const ArenaPtr gpu = make_arena(Device::cuda);
    const Tensor x = brought(world.rank(), {1000}, DType::float32, gpu);
    if (world.rank() == 0) world.recv(x, 1);
  });
  EXPECT_NE(late.find("recv of 4000 bytes: rank 1 sent nothing within 0.2 s"), std::string::npos) << late;
}

TEST_F(CommGpu, DevicesMustBeTheSame) {
  const auto tensor = [](Communicator& world) {
    return brought(world.rank(), {100}, DType::float32, make_arena(world.rank() == 0 ? Device::cpu : Device::cuda));
  };
  const std::string reduce =
      failure({.ranks = 2, .timeout_s = 20}, [&](Communicator& world) { world.all_reduce(tensor(world)); });
  EXPECT_NE(reduce.find("all_reduce of 400 bytes (float32, on a GPU)"), std::string::npos) << reduce;
  const std::string message = failure({.ranks = 2, .timeout_s = 20}, [&](Communicator& world) {
    if (world.rank() == 0)
      world.send(tensor(world), 1);
    else
      world.recv(tensor(world), 0);
  });
  EXPECT_NE(message.find("rank 0 sent from the host's memory; expected a GPU's"), std::string::npos) << message;
}

// A lost message and a rank that stays away are found as they are on the CPU.
TEST_F(CommGpu, FaultsAreFound) {
  LaunchOptions o{.ranks = 2, .timeout_s = 0.5};
  o.around = with_faults({{1, {{.kind = Fault::Kind::drop}}}});
  const std::string lost = failure(o, [](Communicator& world) {
    const ArenaPtr gpu = make_arena(Device::cuda);
    const Tensor x = brought(world.rank(), {10}, DType::float32, gpu);
    if (world.rank() == 1)
      world.send(x, 0);
    else
      world.recv(x, 1);
  });
  EXPECT_NE(lost.find("sent nothing within"), std::string::npos) << lost;
  const std::string away = failure(o, [](Communicator& world) {
    world.all_reduce(brought(world.rank(), {10}, DType::float32, make_arena(Device::cuda)));
  });
  EXPECT_NE(away.find("did not come within"), std::string::npos) << away;
}

}  // namespace
}  // namespace tessera
