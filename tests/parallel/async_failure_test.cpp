// The asynchronous parameter server when something goes wrong: a worker ends early, is slow, or throws; a record does
// not fit. Nothing hangs, and the cause is named.

#include "tests/parallel/async_training.h"
#include "tests/support/errors.h"

namespace tessera {
namespace {

using test::AsyncPlan;
using test::AsyncTraining;
using test::Scratch;
using test::sleep_ms;
using test::train;
using test::train_rank;

// Worker 1 makes one step, the others three; a run of old records.
TEST(AsyncFailure, NobodyWaitsForAWorkerThatTheRecordEndsEarly) {
  const Scratch scratch;
  const std::vector<Push> order = {{0, 0, 0}, {1, 0, 0}, {2, 0, 0}, {0, 1, 3}, {2, 1, 3}, {0, 2, 5}, {2, 2, 5}};
  const AsyncPlan plan{.servers = 2, .staleness = 0, .replay = scratch.file("record")};
  write_push_log(plan.replay, {.workers = 3, .staleness = 0, .steps = 8, .servers = {order, order}});
  const AsyncTraining run = train(plan);
  EXPECT_EQ(run.summary.applied, 7);
  EXPECT_TRUE(train(plan).values == run.values);
}

TEST(AsyncFailure, AWaitLongerThanTheTimeoutIsNoFailureOfWhoHasEnded) {
  launch({.ranks = 2, .threads_per_rank = 1, .timeout_s = 2}, [&](Communicator& world) {
    AsyncTraining out;
    out.pushed = out.pulled = out.parameters = out.moments = std::vector<int64_t>(2);
    std::vector<std::byte> values;
    train_rank({.ranks = 2,
                .staleness = 0,
                .steps = 2,
                .before =
                    [](int worker, int64_t clock) {
                      if (worker == 0 && clock == 1) sleep_ms(2500);
                    }},
               world, out, values);
  });
}

TEST(AsyncFailure, AWorkerThatThrowsEndsTheOthersWithItsCause) {
  for (int servers = 1; servers <= 3; ++servers)
    for (int guilty = 0; guilty < 3; ++guilty)
      for (const int64_t staleness : {0, 5}) {
        const auto before = [=](int worker, int64_t clock) {
          if (worker == guilty && clock == 2) throw Error("the cause", Status::input);
        };
        EXPECT_EQ(
            error_of([&] { train({.servers = servers, .staleness = staleness, .before = before}); }, Status::input),
            "[rank " + std::to_string(guilty) + "] the cause");
      }
}

TEST(AsyncFailure, ALearningRateThatThrowsInAServersThreadEndsEveryone) {
  const auto body = [&](Communicator& world) {
    const ArenaPtr arena = make_arena();
    Decoder model(test::tiny_gpt(0));
    AsyncServer server(model, world, arena, {.servers = 1},
                       {.steps = 50,
                        .staleness = 50,
                        .optimizer = [](const auto& units) { return make_optimizer(OptimizerKind::sgd, units, {}); },
                        .lr = [](int64_t applied) -> double {
                          if (applied == 7) throw Error("no rate");
                          return 0.01;
                        }});
    server.run(50, {.step = [&](int worker, int64_t clock) {
                 return test::learn(model, test::sequences(model.config, clock, worker, 1, arena), {}, 10);
               }});
  };
  EXPECT_EQ(error_of([&] { launch({.ranks = 3, .threads_per_rank = 1, .timeout_s = 20}, body); }), "[rank 0] no rate");
}

TEST(AsyncFailure, AWorkerThatNeverPushesIsNamed) {
  const auto body = [&](Communicator& world) {
    AsyncTraining out;
    out.pushed = out.pulled = out.parameters = out.moments = std::vector<int64_t>(3);
    std::vector<std::byte> values;
    train_rank({.staleness = 0,
                .before =
                    [](int worker, int64_t clock) {
                      if (worker == 2 && clock == 1) sleep_ms(1400);
                    }},
               world, out, values);
  };
  EXPECT_EQ(error_of([&] { launch({.ranks = 3, .threads_per_rank = 1, .timeout_s = 1}, body); }, Status::communication),
            "[rank 0] world axis, recv of 48 bytes: rank 2 sent nothing within 1 s");
}

std::string refusal(const AsyncPlan& plan) {
  try {
    train(plan);
  } catch (const Error& e) {
    return e.what();
  }
  return "accepted";
}

TEST(AsyncFailure, ARecordThatDoesNotFitIsRefused) {
  const Scratch scratch;
  const std::string file = scratch.file("record");
  const AsyncPlan plan{.steps = 3, .record = file};
  train(plan);
  const auto changed = [&](auto change) {
    AsyncPlan other = plan;
    other.record.clear();
    other.replay = file;
    change(other);
    return refusal(other);
  };
  EXPECT_EQ(changed([](AsyncPlan&) {}), "accepted");
  const std::string was = file + " was recorded with 3 ranks, 1 servers, staleness 1 and 3 steps; this run has ";
  EXPECT_NE(changed([](AsyncPlan& p) { p.ranks = 2; }).find(was + "2 ranks"), std::string::npos);
  EXPECT_NE(changed([](AsyncPlan& p) { p.servers = 2; }).find(was + "3 ranks, 2 servers"), std::string::npos);
  EXPECT_NE(changed([](AsyncPlan& p) { p.staleness = 2; }).find("this run has 3 ranks, 1 servers, staleness 2"),
            std::string::npos);
  EXPECT_NE(changed([](AsyncPlan& p) { p.steps = 4; }).find("and 4 steps"), std::string::npos);
  EXPECT_NE(changed([&](AsyncPlan& p) { p.replay = file + "s"; }).find("cannot open "), std::string::npos);
  EXPECT_NE(refusal({.staleness = -1}).find("`staleness`: expected"), std::string::npos);
  EXPECT_NE(refusal({.servers = 4}).find("`servers`: expected 1 to 3"), std::string::npos);
  EXPECT_NE(refusal({.steps = 1, .record = scratch.file("no/such/place")}).find("cannot write"), std::string::npos);
}

TEST(AsyncFailure, ALossThatIsNoNumberEndsTheRun) {
  const std::string what = refusal({.rate = 1e30});
  EXPECT_NE(what.find("the loss or the gradient norm is not finite"), std::string::npos) << what;
}

}  // namespace
}  // namespace tessera
