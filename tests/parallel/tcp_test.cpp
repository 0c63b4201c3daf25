// Ranks over TCP do what thread ranks do, to the bit, and end when one of them fails.
#include "tests/parallel/tcp.h"

#include <gtest/gtest.h>
#include <sys/resource.h>

#include <latch>

#include "tensor/random.h"
#include "tests/parallel/mpi/mpi_checks.h"

namespace tessera {
namespace {

using test::array_of;
using test::values;
using Texts = std::vector<std::string>;

// Runs the ranks over TCP and returns what each of them threw.
Texts over_tcp(int ranks, const std::function<void(Communicator&)>& body, double timeout_s = 30) {
  const std::string address = test::free_address();
  return test::run_ranks(ranks, [&](int rank) {
    launch({.backend = Backend::tcp,
            .ranks = ranks,
            .threads_per_rank = 1,
            .timeout_s = timeout_s,
            .rendezvous = address,
            .rank = rank},
           body);
  });
}

TEST(Tcp, OperationsGroupsAndMessagesAreRight) {
  for (const int n : {1, 2, 3}) {
    const Texts errors = over_tcp(n, [&](Communicator& world) {
      for (const Algorithm algorithm : test::kByMessages) {
        world.set_algorithm(algorithm);
        for (const int64_t size : {1, 17, 5003})
          for (const DType dtype : {DType::float32, DType::bfloat16, DType::int64}) {
            test::check_sums(world, size, dtype, make_arena());
            test::check_roots(world, size, dtype, make_arena());
          }
      }
      const auto reversed = world.split(7, -world.rank(), "reversed");
      test::expect(reversed->rank() == n - 1 - world.rank() && reversed->world_rank(0) == n - 1, "the key's order");
      const auto pairs = world.split(world.rank() / 2, 0, "pairs"), again = world.split(world.rank() / 2, 0, "again");
      std::vector<Pending> pending;
      std::vector<Tensor> x;
      for (int i = 0; i < 12; ++i) {  // arrays of one size, so that groups could be taken for each other
        x.push_back(array_of(world.rank(), 3000, DType::float32, make_arena()));
        pending.push_back((i % 3 == 0 ? world : i % 3 == 1 ? *pairs : *again).start_all_reduce(x.back()));
      }
      for (Pending& p : pending) p.wait();
      for (size_t i = 0; i < x.size(); i += 3) test::expect(values(x[i]) == test::summed(n, 3000), "in the background");
      test::expect(values(x[1]) == values(x[2]), "two groups of the same ranks");
    });
    EXPECT_EQ(errors, Texts(static_cast<size_t>(n)));
  }
  EXPECT_EQ(test::failures, 0);
}

TEST(Tcp, SumsHaveTheBitsOfThreadRanks) {
  constexpr int64_t kSize = 10'007;
  const auto sum_of = [&](Communicator& world) {
    const Tensor x = Tensor::empty({kSize}, DType::float32, make_arena());
    for (int64_t i = 0; i < kSize; ++i)
      x.data<float>()[i] =
          static_cast<float>(Philox::named(7, "order").normal(static_cast<uint64_t>(3 * i + world.rank())));
    world.all_reduce(x);
    return values(x);
  };
  for (const Algorithm algorithm : test::kByMessages) {
    std::vector<double> expected;
    launch({.ranks = 3, .algorithm = algorithm}, [&](Communicator& world) {
      if (const auto sum = sum_of(world); world.rank() == 0) expected = sum;
    });
    const Texts errors = over_tcp(3, [&](Communicator& world) {
      world.set_algorithm(algorithm);
      EXPECT_EQ(sum_of(world), expected) << name_of(algorithm);
    });
    EXPECT_EQ(errors, Texts(3));
  }
}

TEST(Tcp, ARankThatFailsIsNamedToTheOthers) {
  const auto zeros = [](int64_t n) { return Tensor::zeros({n}, DType::float32, make_arena()); };
  std::latch others(2);  // or rank 1 fails while they still exchange what a world begins with
  Texts errors = over_tcp(3, [&](Communicator& world) {
    if (world.rank() == 1) {
      others.wait();
      throw std::runtime_error("the cause");
    }
    others.count_down();
    world.all_reduce(zeros(100));
  });
  EXPECT_EQ(errors[1], "[rank 1] the cause");
  for (const size_t r : {0, 2}) {
    EXPECT_NE(errors[r].find("all_reduce of 400 bytes"), std::string::npos) << errors[r];
    EXPECT_NE(errors[r].find("rank 1 has failed: the cause"), std::string::npos) << errors[r];
  }
  errors = over_tcp(2, [&](Communicator& world) { world.all_reduce(zeros(100 + world.rank())); });
  EXPECT_NE((errors[0] + errors[1]).find("recv of 20"), std::string::npos) << errors[0] << "\n" << errors[1];
  errors = over_tcp(
      2,
      [&](Communicator& world) {
        if (world.rank() == 1) std::this_thread::sleep_for(std::chrono::milliseconds(2500));
        world.barrier();
      },
      1);
  EXPECT_NE(errors[0].find("rank 1 sent nothing within 1 s"), std::string::npos) << errors[0];
}

// A process that is killed closes its connections without a word; what is no message is not obeyed.
TEST(Tcp, ABrokenConnectionIsARankThatFailed) {
  const auto after = [](const std::string& bytes) {
    const std::string address = test::free_address();
    Texts errors = test::run_ranks(2, [&](int rank) {
      const Meeting meeting{.address = address, .rank = rank, .ranks = 2, .timeout_s = 10};
      if (rank == 1) {
        const Met met = meet(meeting);
        write_all(met.peers[0].get(), bytes.data(), bytes.size(), Deadline(5));
        return;
      }
      TcpTransport all(std::make_shared<TcpWorld>(meet(meeting), 0, 10));
      std::array<std::byte, 8> there{};
      all.recv(1, 0, there.data(), 8);
    });
    return errors[0];
  };
  EXPECT_EQ(after(""), "recv of 8 bytes: rank 1 has failed: its connection has ended");
  TcpWorld::Head head{.bytes = 8};
  const auto text = [&] { return std::string(reinterpret_cast<const char*>(&head), sizeof(head)); };
  EXPECT_EQ(after(text() + "12345678"), "");
  EXPECT_EQ(after(text() + "123"), "recv of 8 bytes: rank 1 has failed: its connection has ended");
  head.bytes = -8;
  EXPECT_EQ(after(text()), "recv of 8 bytes: rank 1 has failed: what it sends is no message");
  head.bytes = int64_t{1} << 60;
  EXPECT_EQ(after(text()), "recv of 8 bytes: rank 1 has failed: what it sends is no message");
  head.bytes = int64_t{1} << 40;  // memory is for what comes, not for what is announced
  rusage before{}, behind{};
  getrusage(RUSAGE_SELF, &before);
  EXPECT_EQ(after(text() + "123"), "recv of 8 bytes: rank 1 has failed: its connection has ended");
  getrusage(RUSAGE_SELF, &behind);
  EXPECT_LT(behind.ru_maxrss - before.ru_maxrss, 256 << 10) << "KiB";
  EXPECT_EQ(after(std::string(24, '\x7f')), "recv of 8 bytes: rank 1 has failed: what it sends is no message");
}

}  // namespace
}  // namespace tessera
