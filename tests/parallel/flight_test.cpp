// The messages of ranks that wait long, the notes on their operations, and the ranks that are waited for.
#include <gtest/gtest.h>
#include <unistd.h>

#include <fstream>
#include <sstream>

#include "parallel/comm/trace.h"
#include "tests/parallel/arrays.h"
#include "verify/defects/transports.h"

namespace tessera {
namespace {

using test::array_of;

class Said {
 public:
  auto listener() {
    return [this](const std::string& line) {
      const std::lock_guard lock(mutex_);
      lines_.push_back(line);
    };
  }
  const std::vector<std::string>& lines() const { return lines_; }

 private:
  std::mutex mutex_;
  std::vector<std::string> lines_;
};

TEST(Reminder, ComesAfter5And30And60AndThenTwiceAsLong) {
  Reminder reminder;
  std::vector<int> at;
  for (int second = 0; second < 300; ++second)
    if (reminder.is_due(second)) at.push_back(second);
  EXPECT_EQ(at, (std::vector<int>{5, 30, 60, 120, 240}));
}

TEST(LongWaits, AreNewsOnceForEachAxisAndRank) {
  LongWaits waits([](const std::string&) {});
  EXPECT_TRUE(waits.is_news("dp", 3));
  EXPECT_FALSE(waits.is_news("dp", 3));
  EXPECT_TRUE(waits.is_news("dp", 2));
  EXPECT_TRUE(waits.is_news("tp", 2));
  EXPECT_FALSE(waits.is_news("dp", 3));
}

// Rank 2 comes late, twice: three ranks wait for it, and one line says so.
TEST(Flight, ALongWaitIsSaidOnceWithWhomAndWhatItDidLast) {
  Said said;
  launch({.ranks = 4, .timeout_s = 60, .say = said.listener()}, [](Communicator& world) {
    const std::unique_ptr<Communicator> axis = world.split(0, world.rank(), "dp");
    const Tensor x = array_of(world.rank(), 10, DType::float32, make_arena());
    axis->all_reduce(x);
    for (int i = 0; i < 2; ++i) {
      if (world.rank() == 2) std::this_thread::sleep_for(std::chrono::milliseconds(5600));
      axis->all_reduce(x);
    }
  });
  ASSERT_EQ(said.lines().size(), 1U);
  const std::string& line = said.lines()[0];
  EXPECT_NE(line.find("has waited 5"), std::string::npos) << line;
  EXPECT_NE(line.find("in all_reduce of 40 bytes (float32) on axis dp for rank 2"), std::string::npos) << line;
  EXPECT_NE(line.find("the last it came to was all_reduce of 40 bytes"), std::string::npos) << line;
}

TEST(Flight, AMessageThatDoesNotComeIsSaidToo) {
  Said said;
  launch({.ranks = 2, .timeout_s = 60, .say = said.listener()}, [](Communicator& world) {
    const Tensor x = array_of(world.rank(), 10, DType::float32, make_arena());
    if (world.rank() == 1) {
      std::this_thread::sleep_for(std::chrono::milliseconds(5300));
      world.send(x, 0);
    } else {
      world.recv(x, 1);
    }
  });
  ASSERT_EQ(said.lines().size(), 1U);
  EXPECT_NE(said.lines()[0].find("[rank 0] has waited 5"), std::string::npos) << said.lines()[0];
  EXPECT_NE(said.lines()[0].find("recv of 40 bytes on axis world for rank 1"), std::string::npos) << said.lines()[0];
}

TEST(Flight, ShortWaitsAreNotSaid) {
  Said said;
  launch({.ranks = 2, .say = said.listener()}, [](Communicator& world) {
    if (world.rank() == 1) std::this_thread::sleep_for(std::chrono::milliseconds(300));
    world.barrier();
  });
  EXPECT_TRUE(said.lines().empty());
}

// The one that is late is waited for, and who waits is not.
TEST(Flight, WaitingIsCountedByWhomItIsFor) {
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

std::string flights_of(const LaunchOptions& given, const std::function<void(Communicator&)>& body) {
  const std::filesystem::path file = testing::TempDir() + "tessera-flight-" + std::to_string(getpid()) + ".json";
  LaunchOptions options = given;
  options.flight_file = [&] { return file; };
  EXPECT_THROW(launch(options, body), Error);
  std::ostringstream text;
  text << std::ifstream(file).rdbuf();
  std::filesystem::remove(file);
  return text.str();
}

// Rank 1 leaves out one call: the others are in the fourth, it was never there.
TEST(Flight, AFailureLeavesWhatEveryRankDidLast) {
  const std::string file = flights_of({.ranks = 3, .timeout_s = 1}, [](Communicator& world) {
    const Tensor x = array_of(world.rank(), 10, DType::float32, make_arena());
    for (int i = 0; i < 3; ++i) world.all_reduce(x);
    if (world.rank() == 1) std::this_thread::sleep_for(std::chrono::milliseconds(1500));
    world.barrier();
  });
  EXPECT_EQ(std::ranges::count(file, '\n'), 3);
  EXPECT_NE(file.find(R"("rank": 1, "ranks": 3)"), std::string::npos) << file;
  EXPECT_NE(file.find(R"("number": 3, "operation": "all_reduce", "bytes": 40)"), std::string::npos) << file;
  EXPECT_NE(file.find(R"("number": 4, "operation": "barrier", "bytes": 0)"), std::string::npos) << file;
  EXPECT_NE(file.find(R"("ended": null)"), std::string::npos) << file;
  EXPECT_NE(file.find("did not come within 1 s"), std::string::npos) << file;
}

TEST(Flight, KeepsTheLast32AndTheirNumbers) {
  Flight flight(0, 1, std::make_shared<LongWaits>([](const std::string&) {}));
  const int dp = flight.axis("dp"), tp = flight.axis("tp");
  EXPECT_EQ(flight.axis("dp"), dp);
  for (int i = 0; i < 50; ++i) flight.end(flight.begin(dp, Op::broadcast, i));
  flight.begin(tp, Op::gather, 7);
  const std::string line = flight.to_json("a \"cause\"");
  EXPECT_EQ(line.find(R"("number": 19,)"), std::string::npos) << line;
  EXPECT_NE(line.find(R"("axis": "dp", "number": 20, "operation": "broadcast", "bytes": 19)"), std::string::npos);
  EXPECT_NE(line.find(R"("axis": "tp", "number": 1, "operation": "gather", "bytes": 7)"), std::string::npos) << line;
  EXPECT_NE(line.find(R"("cause": "a \"cause\"")"), std::string::npos) << line;
}

}  // namespace
}  // namespace tessera
