// The asynchronous parameter server when something is wrong: nothing hangs when a worker ends early or throws, the
// cause is named, and a record that does not fit is refused.
#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <vector>

#include "parallel/async_server.h"
#include "parallel/comm/launch.h"
#include "tests/parallel/async_training.h"
#include "tests/parallel/tiny_gpt.h"

namespace tessera {
namespace {

using namespace test::async;

TEST(AsyncServerFailure, AWaitLongerThanTheTimeoutIsNoFailureOfWhoHasEnded) {
  launch({.ranks = 2, .threads_per_rank = 1, .timeout_s = 0.8}, [&](Communicator& world) {
    Training out;
    out.pushed = out.pulled = out.parameters = out.moments = std::vector<int64_t>(2);
    std::vector<std::byte> values;
    train_rank({.ranks = 2,
                .staleness = 0,
                .steps = 4,
                .before =
                    [](int worker, int64_t) {
                      if (worker == 0) sleep_ms(300);
                      return worker == 0;
                    }},
               world, out, values);
  });
}

TEST(AsyncServerFailure, AWorkerThatThrowsEndsTheOthersWithItsCause) {
  for (int servers = 1; servers <= 3; ++servers)
    for (int guilty = 0; guilty < 3; ++guilty)
      for (const int64_t staleness : {0, 5}) try {
          train({.servers = servers, .staleness = staleness, .before = [=](int worker, int64_t clock) {
                   if (worker == guilty && clock == 2) throw Error("the cause", Status::input);
                   return true;
                 }});
          ADD_FAILURE() << "nothing was thrown";
        } catch (const Error& e) {
          EXPECT_EQ(std::string(e.what()), "[rank " + std::to_string(guilty) + "] the cause");
          EXPECT_EQ(e.status(), Status::input);
        }
}

TEST(AsyncServerFailure, ALearningRateThatThrowsInAServersThreadEndsEveryone) {
  try {
    launch({.ranks = 3, .threads_per_rank = 1, .timeout_s = 20}, [&](Communicator& world) {
      const ArenaPtr arena = make_arena();
      Gpt model(test::tiny_gpt(0));
      AsyncServer server(model, world, arena, {.servers = 1},
                         {.steps = 50,
                          .staleness = 50,
                          .optimizer = [](const auto& units) { return make_optimizer("sgd", units, {}); },
                          .lr = [](int64_t applied) -> double {
                            if (applied == 7) throw Error("no rate");
                            return 0.01;
                          }});
      server.run(
          [&](int worker, int64_t clock) {
            return test::learn(model, test::sequences(model.config, clock, worker, 1, arena), {}, 10);
          },
          {});
    });
    ADD_FAILURE() << "nothing was thrown";
  } catch (const Error& e) {
    EXPECT_STREQ(e.what(), "[rank 0] no rate");
  }
}

TEST(AsyncServerFailure, AWorkerThatNeverPushesIsNamed) {
  try {
    launch({.ranks = 3, .threads_per_rank = 1, .timeout_s = 1}, [&](Communicator& world) {
      Training out;
      out.pushed = out.pulled = out.parameters = out.moments = std::vector<int64_t>(3);
      std::vector<std::byte> values;
      train_rank({.staleness = 0,
                  .before =
                      [](int worker, int64_t clock) {
                        if (worker == 2 && clock == 1) sleep_ms(1400);
                        return true;
                      }},
                 world, out, values);
    });
    ADD_FAILURE() << "nothing was thrown";
  } catch (const Error& e) {
    EXPECT_EQ(std::string(e.what()), "[rank 0] world axis, recv of 48 bytes: rank 2 sent nothing within 1 s");
    EXPECT_EQ(e.status(), Status::communication);
  }
}

std::string refusal(const Plan& plan) {
  try {
    train(plan);
  } catch (const Error& e) {
    return e.what();
  }
  return "accepted";
}

TEST(AsyncServerFailure, ARecordThatDoesNotFitIsRefused) {
  const Scratch scratch;
  const std::string file = scratch.file("record");
  const Plan plan{.steps = 3, .record = file};
  train(plan);
  const auto changed = [&](auto change) {
    Plan other = plan;
    other.record.clear();
    other.replay = file;
    change(other);
    return refusal(other);
  };
  EXPECT_EQ(changed([](Plan&) {}), "accepted");
  const std::string was = file + " was recorded with 3 ranks, 1 servers, staleness 1 and 3 steps; this run has ";
  EXPECT_NE(changed([](Plan& p) { p.ranks = 2; }).find(was + "2 ranks"), std::string::npos);
  EXPECT_NE(changed([](Plan& p) { p.servers = 2; }).find(was + "3 ranks, 2 servers"), std::string::npos);
  EXPECT_NE(changed([](Plan& p) { p.staleness = 2; }).find("this run has 3 ranks, 1 servers, staleness 2"),
            std::string::npos);
  EXPECT_NE(changed([](Plan& p) { p.steps = 4; }).find("and 4 steps"), std::string::npos);
  EXPECT_NE(changed([&](Plan& p) { p.replay = file + "s"; }).find("cannot be read"), std::string::npos);
  EXPECT_NE(changed([&](Plan& p) {
              p.before = [](int worker, int64_t clock) { return worker != 1 || clock < 1; };
            }).find("has 3 steps of worker 1, which is at its end after 1"),
            std::string::npos);
  EXPECT_NE(refusal({.staleness = -1}).find("--staleness: expected"), std::string::npos);
  EXPECT_NE(refusal({.servers = 4}).find("--servers: expected 1 to 3"), std::string::npos);
  EXPECT_NE(refusal({.steps = 1, .record = scratch.file("no/such/place")}).find("cannot be written"),
            std::string::npos);
}

TEST(AsyncServerFailure, ALossThatIsNoNumberEndsTheRun) {
  const std::string what = refusal({.rate = 1e30});
  EXPECT_NE(what.find("the loss or the gradient norm is not finite"), std::string::npos) << what;
}

}  // namespace
}  // namespace tessera
