// Communicators of threads: every operation with every algorithm, counts, failures, and reports of long waits.
#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <regex>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

#include "base/files.h"
#include "parallel/comm/trace.h"
#include "tests/parallel/mpi/mpi_checks.h"
#include "tests/support/errors.h"
#include "tests/support/gpu.h"
#include "tests/support/nearest.h"
#include "verify/defects/transports.h"

namespace tessera {
namespace {

using namespace test;

TEST(Comm, EveryOperationIsCorrectWithEveryAlgorithm) {
  for (const int ranks : {1, 2, 3, 4, 8})
    for (const Algorithm algorithm : test::kByMessages)
      launch({.ranks = ranks, .timeout_s = 20, .algorithm = algorithm}, [](Communicator& world) {
        check_operations(world, {1, 2, 17, 1000, 5003}, {DType::float32, DType::bfloat16, DType::float64, DType::int32},
                         {make_arena()});
        EXPECT_EQ(world.max(world.rank()), world.size() - 1);
        world.barrier();
      });
  EXPECT_EQ(test::failures, 0);
}

// float32 sums use the documented order.
TEST(Comm, ReductionsUseDocumentedOrder) {
  constexpr int kRanks = 5;
  constexpr int64_t kSize = 203;
  std::vector<std::vector<float>> in;
  for (int r = 0; r < kRanks; ++r) in.push_back(for_order(r, kRanks, kSize, DType::float32).to_vector<float>());
  const auto expected = [&](Algorithm algorithm, size_t i) {
    const auto at = [&](int r) { return in[static_cast<size_t>(r % kRanks)][i]; };
    if (algorithm == Algorithm::tree) return ((at(0) + at(1)) + (at(2) + at(3))) + at(4);
    int first = 0;
    if (algorithm == Algorithm::ring)
      for (int c = 0; c < kRanks; ++c)
        if (static_cast<int64_t>(i) >= chunk_range(kSize, kRanks, c).begin) first = c + 1;
    float sum = at(first);
    for (int r = 1; r < kRanks; ++r) sum += at(first + r);
    return sum;
  };
  for (const Algorithm algorithm : test::kByMessages)
    launch({.ranks = kRanks, .timeout_s = 20, .algorithm = algorithm}, [&](Communicator& world) {
      const Tensor x = Tensor::of<float>(in[static_cast<size_t>(world.rank())], {kSize}, make_arena());
      world.all_reduce(x);
      for (size_t i = 0; i < kSize; ++i)
        ASSERT_EQ(x.data<float>()[i], expected(algorithm, i)) << to_string(algorithm) << i;
    });
}

TEST(Comm, BytesSentMatchFormulas) {
  // Full arrays sent by all ranks together, n = 4.
  const std::vector<std::tuple<Algorithm, Op, double>> cases = {
      {Algorithm::direct, Op::all_reduce, 6},     {Algorithm::ring, Op::all_reduce, 6},
      {Algorithm::root, Op::all_reduce, 6},       {Algorithm::tree, Op::all_reduce, 6},
      {Algorithm::direct, Op::reduce_scatter, 3}, {Algorithm::ring, Op::reduce_scatter, 3},
      {Algorithm::direct, Op::all_gather, 3},     {Algorithm::ring, Op::all_gather, 3},
      {Algorithm::direct, Op::broadcast, 3},      {Algorithm::tree, Op::broadcast, 3},
      {Algorithm::direct, Op::reduce, 3}};
  for (const auto& [algorithm, op, arrays] : cases) {
    std::atomic<int64_t> sent{0}, calls{0};
    launch({.ranks = 4, .timeout_s = 20, .algorithm = algorithm}, [&, op = op](Communicator& world) {
      const Tensor x = zeros(1000), part = zeros(250);
      if (op == Op::all_reduce) world.all_reduce(x);
      if (op == Op::reduce_scatter) world.reduce_scatter(x, part);
      if (op == Op::all_gather) world.all_gather(part, x);
      if (op == Op::broadcast) world.broadcast(x, 1);
      if (op == Op::reduce) world.reduce(x, 1);
      sent += world.counts()[static_cast<size_t>(op)].sent;
      calls += world.counts()[static_cast<size_t>(op)].calls;
    });
    EXPECT_EQ(static_cast<double>(sent), 4000 * arrays) << to_string(algorithm) << " " << to_string(op);
    EXPECT_EQ(calls, 4);
  }
}

TEST(Comm, MessagesArriveInOrderPerTag) {
  launch({.ranks = 2, .timeout_s = 20}, [](Communicator& world) { check_messages(world, 0, 1, 100); });
  EXPECT_EQ(test::failures, 0);
}

TEST(Comm, SplitsIntoRowsAndColumns) {
  launch({.ranks = 6, .timeout_s = 20}, [](Communicator& world) {
    const int row = world.rank() / 3, column = world.rank() % 3;
    const auto in_row = world.split(row, -column, "row"), in_column = world.split(column, row, "column");
    EXPECT_EQ(in_row->size(), 3);
    EXPECT_EQ(in_row->rank(), 2 - column);  // the key reverses the order
    EXPECT_EQ(in_row->world_rank(0), 3 * row + 2);
    EXPECT_EQ(in_column->rank(), row);
    EXPECT_EQ(in_row->sum(column + 1), 6);
    EXPECT_EQ(in_column->sum(row), 1);
  });
}

TEST(Comm, BackgroundReductionsAreCorrect) {
  Trace trace;
  launch({.ranks = 2, .timeout_s = 20}, [&](Communicator& world) {
    const ArenaPtr arena = make_arena();
    if (world.rank() == 0) world.set_trace(&trace);
    std::vector<Tensor> x;
    std::vector<Work> pending;
    for (int i = 0; i < 5; ++i) {
      x.push_back(make_array(world.rank(), 3000 + i, DType::float32, arena));
      pending.push_back(world.start_all_reduce(x.back()));
    }
    EXPECT_EQ(world.sum(1), 2);  // after the background calls
    for (size_t i = 0; i < 5; ++i) {
      pending[i].wait();
      EXPECT_EQ(values(x[i]), summed(2, 3000 + static_cast<int64_t>(i)));
    }
  });
  EXPECT_EQ(trace.events().size(), 6U);
}

// The call log, read by another rank while it is written.

TEST(CallLog, RetainsLastCalls) {
  CallLog log;
  EXPECT_EQ(log.made(), 0U);
  EXPECT_FALSE(log.find(0));
  EXPECT_FALSE(log.find(1));
  const Call scatter{
      .op = Op::scatter, .dtype = DType::bfloat16, .reduction = Reduction::max, .root = 5, .count = int64_t{1} << 40};
  EXPECT_EQ(log.add(scatter), 1U);
  EXPECT_TRUE(log.find(1)->matches(scatter));
  EXPECT_FALSE(log.find(1)->splits);
  const UnevenSplits splits{{1, 2}, {1, 5}}, others{{4, 5}, {2, 5}};  // chunks of two ranks
  log.add({.op = Op::all_to_all, .count = 3, .splits = &splits});
  EXPECT_TRUE(log.find(2)->matches({.op = Op::all_to_all, .count = 9, .splits = &others}));
  EXPECT_FALSE(log.find(2)->matches({.op = Op::all_to_all, .count = 3}));
  for (int64_t i = 3; i <= 1000; ++i) log.add({.op = Op::broadcast, .count = i});
  EXPECT_EQ(log.made(), 1000U);
  EXPECT_FALSE(log.find(1));
  EXPECT_FALSE(log.find(1001));
  for (const int64_t i : {990, 1000}) EXPECT_EQ(log.find(static_cast<uint64_t>(i))->count, i);
}

TEST(CallLog, SupportsConcurrentReads) {
  CallLog log;
  constexpr int64_t kCalls = 20'000;
  std::jthread writer([&] {
    for (int64_t i = 1; i <= kCalls; ++i) log.add({.root = static_cast<int32_t>(i % 1000), .count = 3 * i});
  });
  int64_t found = 0;
  for (uint64_t made = 0; made < kCalls;) {
    made = log.made();
    const std::optional<Call> last = log.find(made);
    if (!last) continue;  // none yet, or overwritten during the read
    ++found;
    ASSERT_EQ(last->count, 3 * static_cast<int64_t>(made));
    ASSERT_EQ(last->root, static_cast<int32_t>(made % 1000));
  }
  EXPECT_GT(found, 0);
}

// Failures: a rank throws, is late, or calls a different operation.

// Returns the message of the error that launch() throws when the ranks run `body`.
std::string failure(const LaunchOptions& options, const std::function<void(Communicator&)>& body) {
  return error_message([&] { launch(options, body); }, Status::communication);
}

TEST(Comm, OtherAlgorithmsRefuseSumsInPairs) {
  launch({.ranks = 2, .timeout_s = 20, .algorithm = Algorithm::ring}, [](Communicator& world) {
    const Tensor x = zeros(4);
    EXPECT_THROW(world.all_reduce(x, Reduction::pair_sum), Error);
    world.add_in_pairs();  // selects the direct algorithm
    world.all_reduce(x);
  });
}

TEST(CommFailure, ThrowingRankAbortsAllRanks) {
  const auto thrown_by = [](const std::function<void(Communicator&)>& f) {
    return failure({.ranks = 4, .timeout_s = 20}, [&](Communicator& world) {
      if (world.rank() == 2) f(world);
      world.barrier();
    });
  };
  EXPECT_EQ(thrown_by([](Communicator&) { throw CommError("the cause"); }), "[rank 2] the cause");
  EXPECT_EQ(thrown_by([](Communicator&) { throw 42; }), "[rank 2] the thrown object is not a std::exception");
  EXPECT_EQ(thrown_by([](Communicator&) { throw "a text"; }), "[rank 2] a text");
  EXPECT_EQ(thrown_by([](Communicator&) { throw std::string("a string"); }), "[rank 2] a string");
  EXPECT_EQ(thrown_by([](Communicator&) { throw static_cast<const char*>(nullptr); }),
            "[rank 2] the thrown object is not a std::exception");
  const std::string busy = thrown_by([](Communicator& world) {  // with background work
    const Work p = world.start_all_reduce(zeros(100));
    throw CommError("the cause");
  });
  EXPECT_TRUE(busy == "[rank 2] the cause" || has(busy, "calls")) << busy;
}

TEST(CommFailure, NamesRankWithUnfinishedBackgroundWork) {
  const std::string what = failure({.ranks = 2, .timeout_s = 20}, [](Communicator& world) {
    if (world.rank() == 0) {
      const Work forgotten = world.start_all_reduce(zeros(100'000));
      return;
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
    world.barrier();
  });
  EXPECT_EQ(what, "[rank 0] returned while background communication was still running");
}

TEST(CommFailure, NamesMissingRank) {
  const std::string what = failure({.ranks = 3, .timeout_s = 0.3}, [](Communicator& world) {
    world.all_reduce(zeros(10));
    if (world.rank() != 1) world.all_reduce(zeros(100));
  });
  EXPECT_TRUE(has(what,
                  "world axis, all_reduce of 400 bytes (float32): rank 1 did not arrive within 0.3 s; its last "
                  "operation was all_reduce of 40 bytes (float32)"));
}

TEST(CommFailure, NamesMismatchedCalls) {
  const std::string what = failure({.ranks = 2, .timeout_s = 20}, [](Communicator& world) {
    world.rank() == 0 ? world.all_reduce(zeros(100)) : world.broadcast(zeros(100), 0);
  });
  EXPECT_TRUE(has(what, "all_reduce of 400 bytes (float32)"));
  EXPECT_TRUE(has(what, "broadcast of 400 bytes (float32, root 0)"));
}

// Errors use world ranks, also in a group that numbers its ranks differently, whichever rank detects the mismatch
// first.
TEST(CommFailure, NamesRankWithMismatchedCall) {
  for (const int first : {0, 1})  // three consecutive ranks
    for (const int odd : {first + 1, first + 2}) {
      const std::string what = failure({.ranks = 3 + first, .timeout_s = 20}, [&](Communicator& world) {
        const auto group = world.split(world.rank() >= first ? 1 : 0, world.rank(), "group");
        if (world.rank() < first) return;
        group->all_reduce(zeros(10));
        world.rank() == odd ? group->broadcast(zeros(100), 0) : group->all_reduce(zeros(100));
      });
      const std::regex expected(fmt::format(R"(\[rank ({0}\] group axis, {1}: rank {2} calls {3}|)"
                                            R"([^{0}]\] group axis, {3}: rank {0} calls {1}) at the same time; .*)",
                                            odd, "broadcast of 400 bytes .float32, root 0.", first,
                                            "all_reduce of 400 bytes .float32."));
      EXPECT_TRUE(std::regex_match(what, expected)) << odd << ": " << what;
    }
}

TEST(CommFailure, NamesSilentSender) {
  const std::string what = failure({.ranks = 2, .timeout_s = 0.3}, [](Communicator& world) {
    if (world.rank() == 1) world.recv(zeros(10), 0);
  });
  EXPECT_EQ(what, "[rank 1] world axis, recv of 40 bytes: rank 0 sent nothing within 0.3 s");
}

TEST(CommFailure, RejectsInvalidArgumentsBeforeSending) {
  launch({.ranks = 2, .timeout_s = 20}, [](Communicator& world) {
    const ArenaPtr arena = make_arena();
    const Tensor x = Tensor::zeros({4, 4}, DType::float32, arena), y = Tensor::zeros({5}, DType::float32, arena);
    EXPECT_THROW(world.all_reduce(x.transpose(0, 1)), Error);
    EXPECT_THROW(world.reduce_scatter(x, y), Error);
    EXPECT_THROW(world.broadcast(x, 2), Error);
    EXPECT_THROW(world.all_to_all(x, x), Error);
    const std::vector<int64_t> none(static_cast<size_t>(world.size()));
    EXPECT_THROW(world.all_to_all(x, x, none, none), Error);  // does not cover x
    EXPECT_THROW((void)world.start_all_to_all(x, x, none, none), Error);
    EXPECT_THROW(world.send(x, world.rank()), Error);
    EXPECT_EQ(world.sum(1), 2);
  });
}

// Faults at random calls of random ranks: every run ends, delays change nothing, and the culprit is named. A dropped
// message is detected when no more arrive; until then a ring, whose messages are all alike, accepts the next one
// instead.
TEST(CommFailure, InjectedFaultsNeverHang) {
  const Philox random = Philox::named(1, "faults");
  for (uint64_t trial = 0; trial < 40; ++trial) {
    const int ranks = 2 + static_cast<int>(random.below(3, 4 * trial)),
              culprit = static_cast<int>(random.below(static_cast<uint64_t>(ranks), 4 * trial + 1));
    const auto kind = static_cast<Fault::Kind>(random.below(3, 4 * trial + 2));
    const Algorithm algorithm = static_cast<Algorithm>(random.below(4, 4 * trial + 3));
    const Fault fault{kind, static_cast<int64_t>(trial % 12), 0.05};
    const LaunchOptions options{
        .ranks = ranks, .timeout_s = 0.5, .algorithm = algorithm, .around = with_faults({{culprit, {fault}}})};
    const bool drops = kind == Fault::Kind::drop, direct = algorithm == Algorithm::direct;
    const int64_t shifted = drops && algorithm == Algorithm::ring ? fault.call / (4 * (ranks - 1)) : 20;
    const auto body = [&](Communicator& world) {
      for (int64_t i = 0; i < 20; ++i) {
        const Tensor x = make_array(world.rank(), 500, DType::float32, make_arena()), own = x.clone();
        drops ? world.all_reduce(x) : world.start_all_reduce(x).wait();
        const bool alone = drops && direct && world.rank() == culprit && i == fault.call;
        if (i < shifted) {
          EXPECT_EQ(values(x), alone ? values(own) : summed(world.size(), 500)) << trial << ' ' << i;
        }
      }
    };
    if (kind == Fault::Kind::delay) {
      launch(options, body);
      continue;
    }
    const std::string what = failure(options, body), by = fmt::format("rank {}", culprit);
    if (drops) {
      EXPECT_TRUE(has(what, direct ? by + " did not arrive within 0.5 s" : "sent nothing within 0.5 s")) << what;
    } else {
      EXPECT_TRUE(what.starts_with("[" + by + "] world axis, ")) << what;
      EXPECT_TRUE(what.ends_with(fmt::format("an injected fault at call {}", fault.call))) << what;
    }
  }
}

TEST(CommFailureDeathTest, UnresponsiveRankTerminatesProcess) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_EXIT(launch({.ranks = 2, .timeout_s = 0.2},
                     [](Communicator& world) {
                       if (world.rank() == 1) throw CommError("the cause");
                       for (std::atomic<bool> forever{true}; forever;)
                         std::this_thread::sleep_for(std::chrono::milliseconds(10));
                     }),
              testing::ExitedWithCode(3),
              "tessera: .rank 1. the cause .another rank does not stop; terminating the process.");
}

// Reports of long waits, the flight recorder, and wait times.

// The lines about long waits while ranks run `body`.
std::vector<std::string> wait_lines(LaunchOptions how, const std::function<void(Communicator&)>& body) {
  std::mutex one_at_a_time;
  std::vector<std::string> lines;
  how.say = [&](const std::string& line) {
    const std::lock_guard lock(one_at_a_time);
    lines.push_back(line);
  };
  launch(how, body);
  return lines;
}

TEST(ReportInterval, IsDueAfter5And30And60SecondsThenDoubles) {
  ReportInterval reminder;
  std::vector<int> at;
  for (int second = 0; second < 300; ++second)
    if (reminder.is_due(second)) at.push_back(second);
  EXPECT_EQ(at, (std::vector<int>{5, 30, 60, 120, 240}));
}

TEST(StallReporter, ReportsOncePerAxisAndRank) {
  StallReporter waits([](const std::string&) {});
  EXPECT_TRUE(waits.is_news("dp", 3));
  EXPECT_FALSE(waits.is_news("dp", 3));
  EXPECT_TRUE(waits.is_news("dp", 2));
  EXPECT_TRUE(waits.is_news("tp", 2));
  EXPECT_FALSE(waits.is_news("dp", 3));
}

// Rank 2 is late twice: three ranks wait for it, and one line is printed.
TEST(Flight, StallReportNamesMissingRankAndItsLastCallOnce) {
  const std::vector<std::string> lines = wait_lines({.ranks = 4, .timeout_s = 60}, [](Communicator& world) {
    const std::unique_ptr<Communicator> axis = world.split(0, world.rank(), "dp");
    const Tensor x = make_array(world.rank(), 10, DType::float32, make_arena());
    axis->all_reduce(x);
    for (int i = 0; i < 2; ++i) {
      if (world.rank() == 2) std::this_thread::sleep_for(std::chrono::milliseconds(5600));
      axis->all_reduce(x);
    }
  });
  ASSERT_EQ(lines.size(), 1U);
  for (const char* part : {"has waited 5", "in all_reduce of 40 bytes (float32) on axis dp for rank 2",
                           "its last operation was all_reduce of 40 bytes"})
    EXPECT_TRUE(has(lines[0], part));
}

TEST(Flight, StallReportNamesPendingRecv) {
  const std::vector<std::string> lines = wait_lines({.ranks = 2, .timeout_s = 60}, [](Communicator& world) {
    const Tensor x = make_array(world.rank(), 10, DType::float32, make_arena());
    if (world.rank() == 1) {
      std::this_thread::sleep_for(std::chrono::milliseconds(5300));
      world.send(x, 0);
    } else {
      world.recv(x, 1);
    }
  });
  ASSERT_EQ(lines.size(), 1U);
  EXPECT_TRUE(has(lines[0], "[rank 0] has waited 5"));
  EXPECT_TRUE(has(lines[0], "recv of 40 bytes on axis world for rank 1"));
}

TEST(Flight, ShortWaitsPrintNoStallReport) {
  const std::vector<std::string> lines = wait_lines({.ranks = 2}, [](Communicator& world) {
    if (world.rank() == 1) std::this_thread::sleep_for(std::chrono::milliseconds(300));
    world.barrier();
  });
  EXPECT_TRUE(lines.empty());
}

TEST(Flight, WaitTimeIsAttributedToLateRank) {
  std::vector<std::vector<double>> waits(3);
  launch({.ranks = 3}, [&](Communicator& world) {
    for (int i = 0; i < 5; ++i) {
      if (world.rank() == 1) std::this_thread::sleep_for(std::chrono::milliseconds(100));
      world.barrier();
    }
    waits[static_cast<size_t>(world.rank())] = world.flight()->waits();
  });
  EXPECT_GT(waits[0][1], 0.4);
  EXPECT_GT(waits[2][1], 0.4);
  EXPECT_LT(waits[1][0] + waits[1][2], 0.2);
}

std::string record_flights(LaunchOptions how, const std::function<void(Communicator&)>& body) {
  const TemporaryDirectory directory(temporary_directory() / "tessera-flight");
  how.flight_file = [&] { return directory.path() / "flights.json"; };
  EXPECT_THROW(launch(how, body), Error);
  return read_file(how.flight_file());
}

// Rank 1 skips one call: the other ranks are in their fourth call, which it never reached.
TEST(Flight, FailureRecordsLastOperationsOfEveryRank) {
  const std::string file = record_flights({.ranks = 3, .timeout_s = 1}, [](Communicator& world) {
    const Tensor x = make_array(world.rank(), 10, DType::float32, make_arena());
    for (int i = 0; i < 3; ++i) world.all_reduce(x);
    if (world.rank() == 1) std::this_thread::sleep_for(std::chrono::milliseconds(1500));
    world.barrier();
  });
  EXPECT_EQ(std::ranges::count(file, '\n'), 3);
  EXPECT_TRUE(has(file, R"("rank": 1, "ranks": 3)"));
  EXPECT_TRUE(has(file, R"("number": 3, "operation": "all_reduce", "bytes": 40)"));
  EXPECT_TRUE(has(file, R"("number": 4, "operation": "barrier", "bytes": 0)"));
  EXPECT_TRUE(has(file, R"("ended": null)"));
  EXPECT_TRUE(has(file, "did not arrive within 1 s"));
}

TEST(Flight, RetainsLast32NumberedOperations) {
  Flight flight(0, 1, std::make_shared<StallReporter>([](const std::string&) {}));
  const int dp = flight.axis("dp"), tp = flight.axis("tp");
  EXPECT_EQ(flight.axis("dp"), dp);
  for (int i = 0; i < 50; ++i) flight.end(flight.begin(dp, Op::broadcast, i));
  flight.begin(tp, Op::gather, 7);
  const std::string line = flight.to_json("a \"cause\"");
  EXPECT_FALSE(has(line, R"("number": 19,)"));
  EXPECT_TRUE(has(line, R"("axis": "dp", "number": 20, "operation": "broadcast", "bytes": 19)"));
  EXPECT_TRUE(has(line, R"("axis": "tp", "number": 1, "operation": "gather", "bytes": 7)"));
  EXPECT_TRUE(has(line, R"("cause": "a \"cause\"")"));
}

// bfloat16 sums over ranks round to nearest even: once in direct and root, once per sent value in ring and tree.

// Positive, so that a biased rounding would accumulate.
std::vector<double> rank_values(int rank, int64_t count) {
  const Philox random = Philox::named(static_cast<uint64_t>(rank), "rounding of sums");
  std::vector<double> out;
  for (int64_t i = 0; i < count; ++i)
    out.push_back(nearest_bf16(0.5 + static_cast<double>(random.uniform(static_cast<uint64_t>(i)))));
  return out;
}

void expect_rounded(Communicator& world, int64_t count, const ArenaPtr& arena, bool once) {
  const auto mine = [&] {
    return Tensor::of<double>(rank_values(world.rank(), count), {count}, make_arena()).to(DType::bfloat16).to(arena);
  };
  std::vector<double> total(static_cast<size_t>(count));
  for (int r = 0; r < world.size(); ++r) {
    const std::vector<double> theirs = rank_values(r, count);
    for (size_t i = 0; i < total.size(); ++i) total[i] += theirs[i];  // exact: few values with 8 significant bits
  }
  const auto expect = [&](const char* what, const Tensor& found, int64_t first) {
    const std::vector<double> values = found.to(DType::float64).to_vector<double>();
    RoundingError error;
    for (size_t i = 0; i < values.size(); ++i) {
      const double exact = total[static_cast<size_t>(first) + i];
      error.add(values[i], exact);
      if (once) {
        ASSERT_EQ(values[i], nearest_bf16(exact)) << what << " " << i;
      }
    }
    EXPECT_LE(std::abs(error.mean()), 0.02 + error.chance()) << what << " of " << error.count();
  };
  const Tensor all = mine();
  world.all_reduce(all);
  expect("all_reduce", all, 0);
  const Range own = chunk_range(count, world.size(), world.rank());
  const Tensor part = Tensor::empty({own.size()}, DType::bfloat16, arena);
  world.reduce_scatter(mine(), part);
  expect("reduce_scatter", part, own.begin);
  const Tensor at_root = mine();
  world.reduce(at_root, 0);
  if (world.rank() == 0) expect("reduce", at_root, 0);
}

void expect_rounded_by(Algorithm algorithm, int ranks, Device device) {
  SCOPED_TRACE(std::string(to_string(algorithm)) + ", " + std::to_string(ranks) + " ranks");
  launch({.ranks = ranks, .threads_per_rank = 1, .timeout_s = 30, .algorithm = algorithm}, [&](Communicator& world) {
    const ArenaPtr arena = device == Device::cpu ? world.make_arena() : make_arena(device);
    const bool once = algorithm == Algorithm::direct || algorithm == Algorithm::root || ranks == 2;
    for (const int64_t count : {int64_t{777}, int64_t{20000}}) expect_rounded(world, count, arena, once);
  });
}

TEST(Rounding, ReductionsRoundToNearestEven) {
  for (const Algorithm algorithm : test::kByMessages)
    for (const int ranks : {2, 3, 4}) expect_rounded_by(algorithm, ranks, Device::cpu);
}

using RoundingGpu = test::OnGpu;

TEST_F(RoundingGpu, ReductionsRoundToNearestEven) {
  for (const Algorithm algorithm : test::kByMessages) expect_rounded_by(algorithm, 3, Device::cuda);
}

}  // namespace
}  // namespace tessera
