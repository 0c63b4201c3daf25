// The exchange through shared memory, by threads that play the processes: so that ThreadSanitizer sees it.
#include "parallel/comm/shared_exchange.h"

#include "parallel/comm/fake_transport.h"
#include "tests/parallel/arrays.h"
#include "tests/support/errors.h"

namespace tessera {
namespace {

using test::array_of;
using test::cut;
using test::summed;
using test::values;

// The memory that a group of threads shares, each with its own view of it.
struct Shared {
  explicit Shared(int n) : memory(std::make_unique<SharedPlace[]>(static_cast<size_t>(n))) {
    for (int r = 0; r < n; ++r) ranks.push_back(std::make_unique<FakeTransport>(r, n));
  }
  SharedExchange exchange(int rank, PeerMemory* peers = nullptr) const {
    std::vector<SharedPlace*> places;
    for (size_t r = 0; r < ranks.size(); ++r) places.push_back(&memory[r]);
    return SharedExchange(*ranks[static_cast<size_t>(rank)], std::move(places), {.timeout_s = 20, .crowded = true},
                          peers);
  }
  std::unique_ptr<SharedPlace[]> memory;
  std::vector<std::unique_ptr<Transport>> ranks;
};

Call call_of(Op op, DType dtype, int64_t count, const Tensor& in, const Tensor& out) {
  return {.op = op, .dtype = dtype, .count = count, .in = in.raw(), .out = out.raw(), .region = &in.arena()->region()};
}

void check(SharedExchange& shared, int me, int64_t count, DType dtype, const ArenaPtr& arena) {
  const int n = shared.ranks();
  const std::vector<double> total = summed(n, count);
  const Tensor mine = array_of(me, count, dtype, arena), x = mine.clone();
  const Tensor part = Tensor::empty({piece(count, n, me).size()}, dtype, arena),
               whole = Tensor::zeros({count}, dtype, arena);
  EXPECT_EQ(shared.run(call_of(Op::all_reduce, dtype, count, x, x)),
            sent_directly({.op = Op::all_reduce, .dtype = dtype, .count = count}, n, me));
  EXPECT_EQ(values(x), total);
  shared.run(call_of(Op::reduce_scatter, dtype, count, mine, part));
  EXPECT_EQ(values(part), cut(total, n, me));
  shared.run(call_of(Op::all_gather, dtype, count, part, whole));
  EXPECT_EQ(values(whole), total);
  shared.run({.op = Op::barrier});
}

TEST(SharedExchange, MovesWhatThreadRanksMove) {
  for (const int n : {2, 3, 5}) {
    const Shared memory(n);
    launch({.ranks = n, .timeout_s = 20}, [&](Communicator& world) {
      SharedExchange shared = memory.exchange(world.rank());
      const ArenaPtr arena = make_arena();
      for (const int64_t count : {0, 1, 100, 32'768, 100'001})
        for (const DType dtype : {DType::float32, DType::bfloat16, DType::float64})
          check(shared, world.rank(), count, dtype, arena);
    });
  }
}

// Each rank has a mapping of its own of the others' arrays, as processes have; nothing of these goes through the
// window.
TEST(SharedExchange, LargeArraysStayInPlace) {
  for (const int n : {2, 3, 5}) {
    const Shared memory(n);
    launch({.ranks = n, .timeout_s = 20}, [&](Communicator& world) {
      PeerMemory peers;
      SharedExchange shared = memory.exchange(world.rank(), &peers);
      const ArenaPtr arena = make_shared_arena();
      for (const int64_t count : {32'768, 100'001})
        for (const DType dtype : {DType::float32, DType::bfloat16, DType::float64})
          check(shared, world.rank(), count, dtype, arena);
      for (const auto& slot : memory.memory[static_cast<size_t>(world.rank())].slots)
        EXPECT_EQ(std::count(slot.begin(), slot.end(), std::byte{0}), kSlotBytes);
    });
  }
}

// An array of one rank that nobody can map goes through the window, and so does a small array.
TEST(SharedExchange, OneArrayOutOfReachIsEnough) {
  const Shared memory(3);
  launch({.ranks = 3, .timeout_s = 20}, [&](Communicator& world) {
    PeerMemory peers;
    SharedExchange shared = memory.exchange(world.rank(), &peers);
    const ArenaPtr reached = make_shared_arena(), own = make_arena();
    for (const int64_t count : {0, 1, 100, 5000, 100'001})
      for (int round = 0; round < 4; ++round)
        check(shared, world.rank(), count, DType::float32, round == world.rank() ? own : reached);
  });
}

// An arena that is gone has given its memory back, though somebody has it mapped.
TEST(SharedExchange, MemoryOfAnArenaThatIsGoneIsFree) {
  PeerMemory peers;
  ArenaPtr arena = make_shared_arena();
  std::optional<Tensor> x = Tensor::zeros({1 << 20}, DType::float32, arena);
  x->data<float>()[1000] = 3;
  const Reach reach = reach_of(call_of(Op::all_reduce, DType::float32, x->numel(), *x, *x));
  ASSERT_TRUE(reach.known());
  const auto* const seen = reinterpret_cast<const volatile float*>(peers.base(reach) + reach.in);
  EXPECT_EQ(seen[1000], 3);
  x.reset();
  arena.reset();
  EXPECT_EQ(seen[1000], 0);
}

TEST(SharedExchange, CallsThatDifferAreNamed) {
  const Shared memory(2);
  const auto body = [&](Communicator& world) {
    SharedExchange shared = memory.exchange(world.rank());
    const Tensor x = Tensor::zeros({100 + world.rank()}, DType::float32, make_arena());
    shared.run(call_of(Op::all_reduce, DType::float32, x.numel(), x, x));
  };
  const std::string what = error_of([&] { launch({.ranks = 2, .timeout_s = 20}, body); }, Status::communication);
  EXPECT_NE(what.find("asks for all_reduce of 40"), std::string::npos) << what;
}

}  // namespace
}  // namespace tessera
