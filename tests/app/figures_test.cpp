// All reported numbers of a run, compared with values computed by hand.
#include <algorithm>
#include <array>
#include <chrono>
#include <clocale>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <functional>
#include <map>
#include <regex>
#include <set>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

#include "app/report/report.h"
#include "app/train/output.h"
#include "bench/op_bench.h"
#include "tensor/cpu/vectorize.h"
#include "tests/app/curves.h"
#include "tests/support/scalars.h"

namespace tessera {
namespace {

TEST(RunMetrics, StepThroughputEqualsTokensOverTime) {
  StepReport r;
  set_time(r, 0.25, 1200);
  EXPECT_EQ(std::tie(r.step_ms, r.tokens_per_s), std::tuple(250, 4800));
}

TEST(RunMetrics, RatesAreRelativeToMachinePeak) {
  EXPECT_EQ(bench::matmul_throughput(1000, 0.5), 4e9);  // 2 10^9 FLOPs in half a second
  EXPECT_EQ(bench::copy_bandwidth(3'000'000, 0.5), 1.2e7);
  const bench::Throughput by_memory = bench::compute_throughput(600, 1000, 2, {.bytes_per_s = 400, .flops = 1000});
  EXPECT_EQ(std::tie(by_memory.bytes_per_s, by_memory.flops, by_memory.fraction),
            std::tuple(300, 500, 0.75));  // 1.5 s of 2
  EXPECT_EQ(bench::compute_throughput(600, 1600, 2, {.bytes_per_s = 400, .flops = 1000}).fraction, 0.8);
  EXPECT_EQ(ranks_at_once(4, 2, 1), 2);  // two cores for four ranks of one thread
  EXPECT_EQ(ranks_at_once(8, 16, 4), 4);
  EXPECT_EQ(ranks_at_once(2, 64, 1), 2);
  EXPECT_EQ(ranks_at_once(3, 1, 4), 1);
}

TEST(RunMetrics, MedianRateExcludesFirstFiveSteps) {
  EXPECT_EQ(median_throughput({1, 2, 3, 4, 5, 1000, 3000, 2000}), 2000);
  EXPECT_EQ(median_throughput({9000, 9000, 9000, 9000, 9000, 10}), 10);
  EXPECT_EQ(median_throughput({30, 10, 20, 50, 40}), 30);  // at most five rates: all are used
  EXPECT_EQ(median_throughput({}), 0);
}

TEST(RunMetrics, FormatsNumbersBytesAndTimes) {
  using Args = std::pair<double, const char*>;
  const Args cases[] = {
      {0, "0"},       {7, "7"},         {1.2345, "1.23"}, {99.96, "100"},       {999, "999"},
      {1234, "1.2K"}, {12345, "12.3K"}, {1.5e6, "1.50M"}, {2'345'678, "2.35M"}, {7'654'000'000, "7.65B"}};
  for (const auto& [x, expected] : cases) EXPECT_EQ(format_si(x), expected);
  const Args durations[] = {{4.4, "4 s"},        {59.4, "59 s"},         {59.5, "1 min 00 s"}, {61, "1 min 01 s"},
                            {185, "3 min 05 s"}, {3599.6, "1 h 00 min"}, {3720, "1 h 02 min"}, {7384, "2 h 03 min"}};
  for (const auto& [s, expected] : durations) EXPECT_EQ(duration(s), expected);
  const Args bytes[] = {{999, "999 B"}, {1234, "1.23 KB"}, {45'600'000, "45.6 MB"}, {7.5e12, "7.50 TB"}};
  for (const auto& [x, expected] : bytes) EXPECT_EQ(report::short_bytes(x), expected);
  const Args times[] = {{0.431, "431 µs"}, {1.234, "1.23 ms"}, {250.26, "250.3 ms"}, {2100, "2.10 s"}};
  for (const auto& [ms, expected] : times) EXPECT_EQ(report::short_time(ms), expected);
  EXPECT_EQ(report::percent(0.375), "37.5%");
  EXPECT_EQ(report::grouped(1234567), "1,234,567");
  EXPECT_EQ(report::grouped(123), "123");
}

struct Said {
  std::string out;
  std::vector<Json> records;  // lines of metrics.jsonl
  test::Scalars scalars;      // read from the event file
};

// Eight steps of 48 tokens; the last three have 1,000, 3,000 and 2,000 tokens/s.
Said say(const std::string& format, const Plan& plan, const std::vector<int64_t>& peaks) {
  const TemporaryDirectory temporary(fs::temp_directory_path() / "tessera-figures-");
  const TrainCommand command{.config = {.optim = {.steps = 8}, .plan = plan, .run = {.no_save = true}},
                             .options = {.format = format, .quiet = true}};
  testing::internal::CaptureStdout();
  {
    const Dataset none;
    const RunDirectory directory(temporary.path());
    const Sequences sequences;
    TrainOutput output({command, none, directory, sequences});
    Metrics metrics(temporary.path(), 0);
    const std::array<double, 8> rates = {1, 2, 3, 4, 5, 1000, 3000, 2000};
    for (int64_t i = 0; i < 8; ++i) {
      const StepReport report{.step = i + 1,
                              .loss = 4 - 0.25 * static_cast<double>(i),
                              .lr = 0.5,
                              .grad_norm = 3,
                              .tokens_per_s = rates[static_cast<size_t>(i)],
                              .step_ms = 48e3 / rates[static_cast<size_t>(i)]};
      output.step(report, metrics.step(report));
    }
    const Validation found{.loss = 2.125, .bits_per_byte = 3.0625};
    output.validated(8, found, metrics.validation(8, found));
    output.summary({.steps = 8,
                    .tokens_per_step = 48,
                    .flops_per_token = 3e6,
                    .rank_peak_flops = 1e10,
                    .strategy = "ddp",
                    .usage = {.peak_bytes = peaks,
                              .sent = {{"dp", "all_reduce", 3, 120, 0}, {"dp", "broadcast", 1, 8, 0}},
                              .straggler = Straggler{2, 0.246},
                              .arena = make_arena()},
                    .predicted_s = 0.02,
                    .experts = {.rows = {{2, 2, 2, 2}, {1, 5, 1, 1}}, .dropped = 4}},
                   [&](const std::string& record) { metrics.write(record); });
  }
  Said said{
      .out = testing::internal::GetCapturedStdout(), .records = {}, .scalars = test::read_scalars(temporary.path())};
  said.records = parse_records(read_file(temporary.path() / "metrics.jsonl"));
  return said;
}

TEST(RunMetrics, JsonRecordsContainEveryMetric) {
  const Said said = say("json", {}, {5'400'000});
  ASSERT_EQ(said.records.size(), 10U);
  EXPECT_EQ(said.records[5], Json::parse(R"({"event": "step", "step": 6, "loss": 2.75, "lr": 0.5, "grad_norm": 3.0,
                                             "tokens_per_s": 1000.0, "step_ms": 48.0})"));
  EXPECT_EQ(said.records[8], Json::parse(R"({"event": "eval", "step": 8, "val_loss": 2.125,
                                             "val_bits_per_byte": 3.0625})"));
  const Json& summary = said.records[9];
  const auto expected = Json::parse(R"({"steps": 8, "tokens": 384, "loss": 2.25, "val_loss": 2.125,
      "val_bits_per_byte": 3.0625, "tokens_per_s": 2000.0, "flops_per_token": 3e6, "peak_flops": 1e10, "mfu": 0.6,
      "peak_bytes": [5400000], "sent_bytes": {"dp": {"all_reduce": 120, "broadcast": 8}},
      "straggler": {"rank": 2, "share": 0.246}, "predicted": {"step_s": 0.02, "measured_step_s": 0.024}})");
  // mfu: 2,000 tokens/s x 3 MFLOP per token / 10 GFLOP/s
  for (const auto& [key, value] : expected.items()) EXPECT_EQ(summary[key], value) << key;
  EXPECT_EQ(parse_records(said.out), said.records);
}

TEST(RunMetrics, TensorBoardScalarsMatchJsonRecords) {
  const Said said = say("json", {}, {1});
  test::Scalars expected;
  for (const Json& record : said.records)
    for (const auto& [key, value] : record.items())
      if (record["event"] != "summary" && key != "event" && key != "step" && key != "step_ms")
        expected[key].emplace_back(record["step"], value.get<float>());
  EXPECT_EQ(expected.size(), 6U);
  EXPECT_EQ(said.scalars, expected);
}

TEST(RunMetrics, TextSummaryContainsLossThroughputAndPeakBytes) {
  const std::string one = say("text", {}, {5'400'000}).out;
  expect_has(one, {"After 8 steps (384 tokens) the validation loss is 2.1250 (3.0625 bits per byte).\n", "\nloss 4.00 ",
                   " 2.25\n2.0K tokens/s, 60% of this machine's matmul peak; at most 5.4 MB of memory.\n",
                   "Step time: predicted 20.00 ms for this machine, measured 24.00 ms.\n",  // 48 of 2,000 tokens/s
                   "Straggler: the other ranks waited for rank 2 25% of the time.\n",
                   // five of eight choices, where two would be uniform
                   "Busiest expert: number 1 of layer 1, with 2.50 times the mean load; 4 tokens dropped.\n"});
  const std::string three = say("text", {.dp = 3, .backend = Backend::mpi}, {54'000'000, 56'700'000, 1}).out;
  expect_has(three, "2.0K tokens/s, 20% of this machine's matmul peak; at most 57 MB of memory per rank.\n");
}

TEST(RunMetrics, MfuAccountsForConcurrentRanks) {
  const auto mfu = [](const Plan& plan) {
    return say("json", plan, std::vector<int64_t>(static_cast<size_t>(plan.ranks()), 1)).records.back()["mfu"];
  };
  EXPECT_DOUBLE_EQ(mfu({.dp = 4, .backend = Backend::mpi}), 0.15);
  const int64_t cores = std::thread::hardware_concurrency(), threads = cpu::threads();
  cpu::set_threads(1);
  EXPECT_DOUBLE_EQ(mfu({.dp = 2}), 0.6 / static_cast<double>(std::min<int64_t>(2, cores)));
  EXPECT_DOUBLE_EQ(mfu({.dp = 2, .tp = 500}), 0.6 / static_cast<double>(std::min<int64_t>(1000, cores)));
  cpu::set_threads(static_cast<int>(threads));
}

// The numbers printed by the programs are consistent: rate x time = work, and equal values everywhere.

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

using RunMetricsTest = ProgramTest;

constexpr double kTokens = 4 * 16;

// Identities that hold for a run of kSmall with this duration.
void expect_identities(const std::vector<Json>& records, double seconds, int64_t vocab) {
  std::vector<double> rates;
  double ms = 0;
  for (const Json& r : records) {
    if (r["event"] != "step") continue;
    EXPECT_NEAR(r["tokens_per_s"].get<double>() * r["step_ms"].get<double>() * 1e-3, kTokens, 1e-9 * kTokens) << r;
    ms += r["step_ms"].get<double>();
    if (rates.emplace_back(r["tokens_per_s"]); rates.size() == 12) {
      EXPECT_EQ(r["loss"], records.back()["loss"]);
    }
  }
  EXPECT_LE(ms * 1e-3, seconds);
  ASSERT_EQ(rates.size(), 12U);
  std::sort(rates.begin() + 5, rates.end());
  const Json& s = records.back();
  EXPECT_EQ(s["tokens_per_s"], rates[5 + 3]);  // the median of seven
  EXPECT_EQ(s["tokens"], 12 * kTokens);
  // One layer of 16 channels: 12 C^2 in matrices, 9 C in biases, two norms; the final norm; the tied token table.
  const double parameters = 12 * 256 + 9 * 16 + 4 * 16 + 2 * 16 + 16.0 * static_cast<double>(vocab);
  EXPECT_EQ(s["flops_per_token"], 6 * parameters + 12 * 16 * 16);
  const double used = s["flops_per_token"].get<double>() * s["tokens_per_s"].get<double>();
  EXPECT_NEAR(s["mfu"].get<double>() * s["peak_flops"].get<double>(), used, 1e-9 * used);
}

TEST_F(RunMetricsTest, ThroughputTimesAndFlopsAreConsistent) {
  const std::string text = read_file(path("text.txt"));
  const auto vocab = std::ssize(std::set<char>(text.begin(), text.end()));
  for (const std::string plan : {"--ranks 2 --trace", "--ranks 2 --dp-mode ps-async"}) {
    SCOPED_TRACE(plan);
    const std::string out = plan.find("async") == std::string::npos ? "run" : "async";
    const Clock::time_point start = Clock::now();
    const Ran ran = train(fmt::format("--format json --out {} {}", out, plan));
    const double seconds = seconds_since(start);
    ASSERT_EQ(ran.status, 0) << ran.err;
    const std::vector<Json> records = parse_records(ran.out);
    EXPECT_EQ(records, parse_records(read_file(path(out) / "metrics.jsonl")));
    expect_identities(records, seconds, vocab);
    for (const auto& [tag, points] : test::read_scalars(path(out)))
      for (const auto& [step, value] : points) {
        const auto found = std::ranges::find_if(records, [&, t = tag, at = step](const Json& r) {
          return r.contains("step") && r["step"] == at && r.contains(t);
        });
        ASSERT_NE(found, records.end()) << tag << " " << step;
        EXPECT_EQ(value, (*found)[tag].get<float>()) << tag << " " << step;
      }
  }
  const Json summary = parse_records(read_file(path("run/metrics.jsonl"))).back();
  const std::string page = report::make_report(report::read_record(path("run")), true);
  const auto fact = [&](const std::string& name) {
    const size_t at = page.find("<dt>" + name + "</dt><dd>") + name.size() + 13;
    return page.substr(at, page.find("</dd>", at) - at);
  };
  EXPECT_EQ(fact("tokens/s"), report::grouped(std::llround(summary["tokens_per_s"].get<double>())) + " (median step)");
  EXPECT_EQ(fact("final loss"), fmt::format("{:.4f}", summary["loss"].get<double>()));
  EXPECT_EQ(fact("validation loss"), fmt::format("{:.4f}", summary["val_loss"].get<double>()));
  EXPECT_EQ(fact("steps"), "12");
  const auto expect_row = [&](const std::string& begin, int64_t bytes) {
    const std::string end = "<td class=\"n\">[0-9,]+</td><td class=\"n\">" + report::grouped(bytes) + "</td>";
    EXPECT_TRUE(std::regex_search(page, std::regex(begin + end))) << begin;
  };
  int64_t all = 0;
  for (const auto& [axis, operations] : summary["sent_bytes"].items())
    for (const auto& [operation, bytes] : operations.items()) {
      all += bytes.get<int64_t>();
      expect_row(fmt::format("<td>{}</td><td>{}</td>.*\n?.*", axis, operation), bytes);
    }
  expect_row("<td>all</td><td></td>.*", all);
  for (const Json& peak : summary["peak_bytes"]) expect_has(page, "\"all n\">" + report::grouped(peak) + "</td></tr>");
}

// Measured by the test's own clock, which includes the start of the program.
TEST_F(RunMetricsTest, StepTimesMatchExternalClock) {
  const TrainConfig job{.model = {.layers = 1, .heads = 2, .channels = 64, .context = 64, .vocab = 64},
                        .optim = {.batch = 4},
                        .plan = {.threads_per_rank = 1}};
  launch(launch_options(job.plan), [&](Communicator& world) {
    Trainer trainer(job, synthetic_sequences(64, 64, 4, 1), world);
    double reported = 0, observed = 0;
    for (int i = 0; i < 10; ++i) {
      const Clock::time_point start = Clock::now();
      reported += trainer.step().step_ms * 1e-3;
      observed += seconds_since(start);
    }
    EXPECT_LE(reported, observed);
    EXPECT_GE(reported, 0.6 * observed);
  });
}

TEST_F(RunMetricsTest, BenchmarkRatesEqualWorkOverTime) {
  const Ran ran = must(
      "bench --benchmark_filter='^op/(add|scale|matmul|gelu_mlp)/.*' --benchmark_format=json "
      "--benchmark_min_time=0.001");
  const Json all = Json::parse(ran.out);
  constexpr double kPlane = 12 * 256 * 384, kProduct = 3'623'878'656;
  // Bytes if every element is read or written once, and FLOPs of matmuls.
  const std::map<std::string, std::pair<double, double>> work = {
      {"add/forward", {3 * kPlane, 0}},
      {"add/backward", {5 * kPlane, 0}},
      {"scale/forward", {2 * kPlane, 0}},
      {"scale/backward", {3 * kPlane, 0}},
      {"matmul/forward", {kPlane + 384 * 1536 + 4 * kPlane, kProduct}},
      {"matmul/backward", {2 * (kPlane + 384 * 1536) + 4 * kPlane, 2 * kProduct}},
      {"gelu_mlp/forward", {2 * kPlane + 2 * 384 * 1536 + 1536 + 384, 2 * kProduct}},
      {"gelu_mlp/backward", {2 * (kPlane + 2 * 384 * 1536 + 1536 + 384) + kPlane, 4 * kProduct}},
  };
  size_t observed = 0;
  for (const Json& row : all["benchmarks"]) {
    const std::string name = row["name"].get<std::string>().substr(3);  // after "op/"
    const bool wide = name.ends_with("fp32");
    const auto [elements, flops] = work.at(name.substr(0, name.size() - 5));
    const double bytes = elements * (wide ? 4 : 2), seconds = row["real_time"].get<double>() * 1e-6;
    EXPECT_EQ(row["time_unit"], "us");
    EXPECT_NEAR(row["bytes/s"].get<double>() * seconds, bytes, 1e-6 * bytes) << name;
    EXPECT_EQ(row["FLOP/s"].is_number(), flops > 0) << name;  // null: an op without matmuls
    EXPECT_NEAR((flops > 0 ? row["FLOP/s"].get<double>() : 0) * seconds, flops, 1e-6 * flops) << name;
    double roof_bytes = 0, roof_flops = 0;  // "10.1 GB/s, 120.2 GFLOP/s"
    ASSERT_EQ(std::sscanf(all["context"][wide ? "ceiling_fp32" : "ceiling_bf16"].get<std::string>().c_str(),
                          "%lf GB/s, %lf GFLOP/s", &roof_bytes, &roof_flops),
              2);
    const double min_seconds = std::max(bytes / roof_bytes, flops / roof_flops) * 1e-9;
    EXPECT_NEAR(row["share"].get<double>() * seconds, min_seconds, 0.05 * min_seconds) << name;
    ++observed;
  }
  EXPECT_EQ(observed, 2 * work.size());
}

TEST_F(RunMetricsTest, GenerationTimesMatchExternalClock) {
  train("--ranks 1 --out run");
  const Clock::time_point start = Clock::now();
  const Ran ran = run("generate run --prompt Line --tokens 50");
  const double seconds = seconds_since(start);
  std::smatch found;
  ASSERT_TRUE(std::regex_search(
      ran.err, found, std::regex("50 tokens from .*, ([0-9.]+)(K?) tokens/s; time to first token ([0-9.]+) s")))
      << ran.err;
  const double rate = std::stod(found[1]) * (found[2].length() > 0 ? 1e3 : 1);
  EXPECT_LE(49 / rate + std::stod(found[3]), 1.06 * seconds);
}

// Progress lines and metrics.jsonl.

// The output of a Progress with these options.
std::string shown(Progress::Options options, const std::function<void(Progress&)>& use) {
  char* text = nullptr;
  size_t size = 0;
  std::FILE* const file = open_memstream(&text, &size);
  options.to = file;
  {
    Progress progress(options);
    use(progress);
  }
  std::fclose(file);
  const std::string out(text, size);
  std::free(text);
  return out;
}

// For 100 steps.
std::string shown(Progress::Options options) {
  options.steps = 100;
  return shown(options, [](Progress& progress) {
    progress.message("hello");
    for (int64_t i = 1; i <= 100; ++i) progress.step({i, 2.5, 1e-3, 0.75, 12345, 100});
    progress.message("bye");
  });
}

// The run has 1,000 steps, and a new step has a weight of one tenth in the mean: 1,000 ms, then 1,000 + 0.1 x 1,000 ms,
// then 1,100 - 0.1 x 600 ms.
TEST(Progress, EstimatesRemainingTimeFromMovingAverage) {
  const std::string out = shown({.steps = 1000}, [](Progress& progress) {
    progress.step({.step = 1, .loss = 2.25, .lr = 0.001, .grad_norm = 0.5, .tokens_per_s = 4800, .step_ms = 1000});
    progress.step({.step = 100, .tokens_per_s = 4800, .step_ms = 2000});
    for (const int64_t step : {550, 1000}) progress.step({.step = step, .tokens_per_s = 4800, .step_ms = 500});
  });
  expect_has(out, {"step 1/1000  loss 2.2500  lr 1.00e-03  grad norm 0.50  4.8K tok/s  16 min 39 s left\n",  // 999 s
                   "tok/s  16 min 30 s left\n",                        // 900 steps of 1.1 s
                   "tok/s  7 min 48 s left\n", "tok/s  0 s left\n"});  // 450 steps of 1.04 s
}

TEST(Progress, WritesPlainLinesWithoutTerminal) {
  const std::string out = shown({});
  expect_lacks(out, {"\033", "\r"});
  expect_has(out, "step 50/100  loss 2.5000  lr 1.00e-03  grad norm 0.75  12.3K tok/s  5 s left\n");
  const auto lines = std::count(out.begin(), out.end(), '\n');
  EXPECT_GE(lines, 20);
  EXPECT_LE(lines, 25);
}

TEST(Progress, RewritesOneLineOnTerminal) {
  const std::string out = shown({.terminal = true, .color = true});
  expect_has(out, {"\r\033[K", "\033[36m", "step 100/100"});
  EXPECT_EQ(std::count(out.begin(), out.end(), '\n'), 2);  // the two messages
  expect_lacks(shown({.terminal = true}), "\033[36m");     // NO_COLOR
}

// The maximum number of terminal cells of a line; colours take none, every other character takes one.
size_t widest(const std::string& out) {
  size_t cells = 0, max_cells = 0;
  for (size_t i = 0; i < out.size(); ++i) {
    const auto byte = static_cast<unsigned char>(out[i]);
    if (byte == '\033')
      i = out.find_first_of("mK", i);
    else if (byte == '\r' || byte == '\n')
      cells = 0;
    else
      cells += (byte & 0xC0) != 0x80;
    max_cells = std::max(max_cells, cells);
  }
  return max_cells;
}

TEST(Progress, NeverWrapsOnNarrowTerminal) {
  for (const int64_t columns : {1, 20, 60, 80, 90, 100, 200})
    EXPECT_LT(widest(shown({.terminal = true, .color = true, .columns = columns})), std::max<size_t>(columns, 7))
        << columns;  // "hello" is not a progress line
  expect_has(shown({.terminal = true, .columns = 80}), "left");
  expect_has(shown({.terminal = true, .columns = 120}), "━");
}

TEST(Progress, IsSilentWhenQuiet) { EXPECT_EQ(shown({.quiet = true}), ""); }

TEST(Progress, FormatsNumbersIndependentlyOfLocale) {
  const std::string expected = shown({});
  const char* const before = std::setlocale(LC_ALL, nullptr);
  const std::string restore = before;
  if (!std::setlocale(LC_ALL, "de_DE.UTF-8") && !std::setlocale(LC_ALL, "fr_FR.UTF-8"))
    GTEST_SKIP() << "no locale with a decimal comma is installed";
  EXPECT_EQ(shown({}), expected);
  std::setlocale(LC_ALL, restore.c_str());
}

TEST(Progress, IgnoresWriteErrors) {
  std::FILE* const full = std::fopen("/dev/full", "w");
  Progress progress({.to = full, .steps = 3});
  for (int64_t i = 1; i <= 3; ++i) progress.step({i, 1, 1, 1, 1, 1});
  std::fclose(full);
}

TEST(NumberText, OmitsSignOfNan) {
  EXPECT_EQ(number_text(std::copysign(std::nan(""), -1.0)), "nan");
  EXPECT_EQ(number_text(-2.5), "-2.5");
}

TEST(Sparkline, ScalesMeansToFullRange) {
  EXPECT_EQ(sparkline({7, 6, 5, 4, 3, 2, 1, 0}, 8), "█▇▆▅▄▃▂▁");
  EXPECT_EQ(sparkline({2, 0, 0, 0}, 2), "█▁");  // means of halves
  EXPECT_EQ(sparkline({3, 3}, 9), "▁▁");
  EXPECT_EQ(sparkline({}, 9), "");
}

class MetricsTest : public testing::Test {
 protected:
  fs::path run() const { return directory_.path(); }
  fs::path path() const { return run() / "metrics.jsonl"; }
  TemporaryDirectory directory_{fs::temp_directory_path() / "tessera-metrics-"};
};

TEST_F(MetricsTest, ResumeDropsRecordsOfRepeatedSteps) {
  {
    Metrics m(run(), 0);
    for (int i = 1; i <= 4; ++i) m.write(R"({"event":"step","step":)" + std::to_string(i) + "}");
    m.write(R"({"event":"summary","steps":4})");
  }
  std::ofstream(path(), std::ios::app) << R"({"event":"step","st)";  // cut off by a kill
  {
    Metrics m(run(), 2);
    m.write(R"({"event":"step","step":3})");
  }
  EXPECT_EQ(read_file(path()),
            "{\"event\":\"step\",\"step\":1}\n{\"event\":\"step\",\"step\":2}\n{\"event\":\"step\",\"step\":3}\n");
}

TEST_F(MetricsTest, DetectsRecordedValidation) {
  for (const int64_t resumed : {0, 3, 2}) {
    Metrics m(run(), resumed);
    EXPECT_EQ(m.has_validation(2), resumed == 2) << resumed;
    EXPECT_EQ(m.has_validation(3), resumed == 3) << resumed;
    if (resumed != 0) continue;
    for (const int i : {2, 3}) m.write(R"({"event":"eval","step":)" + std::to_string(i) + "}");
  }
}

TEST_F(MetricsTest, CountsValidationsSinceBest) {
  const std::pair<std::vector<double>, int64_t> table[] = {{{}, 0},
                                                           {{3}, 0},
                                                           {{3, 2}, 0},
                                                           {{2, 3}, 1},
                                                           {{2, 2}, 1},  // an equal loss is no improvement
                                                           {{3, 1, 2, 1, 4}, 3},
                                                           {{3, 1, 2, 0.5}, 0}};
  for (const auto& [losses, since] : table) {
    Metrics m(run(), 0);
    int64_t step = 0;
    for (const double loss : losses) m.validation(++step, {.loss = loss});
    EXPECT_EQ(m.validations_since_best(), since) << ::testing::PrintToString(losses);
  }
}

TEST_F(MetricsTest, RejectsForeignFilesAndFullDisk) {
  std::ofstream(path()) << "something else\n";
  EXPECT_THROW(Metrics(run(), 3), InputError);
  EXPECT_THROW(Metrics("/nonexistent", 0), OutputError);
  fs::remove(path());
  fs::create_symlink("/dev/full", path());
  Metrics full(run(), 0);
  EXPECT_THROW(full.write("{}"), OutputError);
}

// TensorBoard's view of a run: exactly the values of metrics.jsonl, read by TensorBoard's own reader.

using test::Curves;

class EventsTest : public ProgramTest {
 protected:
  Curves recorded() const { return test::recorded_curves(path("run")); }
  Curves read(const std::string& view) const { return test::read_curves(path("run"), view); }
};

TEST_F(EventsTest, TensorBoardMatchesMetricsAfterResume) {
  if (const std::string why = test::tensorboard_missing(); !why.empty()) GTEST_SKIP() << why;
  train("--out run --eval-every 4 --save-every 5");
  const Curves first = recorded();
  EXPECT_EQ(read("shown"), first);
  EXPECT_TRUE(first.at("loss").size() == 12 && first.at("val_loss").size() == 3);

  // The state after a kill at the very end: the newest checkpoint is of step 10, and the last record is incomplete.
  fs::remove_all(path("run/checkpoints/step-12"));
  ASSERT_EQ(event_files("run").size(), 1U);
  fs::resize_file(event_files("run")[0], fs::file_size(event_files("run")[0]) - 7);
  std::ofstream(path("run/metrics.jsonl"), std::ios::app) << R"({"event":"step","st)";
  must("train --resume --out run");
  EXPECT_EQ(event_files("run").size(), 2U);
  const Curves resumed = recorded();
  for (const char* tag : {"loss", "lr", "grad_norm", "val_loss"}) EXPECT_EQ(resumed.at(tag), first.at(tag)) << tag;
  EXPECT_EQ(read("shown"), resumed);
  EXPECT_EQ(read("held").at("loss").size(), 14U);  // steps 11 and 12 twice: the session start hides the first ones

  // No steps are left, so nothing is written twice.
  must("train --resume --out run");
  EXPECT_EQ(event_files("run").size(), 3U);
  EXPECT_EQ(recorded(), resumed);
  EXPECT_EQ(read("shown"), resumed);
}

}  // namespace
}  // namespace tessera
