// The rows of `tessera bench`: names, consistency of the numbers, and bytes compared with the closed forms.

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <fstream>
#include <map>
#include <memory>
#include <random>
#include <regex>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "app/report/report.h"
#include "bench/ranks.h"
#include "tests/app/program.h"
#include "tests/app/report_checks.h"
#include "tests/support/planted_machine.h"

namespace tessera {

namespace {

class BenchTest : public ProgramTest {
 protected:
  // The rows of a filter, each with the minimum number of iterations.
  Json rows(const std::string& filter, const std::string& before = "") {
    const std::string args = "bench --benchmark_format=json --benchmark_min_time=0.0001 '--benchmark_filter=";
    return Json::parse(must(args + filter + "'", before).out).at("benchmarks");
  }
  static double number(const Json& row, const std::string& counter) {
    EXPECT_TRUE(row.contains(counter)) << row.at("name") << " has no " << counter;
    return row.value(counter, -1.0);
  }
  static bool has(const Json& row, const char* counter) { return !row.at(counter).is_null(); }
  static double seconds(const Json& row) {
    return row.at("real_time").get<double>() * (row.at("time_unit") == "ms" ? 1e-3 : 1e-6);
  }
};

TEST_F(BenchTest, RowNamesMatchDocumentedForms) {
  std::set<std::string> names;
  const std::regex pattern(
      "op/[a-z_ ]+/(forward|backward)/(fp32|bf16)|collective/[a-z_]+/[a-z-]+/threads/[0-9]+/[0-9]+(/bf16)?|"
      "strategy/[a-z0-9+-]+/(fp32|bf16)/[0-9]+|schedule/[a-z0-9-]+/[0-9]+/[0-9]+");
  for (const std::string& line : test::to_lines(must("bench --benchmark_list_tests").out)) {
    EXPECT_TRUE(names.insert(line).second) << line << " is duplicated";
    EXPECT_TRUE(std::regex_match(line, pattern)) << line;
  }
  for (const char* name :
       {"op/matmul/backward/bf16", "collective/all_reduce/direct/threads/2/1048576",
        "collective/all_reduce/ring/threads/2/1024/bf16", "collective/reduce_scatter/root/threads/2/65536",
        "collective/broadcast/tree/threads/2/1024", "collective/send_recv/direct/threads/2/1024",
        "strategy/one-rank/fp32/1", "strategy/zero-3/fp32/2", "strategy/ps-async/bf16/4", "strategy/tp+sp/bf16/2",
        "strategy/pp-zb-v/fp32/2", "strategy/dp2+tp2/fp32/4", "schedule/zb-h1/4/8", "schedule/naive/2/2"})
    EXPECT_TRUE(names.contains(name)) << name;
}

TEST_F(BenchTest, RejectsFiltersWithoutMatches) {
  for (const std::string name : {"op/matmul/sideways", "collective/all_reduce/direct/threads/2/7$",
                                 "strategy/zero-4/fp32/2", "schedule/zb-h1/4/9"})
    fails("bench '--benchmark_filter=" + name + "'", 2, "no benchmark matches the filter '" + name + "'");
  fails("bench '--benchmark_filter=op/('", 2, "expected a regular expression, got 'op/('");
}

TEST(BenchSelection, ParsesFiltersLikeGoogleBenchmark) {
  for (const auto& [filter, name] :
       {std::pair{"", "op/add"}, {"all", "op/add"}, {"^op/(add|mul)$", "op/mul"}, {"-add", "op/mul"}})
    EXPECT_TRUE(bench::Selection(filter).has(name)) << filter;
  EXPECT_FALSE(bench::Selection("^op/(add|mul)$").has("op/multiply"));
  EXPECT_FALSE(bench::Selection("-add").has("op/add"));
}

// For two ranks: bus bandwidth over algorithm bandwidth, and bytes sent by all ranks over the array size.
const std::map<std::string, std::pair<double, double>> kOfTwo = {
    {"all_reduce", {1, 2}},  {"reduce_scatter", {0.5, 1}}, {"all_gather", {0.5, 1}},
    {"broadcast", {1, 1}},   {"reduce", {1, 1}},           {"gather", {0.5, 0.5}},
    {"scatter", {0.5, 0.5}}, {"all_to_all", {0.5, 1}},     {"send_recv", {1, 2}}};

void expect_collective(const Json& row, double bus_factor, double volume) {
  const std::string name = row.at("name");
  const double bytes = row.at("bytes"), algbw = row.at("algbw"), time = row.at("real_time").get<double>() * 1e-6;
  EXPECT_NEAR(algbw * time, bytes, 1e-6 * bytes) << name;
  EXPECT_NEAR(row.at("busbw").get<double>(), bus_factor * algbw, 1e-6 * algbw) << name;
  EXPECT_NEAR(row.at("sent").get<double>(), volume * bytes, 1e-6 * volume * bytes) << name;
  EXPECT_EQ(row.at("sent"), row.at("sent_expected")) << name;
}

TEST_F(BenchTest, CollectiveBytesMatchClosedForms) {
  const Json all = rows("collective/.*/threads/2/1024");
  EXPECT_EQ(all.size(), 2U * (4 + 3 + 3 + 2 + 2 + 4));  // each in two dtypes
  for (const Json& row : all) {
    const std::string name = row.at("name"), operation = name.substr(11, name.find('/', 11) - 11);
    const bool detour = name.find("/root/") != std::string::npos && operation != "all_reduce";
    const auto [bus_factor, volume] = kOfTwo.at(operation);
    EXPECT_EQ(row.at("bytes"), 1024);
    expect_collective(row, bus_factor, detour ? 1.5 * volume : volume);
  }
}

TEST_F(BenchTest, FitsLatencyAndBandwidth) {
  const Json all = rows("all_reduce/direct/threads/2/(1024|65536|1048576)$");
  ASSERT_EQ(all.size(), 4U) << all;
  const Json& fit = all.back();
  EXPECT_EQ(fit.at("name"), "collective/all_reduce/direct/threads/2/fit");
  EXPECT_NEAR(number(fit, "latency_s"), fit.at("real_time").get<double>() * 1e-6, 1e-12);
  EXPECT_EQ(number(fit, "busbw"), number(fit, "algbw"));
  EXPECT_GE(number(fit, "worst_error"), 0);
  EXPECT_EQ(rows("all_reduce/direct/threads/2/(1024|65536)$").size(), 2U);  // too few sizes for a fit
}

TEST(BenchFit, RecoversLatencyAndBandwidth) {
  std::vector<bench::Sample> samples;
  for (const double bytes : {1024.0, 65536.0, 1048576.0, 16777216.0}) samples.push_back({bytes, 3e-6 + bytes / 5e9});
  const auto exact = bench::fit(samples).value();
  EXPECT_NEAR(exact.latency, 3e-6, 1e-12);
  EXPECT_NEAR(exact.bytes_per_s, 5e9, 1);
  EXPECT_NEAR(exact.worst, 0, 1e-9);
  for (size_t i = 0; i < samples.size(); ++i) samples[i].seconds *= i % 2 == 0 ? 1.1 : 0.9;
  const auto near = bench::fit(samples).value();  // small sizes have the same weight as large ones
  EXPECT_NEAR(near.latency, 3e-6, 0.6e-6);
  EXPECT_NEAR(near.bytes_per_s, 5e9, 1e9);
  EXPECT_GT(near.worst, 0.02);
}

TEST(BenchFit, RequiresThreeSizesAndClampsNegativeLatency) {
  EXPECT_EQ(bench::fit({{1e3, 1e-7}, {1e4, 1e-5}, {1e5, 1e-3}}).value().latency, 0);
  EXPECT_FALSE(bench::fit({{1e3, 1e-6}, {1e6, 1e-3}, {1e6, 2e-3}}));
  EXPECT_FALSE(bench::fit({{1e3, 1e-3}, {1e4, 1e-4}, {1e5, 1e-5}}));  // decreasing times
}

TEST(BenchRow, DetectsUnexpectedTraffic) {
  bench::Measured measured;
  measured.add_sent(4096, 4096);
  EXPECT_EQ(measured.error, "");
  measured.add_sent(4096, 2048);
  EXPECT_EQ(measured.error, "sent 4096 bytes per iteration; expected 2048 (closed form)");
}

// A rank is stalled by a late rank, but not while it computes in parallel with a started operation.
TEST(BenchStalls, CountsOnlyStallsOfRankThread) {
  constexpr auto kLate = std::chrono::milliseconds(100);
  launch({.ranks = 2, .threads_per_rank = 1, .timeout_s = 20}, [&](Communicator& world) {
    StallTimer blocking, concurrent;
    const Tensor x = Tensor::zeros({1024}, DType::float32, world.make_arena());
    const bool late = world.rank() == 1;
    const std::unique_ptr<Communicator> separate =
        world.split(0, world.rank(), "apart");  // a group that exchanges no messages
    world.set_stall_timer(&blocking);
    const std::unique_ptr<Communicator> inner = world.split(0, world.rank(), "inner");
    separate->barrier();
    if (late) std::this_thread::sleep_for(kLate);
    inner->all_reduce(x);
    separate->barrier();
    world.set_stall_timer(&concurrent);
    if (late) std::this_thread::sleep_for(kLate);
    Work sum = world.start_all_reduce(x);
    if (!late) std::this_thread::sleep_for(4 * kLate);
    sum.wait();
    if (late) return;
    EXPECT_GT(blocking.seconds(), 0.05);
    EXPECT_LT(concurrent.seconds(), 0.05);
  });
}

TEST_F(BenchTest, StrategyRowsContainTrafficAndPeakBytes) {
  const Json all = rows("strategy/(one-rank/fp32/1|zero-3/bf16/2|tp/fp32/2|ps-async/fp32/2|pp2.dp2/fp32/4)$");
  ASSERT_EQ(all.size(), 5U);
  for (const Json& row : all) {
    const std::string name = row.at("name");
    const bool alone = name.ends_with("/1"), asynchronous = name.find("async") != std::string::npos;
    EXPECT_NEAR(number(row, "tokens/s") * seconds(row), 12 * 64, 1e-3) << name;
    EXPECT_EQ(row.at("sent"), row.at("sent_expected")) << name;
    EXPECT_EQ(number(row, "sent") == 0, alone) << name;
    EXPECT_NEAR(number(row, "peak_bytes"), number(row, "peak_expected"), 0.02 * number(row, "peak_expected")) << name;
    EXPECT_GT(number(row, alone ? "of_plain_loop" : "of_one_rank"), 0) << name;
    EXPECT_GT(number(row, alone ? "peak_of_plain_loop" : "peak_of_one_rank"), 0) << name;
    EXPECT_EQ(has(row, "exposed_s"), !asynchronous) << name;
    if (asynchronous) continue;
    EXPECT_EQ(number(row, "exposed_s") > 0, !alone) << name;
  }
}

TEST_F(BenchTest, ScheduleRowsContainPredictedAndMeasuredBubbles) {
  const Json all = rows("schedule/(1f1b/2/4|zb-h1/2/4|zb-v/2/2|gpipe/4/4)$");
  ASSERT_EQ(all.size(), 4U);
  for (const Json& row : all) {
    const std::string name = row.at("name");
    const bool split = name.find("/zb-") != std::string::npos, four = name.find("/4/4") != std::string::npos;
    EXPECT_EQ(row.at("sent"), row.at("sent_expected")) << name;
    EXPECT_GT(number(row, "bubble_replayed"), 0) << name;
    EXPECT_LT(number(row, "bubble_replayed"), 1) << name;
    const bool has_formula = name != "schedule/zb-v/2/2";
    EXPECT_NEAR(number(row, "bubble_predicted"), number(row, has_formula ? "bubble_formula" : "bubble_predicted"),
                1e-9);
    EXPECT_GT(number(row, "forward_s"), 0) << name;
    EXPECT_EQ(has(row, "backward_s"), !split) << name;
    EXPECT_EQ(has(row, "weight_s"), split) << name;
    EXPECT_GT(number(row, "of_one_rank"), 0) << name;
    const bool measured = std::thread::hardware_concurrency() >= (four ? 4U : 2U);
    EXPECT_EQ(has(row, "bubble_measured"), measured) << name;
    EXPECT_EQ(row.contains("label"), !measured) << name;
  }
  EXPECT_EQ(all.at(1).at("name"), "schedule/1f1b/2/4");
  EXPECT_NEAR(all.at(1).at("bubble_predicted").get<double>(), 1.0 / 5, 1e-9);  // (p - 1) / (m + p - 1)
}

// Google Benchmark expects "0.0001" before version 1.8 and "0.0001s" since then.
TEST_F(BenchTest, AcceptsMinTimeWithAndWithoutUnit) {
  for (const char* seconds : {"0.0001", "0.0001s"}) {
    const Ran r = must("bench --benchmark_filter=^op/gelu/forward/fp32 --benchmark_min_time=" + std::string(seconds));
    expect_lacks(r.err, "--benchmark_min_time");
  }
  fails("bench --benchmark_min_time=5x", 2, "--benchmark_min_time: expected seconds, such as 0.1 or 0.1s");
}

TEST_F(BenchTest, MpiRanksMeasureTogetherAndOneRankPrints) {
  if (!kWithMpi || std::system("mpirun --version >/dev/null 2>&1") != 0) GTEST_SKIP() << "mpirun is not installed";
  const std::string mpirun =
      "export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 ASAN_OPTIONS=detect_leaks=0 && mpirun "
      "--oversubscribe --bind-to none -n 2 ";
  const Json all = rows("(all_reduce/(direct|native|mpi-out-of-place)/mpi/2/1024|strategy/ddp/fp32/2)$", mpirun);
  ASSERT_EQ(all.size(), 4U) << all;
  for (size_t i = 0; i < 2; ++i) expect_collective(all[i], 1, 2);
  EXPECT_EQ(all[2].at("name"), "collective/all_reduce/mpi-out-of-place/mpi/2/1024");
  EXPECT_GT(number(all[2], "algbw"), 0);
  EXPECT_TRUE(all[2].at("sent").is_null());  // MPI does not report bytes
  EXPECT_GT(number(all[3], "of_one_rank"), 0);
  expect_has(run("bench --benchmark_filter=op/", mpirun).err,
             "no benchmark matches the filter 'op/'");  // these rows use no ranks
}

// Rounds, tables, and comparisons of two files.

TEST_F(BenchTest, EveryRowContainsRoundsAndCounters) {
  std::map<std::string, std::vector<std::string>> keys;
  for (const Json& row :
       rows("op/(gelu|matmul)/.*fp32|direct/threads/2/1024$|strategy/(one-rank|tp|ps-async)/fp32/[12]$"
            "|schedule/(1f1b|zb-h1)/2/2$")) {
    const std::string name = row.at("name"), group = name.substr(0, name.find('/'));
    const std::vector<double> rounds = row.at("rounds");
    ASSERT_GE(rounds.size(), group == "op" ? 5U : 1U) << name;
    EXPECT_EQ(row.at("median"), bench::quantile(rounds, 0.5)) << name;
    EXPECT_GE(row.at("machine_rounds").size(), group == "op" ? 10U : rounds.size()) << name;
    if (group == "strategy" || group == "schedule") {
      const std::vector<double> reference = row.at("reference_rounds");
      ASSERT_EQ(reference.size(), rounds.size()) << name;
      EXPECT_GT(std::ranges::min(reference), 0) << name;
    }
    EXPECT_EQ(row.at("quartiles"), (Json{bench::quantile(rounds, 0.25), bench::quantile(rounds, 0.75)})) << name;
    if (group != "op") {
      EXPECT_NEAR(row.at("median"), row.at("real_time"), 1e-6 * row.at("real_time").get<double>()) << name;
    }
    std::vector<std::string> own;
    for (const auto& [key, value] : row.items())
      if (key != "label") own.push_back(key);
    EXPECT_EQ(keys.try_emplace(group, own).first->second, own) << name;
  }
  EXPECT_EQ(keys.size(), 4U);
  EXPECT_EQ(bench::quantile({4, 1, 2, 3}, 0.25), 1.75);  // as numpy.percentile
  EXPECT_EQ(bench::quantile({7}, 0.75), 7);
}

TEST_F(BenchTest, OptionsSelectRows) {
  for (const auto& [args, pattern] :
       {std::pair{"--dtype bf16 --benchmark_filter=/", ".*/bf16(/.*)?"},
        {"--ranks 1,3", "strategy/one-rank/.*/1|strategy/.*/3|schedule/.*/3/[0-9]+|collective/.*/threads/3/.*"},
        {"--model gpt-mini --ranks 2", "(strategy/[a-z0-9+-]+/(fp32|bf16)/2|schedule/[a-z0-9-]+/2/[0-9]+)/gpt-mini"},
        {"--bytes 8:128:4 --ranks 2", "collective/.*/threads/2/(8|32|128)(/bf16)?"},
        {"--benchmark_filter=broadcast --bytes 1M", "collective/broadcast/.*/1048576(/bf16)?"}}) {
    const auto names = test::to_lines(must(std::string("bench --benchmark_list_tests ") + args).out);
    EXPECT_GT(names.size(), 3U) << args;
    for (const std::string& name : names) EXPECT_TRUE(std::regex_match(name, std::regex(pattern))) << args << name;
  }
  for (const auto& [args, why] :
       {std::pair{"--bytes 8:4:2", "--bytes: expected FROM:TO:FACTOR, such as 8:128M:2, or one"},
        {"--bytes 8:16", "--bytes: expected FROM:TO:FACTOR"},
        {"--bytes 8:16:1", "--bytes: expected FROM:TO:FACTOR"},
        {"--bytes 8T", "--bytes: expected an integer in [1, "},
        {"--bytes 65G", "--bytes: expected an integer in [1, 64], got '65'"},
        {"--dtype fp64", "--dtype: expected fp32, bf16, got 'fp64'"},
        {"--model gpt-3", "--model: expected gpt-nano, "},
        {"--ranks 0", "--ranks: expected an integer in [1, 64], got '0'"},
        {"--ranks 2 --model gpt-nano --bytes 8", "no benchmark matches"},
        {"--benchmark_filter=tp --tabel", "unknown option '--tabel'; did you mean '--table'?"}})
    fails("bench " + std::string(args), 2, why);
}

TEST_F(BenchTest, PrintedTableMatchesTextReport) {
  const Ran r = must(
      "bench --benchmark_min_time=0.0001 --table --ranks 1,2 --dtype fp32 --benchmark_out=a.json "
      "'--benchmark_filter=strategy/(one-rank|ddp|tp)/|broadcast/direct/.*/1024'");
  expect_has(r.out, {"strategy/NAME/DTYPE/RANKS: a training step", "median ms", "quartiles", "spread", "rounds",
                     "of one rank", "tokens/s", "peak MB", "median us", "busbw GB/s", " strategy/ddp/fp32/2 "});
  expect_lacks(r.out, "worst error");  // no row has this counter
  const std::vector<std::string> lines = test::to_lines(r.out.substr(r.out.find("strategy/NAME")));
  const size_t ends = lines.at(1).find("tokens/s") + 8;
  for (size_t i = 2; i < lines.size() && !lines[i].empty(); ++i)
    EXPECT_TRUE(lines[i].size() > ends && std::isdigit(lines[i][ends - 1]) && lines[i][ends] == ' ') << lines[i];
  EXPECT_GE(std::stod(to_json("a.json").at("context").at("busy_processors").get<std::string>()), 0);
  const std::string text = must("report a.json --format text").out;
  EXPECT_EQ(text.substr(text.find('\n')), r.out.substr(r.out.find('\n')));
  EXPECT_EQ(must("report a.json a.json").out, "report-a.html\n");
  const std::string html = read_file(path("report-a.html"));
  test::expect_page(html);
  expect_has(html, {"strategy/ddp/fp32/2", "<svg", "verdict"});
  must("report a.json --figure bench --svg --out a.svg");
  test::expect_balanced(read_file(path("a.svg")));
  fails("report a.json . --format text", 2, "RUN: expected two runs or two `bench` files, got a.json and .");
  fails("report a.json --figure loss --svg", 2, "--figure loss: expected bench with a `bench` file");
  fails("report 'b*.json'", 4, "'b*.json': no file matches");
  write("bad.json", R"({"context": {"num_cpus": 2}, "benchmarks": [{"name": "x", "time_unit": "ms"}]})");
  fails("report bad.json", 4, "bad.json: expected JSON written by `tessera bench`");
}

// A file with one row in Google Benchmark's format.
std::string bench_file(const std::vector<double>& rounds, const char* busy = "0.02", const char* date = "") {
  return Json{{"context", {{"num_cpus", 2}, {"busy_processors", busy}, {"date", date}}},
              {"benchmarks", {{{"name", "op/x"}, {"time_unit", "ms"}, {"real_time", 1}, {"rounds", rounds}}}}}
      .dump();
}

TEST(BenchChange, ConfidenceIntervalMatchesRankSumTest) {
  const report::Change c = report::compute_change({10, 11, 12, 13, 14}, {20, 22, 24, 26, 28});
  EXPECT_NEAR(c.ratio, 2, 1e-12);
  EXPECT_NEAR(c.low, 20.0 / 13,
              1e-12);  // second smallest and second largest of 25 ratios: U = 1 has a probability of 1.6%
  EXPECT_NEAR(c.high, 26.0 / 10, 1e-12);
  EXPECT_FALSE(report::compute_change({10, 11, 12, 13}, {20, 22, 24}).known());
}

// A simulated machine of varying speed on which a program measures one file after another. Rounds of a row, of one rank
// and of the fixed work alternate.
enum class Noise : uint8_t { none, drift, bursts, hidden_bursts, layouts };
class Machine {
 public:
  Machine(Noise noise, uint64_t seed) : noise_(noise), random_(seed), phase_(uniform() * 200) {}
  // Eight rows of strategies or operations; all rows or only the last one are slowed down by a factor.
  std::string measure(const std::string& group, double all = 1, double last = 1) {
    now_ += 40;
    Json rows;
    for (int r = 0; r < 8; ++r) {
      const double layout = memory_layout() * all * (r == 7 ? last : 1), layout_of_one = memory_layout() * all;
      Json row = {{"name", fmt::format("{}/row{}/fp32/2", group, r)}, {"time_unit", "ms"}, {"real_time", 1}};
      busy_ = 0;
      for (int round = 0; round < 9; ++round) {
        if (group == "strategy") row["reference_rounds"].push_back(1e3 * work(0.030 * layout_of_one, 0.15));
        row["rounds"].push_back(1e3 * work((0.020 + 0.002 * r) * layout, 1));
        row["machine_rounds"].push_back(1e3 * work(0.0015, 1));
      }
      row["other_processors"] = noise_ == Noise::bursts ? busy_ / 27 : 0.01;
      rows.push_back(row);
    }
    return Json{{"context", {{"num_cpus", 2}}}, {"benchmarks", rows}}.dump();
  }

 private:
  double uniform() { return std::uniform_real_distribution<double>()(random_); }
  double memory_layout() { return noise_ == Noise::layouts && uniform() < 0.3 ? 1.12 : 1; }
  // Duration of some work, of which bursts of other programs slow down the given fraction by 70%.
  double work(double seconds, double exposed_to_bursts) {
    double factor = std::exp(std::normal_distribution<double>(0, 0.02)(random_));
    if (noise_ == Noise::drift) factor *= 1 + 0.25 * std::sin((now_ + phase_) / 30);
    if (noise_ == Noise::bursts || noise_ == Noise::hidden_bursts) {
      for (; now_ >= change_; burst_ = !burst_)
        change_ +=
            std::exponential_distribution<double>(burst_ ? 0.25 : 0.5)(random_);  // off for 4 s, on for 2 s on average
      if (burst_) factor *= 1 + 0.7 * exposed_to_bursts * (1 + 0.3 * uniform()), ++busy_;
    }
    now_ += seconds * factor;
    return seconds * factor;
  }

  Noise noise_;
  std::mt19937_64 random_;
  double now_ = 0, phase_, change_ = 0, busy_ = 0;
  bool burst_ = false;
};

// The rows with a verdict.
std::vector<std::string> judged(const std::vector<std::string>& a, const std::vector<std::string>& b) {
  report::Bench both;
  for (const std::string& file : a) both.read(0, "a", file);
  for (const std::string& file : b) both.read(1, "b", file);
  std::vector<const report::BenchRow*> group;
  for (const report::BenchRow& row : both.rows) group.push_back(&row);
  std::vector<std::string> out;
  const std::vector<report::Verdict> all = report::verdicts(group);
  for (size_t i = 0; i < group.size(); ++i)
    if (all[i].text.starts_with("slower") || all[i].text.starts_with("faster"))
      out.push_back(group[i]->name + " " + all[i].text);
  return out;
}

TEST(BenchVerdict, DetectsSlowdownsDespiteNoise) {
  for (const std::string group : {"strategy", "op"}) {
    int wrong = 0, all_slower = 0, last_slower = 0;
    for (uint64_t pair = 0; pair < 100; ++pair) {
      Machine noisy(static_cast<Noise>(1 + pair % 4), pair), quiet(Noise::none, pair);
      const std::string a = noisy.measure(group);
      wrong += std::ssize(judged({a}, {noisy.measure(group)}));
      const std::string before = quiet.measure(group);
      all_slower += !judged({before}, {quiet.measure(group, 1.2)}).empty();
      last_slower += judged({before}, {quiet.measure(group, 1, 1.2)}) == std::vector{group + "/row7/fp32/2 slower"};
      wrong += std::ssize(judged({before}, {quiet.measure(group)}));
    }
    EXPECT_LE(wrong, 2) << group;
    EXPECT_GE(all_slower, 90) << group;
    EXPECT_GE(last_slower, 90) << group;
  }
}

TEST(BenchVerdict, RepeatedRunsDetectSmallerChanges) {
  int found = 0, wrong = 0;
  for (uint64_t pair = 0; pair < 20; ++pair) {
    Machine machine(Noise::none, pair), noisy(static_cast<Noise>(1 + pair % 4), pair);
    std::vector<std::string> a, b, same_a, same_b;
    for (int start = 0; start < 8; ++start) {
      a.push_back(machine.measure("strategy")), b.push_back(machine.measure("strategy", 1, 1.08));
      same_a.push_back(noisy.measure("strategy")), same_b.push_back(noisy.measure("strategy"));
    }
    found += judged(a, b) == std::vector<std::string>{"strategy/row7/fp32/2 slower"};
    wrong += std::ssize(judged(same_a, same_b));
    EXPECT_TRUE(judged({a[0]}, {b[0]}).empty());  // below the variation between starts
  }
  EXPECT_GE(found, 19);
  EXPECT_LE(wrong, 1);
}

TEST(BenchFiles, UsesRunMediansIfThereAreFiveRuns) {
  report::Bench all;
  for (int i = 0; i < 4; ++i) all.read(0, "a", bench_file({1.0 + i, 2.0 + i, 9.0 + i}));
  EXPECT_EQ(all.rows.at(0).times(0).size(), 12U);
  all.read(0, "a", bench_file({5, 6, 9}));
  EXPECT_EQ(all.rows.at(0).times(0), (std::vector<double>{2, 3, 4, 5, 6}));
  EXPECT_TRUE(all.rows.at(0).times(1).empty());
  EXPECT_THROW(all.read(0, "a", bench_file({1, -1})), InputError);
}

// Quartiles of five rounds are the second and the fourth.
TEST(BenchFiles, MarksSpreadsAboveTenPercent) {
  const std::pair<std::vector<double>, const char*> table[] = {{{90, 95, 100, 105, 120}, " 10.0%   "},
                                                               {{90, 95, 100, 105.1, 120}, " 10.1% ! "},
                                                               {{90, 94.9, 100, 105, 120}, " 10.1% ! "},
                                                               {{90, 95, 105, 120}, " -   "}};  // too few
  for (const auto& [rounds, args] : table) {
    report::Bench all;
    all.read(0, "a", bench_file(rounds));
    expect_has(report::as_text(all.parts(1)), args);
  }
}

TEST(BenchFiles, GroupsFilesWithEqualMachineLoad) {
  report::Bench all;
  for (const char* date : {"1:00", "2:00", "3:00"})
    all.read(0, std::string("a-") + date[0], bench_file({1}, "0.39", date));
  all.read(0, "a-4", bench_file({1}, "1.26", "4:00"));
  all.read(1, "b-1", bench_file({1}, "0.41", "5:00"));
  all.read(1, "b-2", bench_file({1}));
  EXPECT_EQ(all.about(),
            "a-1 and 2 more: 2 cores; 1:00 to 3:00\n"
            "a-4: 2 cores, 1.3 of them BUSY before the start; 4:00\n"
            "b-1: 2 cores, 0.4 of them BUSY before the start; 5:00\n"
            "b-2: 2 cores\n");
}

// Measured plans compared with their predictions, and the output of `train` on a calibrated machine.

class PlanMeasureTest : public ProgramTest {
 protected:
  void write_machine() const {
    const planner::Identity here = planner::identity_of_this(TESSERA_VERSION);
    fs::create_directories(path("cache"));
    std::ofstream(file()) << to_text(test::synthetic_machine(here.cores, TESSERA_VERSION));
  }
  fs::path file() const { return path("cache") / machine_file(planner::identity_of_this(TESSERA_VERSION)).filename(); }
  const std::string plan_ =
      "plan --model gpt-nano --layers 2 --channels 32 --context 16 --vocab 64 --hardware this --dtype fp32 --batch 8 "
      "--ranks 2 ";
};

TEST_F(PlanMeasureTest, PrintsEveryPartOfStepOnTwoRanks) {
  write_machine();
  const Ran r =
      must(plan_ + "--pp 2 --schedule zb-h1 --microbatches 2 --zero 0 --recompute none --measure 1 --format json");
  const std::vector<Json> lines = parse_records(r.out);
  ASSERT_GE(lines.size(), 3U);
  EXPECT_EQ(lines.back()["event"], "recommendation");
  const Json& measured = lines[lines.size() - 2];
  test::expect_values(measured, {{"event", "measured"}, {"number", 1}});
  EXPECT_EQ(measured["plan"]["pp"], 2);
  std::set<std::string> parts;
  for (const Json& part : measured["parts"]) {
    const std::string name = part["part"];
    const double p = part["predicted"], m = part["measured"];
    parts.insert(name);
    EXPECT_TRUE(m >= 0 && p >= 0) << part;
    EXPECT_TRUE(name != "step" || part["off"].get<bool>() == (std::abs(p - m) > 0.15 * m)) << part;
    // Counted values agree exactly.
    const bool counted = name == "memory, parameters" || name == "memory, gradients" || name == "memory, optimizer";
    EXPECT_TRUE(!counted || p == m) << part;
  }
  for (const char* part :
       {"step", "F of stage 0", "I of stage 0", "W of stage 0", "F of stage 1", "I of stage 1", "W of stage 1",
        "compute", "tp exposed", "cp exposed", "dp exposed", "bubble", "optimizer", "memory, parameters",
        "memory, gradients", "memory, optimizer", "memory, activations", "memory, communication", "memory, peak"})
    EXPECT_TRUE(parts.contains(part)) << part;
}

TEST_F(PlanMeasureTest, NamesInaccuratelyPredictedParts) {
  write_machine();
  const Ran r = must(plan_ + "--dp 2 --microbatches 1 --zero 0 --recompute none --measure 1");
  expect_has(r.out, {"Measured plan 1: dp=2", "Off by more than 15%: step; "});
}

TEST_F(PlanMeasureTest, RejectsInvalidOptions) {
  write_machine();
  fails("plan --model gpt2 --hardware h100 --ranks 2 --measure 1", 2, "--measure: requires --hardware this");
  fails("plan --model gpt2 --hardware h100 --ranks 2 --calibrate", 2, "--calibrate: requires --hardware this");
  for (const char* bad : {"0", "1,", "x", "1,,2", "1 2"})
    fails(plan_ + "--measure '" + bad + "'", 2, "--measure: expected an integer");
  fails(plan_ + "--measure 999", 2, "--measure: expected positions in the ranking, 1 to ");
  fails(plan_ + "--software megatron", 2, "--software: expected tessera");
}

TEST_F(PlanMeasureTest, TrainPrintsPredictedStepTimeIfAvailable) {
  const auto trained = [&](const std::string& out) {
    return train("--ranks 2 --steps 6 --no-eval --no-save --out " + out);
  };
  const auto summary = [&](const std::string& out) { return trained(out + " --format json").last_record(); };
  expect_lacks(trained("a").out, "predicted");
  EXPECT_FALSE(summary("b").contains("predicted"));
  write_machine();
  expect_has(trained("c").out, "Step time: predicted ");
  const Json with = summary("d");
  ASSERT_TRUE(with.contains("predicted"));
  EXPECT_GT(with["predicted"]["step_s"], 0.0);
  EXPECT_GT(with["predicted"]["measured_step_s"], 0.0);
  expect_lacks(trained("experts --experts 4").out, "predicted");  // parts without measurements
  std::ofstream(file(), std::ios::app) << "damaged\n";
  EXPECT_FALSE(summary("e").contains("predicted"));
}

}  // namespace
}  // namespace tessera
