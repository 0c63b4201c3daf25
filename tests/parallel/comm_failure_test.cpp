// Failures of a communicator: a rank fails, is late, or asks for something else than the others.

#include "tensor/random.h"
#include "tests/parallel/arrays.h"
#include "tests/support/errors.h"
#include "verify/defects/transports.h"

namespace tessera {
namespace {

using test::array_of;
using test::summed;
using test::values;

// Returns the message of the error that launch() throws when the ranks run `body`.
std::string failure(const LaunchOptions& options, const std::function<void(Communicator&)>& body) {
  return error_of([&] { launch(options, body); }, Status::communication);
}

TEST(CommFailure, ARankThatThrowsEndsTheOthers) {
  const std::string what = failure({.ranks = 4, .timeout_s = 20}, [](Communicator& world) {
    if (world.rank() == 2) throw CommError("the cause");
    world.barrier();
  });
  EXPECT_EQ(what, "[rank 2] the cause");
}

TEST(CommFailure, ARankThatThrowsANumberEndsTheOthers) {
  const std::string what = failure({.ranks = 4, .timeout_s = 20}, [](Communicator& world) {
    if (world.rank() == 2) throw 42;
    world.barrier();
  });
  EXPECT_EQ(what, "[rank 2] something was thrown that is no std::exception");
}

TEST(CommFailure, ARankThatThrowsWithWorkInTheBackgroundEndsTheOthers) {
  const std::string what = failure({.ranks = 3, .timeout_s = 20}, [](Communicator& world) {
    const ArenaPtr arena = make_arena();
    if (world.rank() == 2) {
      Pending p = world.start_all_reduce(Tensor::zeros({100}, DType::float32, arena));
      throw CommError("the cause");
    }
    world.barrier();
  });
  EXPECT_TRUE(what == "[rank 2] the cause" || what.find("asks for") != std::string::npos) << what;
}

TEST(CommFailure, ARankThatLeavesWithWorkInTheBackgroundIsNamed) {
  const std::string what = failure({.ranks = 2, .timeout_s = 20}, [](Communicator& world) {
    if (world.rank() == 0) {
      const Pending forgotten = world.start_all_reduce(Tensor::zeros({100'000}, DType::float32, make_arena()));
      return;
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
    world.barrier();
  });
  EXPECT_EQ(what, "[rank 0] ended while its communication was still in the background");
}

TEST(CommFailure, ARankThatDoesNotComeIsNamed) {
  const std::string what = failure({.ranks = 3, .timeout_s = 0.3}, [](Communicator& world) {
    const ArenaPtr arena = make_arena();
    world.all_reduce(Tensor::zeros({10}, DType::float32, arena));
    if (world.rank() != 1) world.all_reduce(Tensor::zeros({100}, DType::float32, arena));
  });
  EXPECT_NE(
      what.find("world axis, all_reduce of 400 bytes (float32): rank 1 did not come within 0.3 s; the last it came "
                "to was all_reduce of 40 bytes (float32)"),
      std::string::npos)
      << what;
}

TEST(CommFailure, CallsThatDifferAreNamed) {
  const std::string what = failure({.ranks = 2, .timeout_s = 20}, [](Communicator& world) {
    const ArenaPtr arena = make_arena();
    const Tensor x = Tensor::zeros({100}, DType::float32, arena);
    if (world.rank() == 0)
      world.all_reduce(x);
    else
      world.broadcast(x, 0);
  });
  EXPECT_NE(what.find("all_reduce of 400 bytes (float32)"), std::string::npos) << what;
  EXPECT_NE(what.find("broadcast of 400 bytes (float32, root 0)"), std::string::npos) << what;
}

TEST(CommFailure, ASilentSenderIsNamed) {
  const std::string what = failure({.ranks = 2, .timeout_s = 0.3}, [](Communicator& world) {
    if (world.rank() == 1) world.recv(Tensor::zeros({10}, DType::float32, make_arena()), 0);
  });
  EXPECT_EQ(what, "[rank 1] world axis, recv of 40 bytes: rank 0 sent nothing within 0.3 s");
}

TEST(CommFailure, WrongArgumentsAreRefusedBeforeAnythingIsSent) {
  launch({.ranks = 2, .timeout_s = 20}, [](Communicator& world) {
    const ArenaPtr arena = make_arena();
    const Tensor x = Tensor::zeros({4, 4}, DType::float32, arena), y = Tensor::zeros({5}, DType::float32, arena);
    EXPECT_THROW(world.all_reduce(x.transpose(0, 1)), Error);
    EXPECT_THROW(world.reduce_scatter(x, y), Error);
    EXPECT_THROW(world.broadcast(x, 2), Error);
    EXPECT_THROW(world.all_to_all(x, x), Error);
    const std::vector<int64_t> none(static_cast<size_t>(world.size()));
    EXPECT_THROW(world.all_to_all(x, x, none, none), Error);  // which is not all of x
    EXPECT_THROW((void)world.start_all_to_all(x, x, none, none), Error);
    EXPECT_THROW(world.send(x, world.rank()), Error);
    EXPECT_EQ(world.sum(1), 2);
  });
}

// Faults at random calls of random ranks: every run ends, late ranks change nothing, and the culprit is named.
TEST(CommFailure, NoPlantedFaultHangs) {
  const Philox random = Philox::named(1, "faults");
  for (uint64_t trial = 0; trial < 40; ++trial) {
    const int ranks = 2 + static_cast<int>(random.below(3, 4 * trial)),
              culprit = static_cast<int>(random.below(static_cast<uint64_t>(ranks), 4 * trial + 1));
    const auto kind = static_cast<Fault::Kind>(random.below(3, 4 * trial + 2));
    const Algorithm algorithm = static_cast<Algorithm>(random.below(4, 4 * trial + 3));
    const Fault fault{kind, static_cast<int64_t>(trial % 12), 0.05};
    const LaunchOptions options{
        .ranks = ranks, .timeout_s = 0.5, .algorithm = algorithm, .around = with_faults({{culprit, {fault}}})};
    const auto body = [](Communicator& world) {
      const ArenaPtr arena = make_arena();
      for (int i = 0; i < 20; ++i) {
        Tensor x = array_of(world.rank(), 500, DType::float32, arena);
        world.start_all_reduce(x).wait();
        EXPECT_EQ(values(x), summed(world.size(), 500));
      }
    };
    if (kind == Fault::Kind::delay)
      launch(options, body);
    else if (kind == Fault::Kind::fail) {
      const std::string what = failure(options, body), end = "a planted fault at call " + std::to_string(fault.call);
      EXPECT_TRUE(what.starts_with("[rank " + std::to_string(culprit) + "] world axis, ") && what.ends_with(end))
          << what;
    } else
      EXPECT_NE(failure(options,
                        [](Communicator& world) {  // the one that dropped out computes with what it has
                          const ArenaPtr arena = make_arena();
                          for (int i = 0; i < 20; ++i)
                            world.all_reduce(array_of(world.rank(), 500, DType::float32, arena));
                        }),
                "nothing was thrown");
  }
}

TEST(CommFailureDeathTest, ARankThatNeverStopsEndsTheProcess) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_EXIT(launch({.ranks = 2, .timeout_s = 0.2},
                     [](Communicator& world) {
                       if (world.rank() == 1) throw CommError("the cause");
                       for (std::atomic<bool> forever{true}; forever;)
                         std::this_thread::sleep_for(std::chrono::milliseconds(10));
                     }),
              testing::ExitedWithCode(3),
              "tessera: .rank 1. the cause .and another rank does not stop: ending the process.");
}

}  // namespace
}  // namespace tessera
