// Every figure that a person reads of a run, worked out by hand from what was told.

#include <nlohmann/json.hpp>
#include <sstream>

#include "app/report/report.h"
#include "app/train/output.h"
#include "bench/op_bench.h"
#include "tensor/cpu/vectorize.h"
#include "tests/app/program.h"
#include "tests/support/scalars.h"

namespace tessera {

namespace {

using nlohmann::json;

TEST(Figures, OfAStep) {
  StepReport r;
  set_time(r, 0.25, 1200);
  EXPECT_EQ(r.step_ms, 250);
  EXPECT_EQ(r.tokens_per_s, 4800);
}

TEST(Figures, OfTheMachine) {
  EXPECT_EQ(bench::product_rate(1000, 0.5), 4e9);  // 2 10^9 FLOPs in half a second
  EXPECT_EQ(bench::copy_rate(3'000'000, 0.5), 1.2e7);
  const bench::Rates by_memory = bench::rates_of(600, 1000, 2, {.bytes_per_s = 400, .flops = 1000});
  EXPECT_EQ(by_memory.bytes_per_s, 300);
  EXPECT_EQ(by_memory.flops, 500);
  EXPECT_EQ(by_memory.share, 0.75);  // 1.5 s of 2
  EXPECT_EQ(bench::rates_of(600, 1600, 2, {.bytes_per_s = 400, .flops = 1000}).share, 0.8);
  EXPECT_EQ(ranks_at_once(4, 2, 1), 2);  // two processors for four ranks of one thread
  EXPECT_EQ(ranks_at_once(8, 16, 4), 4);
  EXPECT_EQ(ranks_at_once(2, 64, 1), 2);
  EXPECT_EQ(ranks_at_once(3, 1, 4), 1);
}

TEST(Figures, MedianRateLeavesTheFirstFiveStepsOut) {
  EXPECT_EQ(median_rate({1, 2, 3, 4, 5, 1000, 3000, 2000}), 2000);
  EXPECT_EQ(median_rate({9000, 9000, 9000, 9000, 9000, 10}), 10);
  EXPECT_EQ(median_rate({30, 10, 20, 50, 40}), 30);  // no more than five: all
  EXPECT_EQ(median_rate({}), 0);
}

TEST(Figures, NumbersBytesAndTimesInWords) {
  EXPECT_EQ(short_number(0), "0");
  EXPECT_EQ(short_number(7), "7");
  EXPECT_EQ(short_number(1.2345), "1.23");
  EXPECT_EQ(short_number(99.96), "100");
  EXPECT_EQ(short_number(1234), "1.2K");
  EXPECT_EQ(short_number(2'345'678), "2.35M");
  EXPECT_EQ(short_number(7'654'000'000), "7.65B");
  EXPECT_EQ(duration(59.4), "59 s");
  EXPECT_EQ(duration(61), "1 min 01 s");
  EXPECT_EQ(duration(3599.6), "1 h 00 min");
  EXPECT_EQ(duration(7384), "2 h 03 min");
  EXPECT_EQ(report::short_bytes(999), "999 B");
  EXPECT_EQ(report::short_bytes(1234), "1.23 KB");
  EXPECT_EQ(report::short_bytes(45'600'000), "45.6 MB");
  EXPECT_EQ(report::short_bytes(7.5e12), "7.50 TB");
  EXPECT_EQ(report::short_time(0.431), "431 µs");
  EXPECT_EQ(report::short_time(1.234), "1.23 ms");
  EXPECT_EQ(report::short_time(250.26), "250.3 ms");
  EXPECT_EQ(report::short_time(2100), "2.10 s");
  EXPECT_EQ(report::percent(0.375), "37.5%");
  EXPECT_EQ(report::grouped(1234567), "1,234,567");
  EXPECT_EQ(report::grouped(123), "123");
}

// The run has 1,000 steps, and a tenth of a new one's time goes into the mean: 1,000 ms, then 1,000 + 0.1 1,000 ms,
// then 1,100 - 0.1 600 ms.
TEST(Figures, TheTimeLeftIsOfTheStepsLeft) {
  char* text = nullptr;
  size_t size = 0;
  std::FILE* const file = open_memstream(&text, &size);
  {
    Progress progress({.to = file, .terminal = false, .steps = 1000});
    progress.step({.step = 1, .loss = 2.25, .lr = 0.001, .grad_norm = 0.5, .tokens_per_s = 4800, .step_ms = 1000});
    progress.step({.step = 100, .tokens_per_s = 4800, .step_ms = 2000});
    progress.step({.step = 550, .tokens_per_s = 4800, .step_ms = 500});
    progress.step({.step = 1000, .tokens_per_s = 4800, .step_ms = 500});
  }
  std::fclose(file);
  const std::string shown(text, size);
  std::free(text);
  EXPECT_NE(shown.find("step 1/1000  loss 2.2500  lr 1.00e-03  grad norm 0.50  4.8K tok/s  16 min 39 s left\n"),
            std::string::npos)
      << shown;                                                                    // 999 s
  EXPECT_NE(shown.find("tok/s  16 min 30 s left\n"), std::string::npos) << shown;  // 900 steps of 1.1 s
  EXPECT_NE(shown.find("tok/s  7 min 48 s left\n"), std::string::npos) << shown;   // 450 steps of 1.04 s
  EXPECT_NE(shown.find("tok/s  0 s left\n"), std::string::npos) << shown;
}

struct Said {
  std::string out;
  std::vector<json> records;  // lines of metrics.jsonl
  test::Scalars scalars;      // read from the event file
};

// Eight steps of 48 tokens, of which the last three made 1,000, 3,000 and 2,000 tokens/s.
Said say(const std::string& format, const Plan& plan, const std::vector<int64_t>& peaks) {
  const TemporaryDirectory folder(std::filesystem::temp_directory_path() / "tessera-figures-");
  TrainOptions options;
  options.format = format;
  options.quiet = true;
  options.no_save = true;
  options["steps"] = 8;
  testing::internal::CaptureStdout();
  {
    TrainOutput output(options, plan, folder.path(), 0);
    const std::array<double, 8> rates = {1, 2, 3, 4, 5, 1000, 3000, 2000};
    for (int64_t i = 0; i < 8; ++i)
      output.step({.step = i + 1,
                   .loss = 4 - 0.25 * static_cast<double>(i),
                   .lr = 0.5,
                   .grad_norm = 3,
                   .tokens_per_s = rates[static_cast<size_t>(i)],
                   .step_ms = 48e3 / rates[static_cast<size_t>(i)]});
    output.eval(8, {.loss = 2.125, .bits_per_byte = 3.0625});
    output.summary(
        {.steps = 8,
         .tokens_per_step = 48,
         .flops_per_token = 3e6,
         .rank_peak_flops = 1e10,
         .strategy = "ddp",
         .backend = "threads",
         .usage = {.peak_bytes = peaks, .sent = {{"dp", "all_reduce", 3, 120, 0}, {"dp", "broadcast", 1, 8, 0}}},
         .arena = make_arena()});
  }
  Said said{.out = testing::internal::GetCapturedStdout(), .records = {}, .scalars = test::read_scalars(folder.path())};
  std::istringstream lines(read_file(folder.path() / "metrics.jsonl"));
  for (std::string line; std::getline(lines, line);) said.records.push_back(json::parse(line));
  return said;
}

TEST(Figures, OfARunForAProgram) {
  const Said said = say("json", {}, {5'400'000});
  ASSERT_EQ(said.records.size(), 10U);
  EXPECT_EQ(said.records[5], json::parse(R"({"event": "step", "step": 6, "loss": 2.75, "lr": 0.5, "grad_norm": 3.0,
                                             "tokens_per_s": 1000.0, "step_ms": 48.0})"));
  EXPECT_EQ(said.records[8], json::parse(R"({"event": "eval", "step": 8, "val_loss": 2.125,
                                             "val_bits_per_byte": 3.0625})"));
  const json& summary = said.records[9];
  EXPECT_EQ(summary["steps"], 8);
  EXPECT_EQ(summary["tokens"], 384);
  EXPECT_EQ(summary["loss"], 2.25);
  EXPECT_EQ(summary["val_loss"], 2.125);
  EXPECT_EQ(summary["val_bits_per_byte"], 3.0625);
  EXPECT_EQ(summary["tokens_per_s"], 2000.0);
  EXPECT_EQ(summary["flops_per_token"], 3e6);
  EXPECT_EQ(summary["peak_flops"], 1e10);
  EXPECT_EQ(summary["mfu"], 0.6);  // 2,000 tokens/s of 3 MFLOP, of 10 GFLOP/s
  EXPECT_EQ(summary["peak_bytes"], json::parse("[5400000]"));
  EXPECT_EQ(summary["sent_bytes"], json::parse(R"({"dp": {"all_reduce": 120, "broadcast": 8}})"));
  std::istringstream lines(said.out);
  size_t at = 0;
  for (std::string line; std::getline(lines, line);) EXPECT_EQ(json::parse(line), said.records.at(at++));
  EXPECT_EQ(at, said.records.size());
}

TEST(Figures, OfARunForTensorBoard) {
  const Said said = say("json", {}, {1});
  test::Scalars expected;
  for (const json& record : said.records)
    for (const auto& [key, value] : record.items())
      if (record["event"] != "summary" && key != "event" && key != "step" && key != "step_ms")
        expected[key].emplace_back(record["step"], value.get<float>());
  EXPECT_EQ(expected.size(), 6U);
  EXPECT_EQ(said.scalars, expected);
}

TEST(Figures, OfARunForAPerson) {
  const std::string one = say("text", {}, {5'400'000}).out;
  for (const char* part :
       {"After 8 steps (384 tokens) the validation loss is 2.1250 (3.0625 bits per byte).\n", "\nloss 4.00 ",
        " 2.25\n2.0K tokens/s, 60% of what this machine's matrix products reach; at most 5.4 MB of memory.\n"})
    EXPECT_NE(one.find(part), std::string::npos) << part << one;
  const std::string three = say("text", {.dp = 3, .backend = Backend::mpi}, {54'000'000, 56'700'000, 1}).out;
  EXPECT_NE(three.find("2.0K tokens/s, 20% of what this machine's matrix products reach; at most 57 MB of memory per "
                       "rank.\n"),
            std::string::npos)
      << three;
}

TEST(Figures, MfuIsOfTheRanksThatComputeAtOnce) {
  const auto mfu = [](const Plan& plan) {
    return say("json", plan, std::vector<int64_t>(static_cast<size_t>(plan.ranks()), 1)).records.back()["mfu"];
  };
  EXPECT_DOUBLE_EQ(mfu({.dp = 4, .backend = Backend::mpi}), 0.15);
  const int64_t processors = std::thread::hardware_concurrency(), threads = cpu::threads();
  cpu::set_threads(1);
  EXPECT_DOUBLE_EQ(mfu({.dp = 2}), 0.6 / static_cast<double>(std::min<int64_t>(2, processors)));
  EXPECT_DOUBLE_EQ(mfu({.dp = 2, .tp = 500}), 0.6 / static_cast<double>(std::min<int64_t>(1000, processors)));
  cpu::set_threads(static_cast<int>(threads));
}

// The figures that the programs print agree with each other: rate x time = work, and the same figure everywhere.

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

class FiguresOfRunsTest : public test::ProgramTest {
 protected:
  static std::vector<json> records_of(const std::string& text) {
    std::vector<json> out;
    std::istringstream lines(text);
    for (std::string line; std::getline(lines, line);) out.push_back(json::parse(line));
    return out;
  }
};

constexpr double kTokens = 4 * 16;

// Identities that must hold for a run of kSmall that took so long.
void expect_identities(const std::vector<json>& records, double seconds, int64_t vocab) {
  std::vector<double> rates;
  double ms = 0;
  for (const json& r : records) {
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
  const json& s = records.back();
  EXPECT_EQ(s["tokens_per_s"], rates[5 + 3]);  // the middle of seven
  EXPECT_EQ(s["tokens"], 12 * kTokens);
  // One layer of 16 channels: 12 C^2 of matrices, 9 C of biases, two norms; the last norm; the table, which is the
  // head.
  const double parameters = 12 * 256 + 9 * 16 + 4 * 16 + 2 * 16 + 16.0 * static_cast<double>(vocab);
  EXPECT_EQ(s["flops_per_token"], 6 * parameters + 12 * 16 * 16);
  const double used = s["flops_per_token"].get<double>() * s["tokens_per_s"].get<double>();
  EXPECT_NEAR(s["mfu"].get<double>() * s["peak_flops"].get<double>(), used, 1e-9 * used);
}

TEST_F(FiguresOfRunsTest, RatesTimesAndWorkAgree) {
  const std::string text = read_file(path("text.txt"));
  const auto vocab = std::ssize(std::set<char>(text.begin(), text.end()));
  for (const std::string plan : {"--ranks 2 --trace", "--ranks 2 --dp-mode ps-async"}) {
    SCOPED_TRACE(plan);
    const std::string out = plan.find("async") == std::string::npos ? "run" : "async";
    const Clock::time_point start = Clock::now();
    const test::Ran ran = train(fmt::format("--format json --out {} {}", out, plan));
    const double seconds = seconds_since(start);
    ASSERT_EQ(ran.status, 0) << ran.err;
    const std::vector<json> records = records_of(ran.out);
    EXPECT_EQ(records, records_of(read_file(path(out) / "metrics.jsonl")));
    expect_identities(records, seconds, vocab);
    for (const auto& [tag, points] : test::read_scalars(path(out)))
      for (const auto& [step, value] : points) {
        const auto found = std::ranges::find_if(records, [&, t = tag, at = step](const json& r) {
          return r.contains("step") && r["step"] == at && r.contains(t);
        });
        ASSERT_NE(found, records.end()) << tag << " " << step;
        EXPECT_EQ(value, (*found)[tag].get<float>()) << tag << " " << step;
      }
  }
  const json summary = records_of(read_file(path("run/metrics.jsonl"))).back();
  const std::string page = report::report_of(report::read_record(path("run")), true);
  const auto fact = [&](const std::string& name) {
    const size_t at = page.find("<dt>" + name + "</dt><dd>") + name.size() + 13;
    return page.substr(at, page.find("</dd>", at) - at);
  };
  EXPECT_EQ(fact("tokens/s"), report::grouped(std::llround(summary["tokens_per_s"].get<double>())) + " (median step)");
  EXPECT_EQ(fact("loss at the end"), fmt::format("{:.4f}", summary["loss"].get<double>()));
  EXPECT_EQ(fact("validation loss"), fmt::format("{:.4f}", summary["val_loss"].get<double>()));
  EXPECT_EQ(fact("steps"), "12");
  int64_t all = 0;
  for (const auto& [axis, operations] : summary["sent_bytes"].items())
    for (const auto& [operation, bytes] : operations.items()) {
      all += bytes.get<int64_t>();
      EXPECT_TRUE(std::regex_search(page, std::regex(fmt::format("<td>{}</td><td>{}</td>.*\n?.*<td "
                                                                 "class=\"n\">[0-9,]+</td><td class=\"n\">{}</td>",
                                                                 axis, operation, report::grouped(bytes)))))
          << axis << " " << operation;
    }
  EXPECT_TRUE(std::regex_search(page, std::regex(fmt::format("<td>all</td><td></td>.*<td class=\"n\">[0-9,]+</td>"
                                                             "<td class=\"n\">{}</td>",
                                                             report::grouped(all)))));
  for (const json& peak : summary["peak_bytes"])
    EXPECT_NE(page.find("\"all n\">" + report::grouped(peak) + "</td></tr>"), std::string::npos) << peak;
}

// On a clock of the test's own, which looks a little longer.
TEST_F(FiguresOfRunsTest, AStepTakesTheTimeThatItTakes) {
  const Job job{.model = {.layers = 1, .heads = 2, .channels = 64, .context = 64, .vocab = 64},
                .optim = {.batch = 4},
                .plan = {.threads_per_rank = 1}};
  launch(launch_options(job.plan), [&](Communicator& world) {
    Trainer trainer(job, counted_sequences(64, 64, 4, 1), world);
    double told = 0, seen = 0;
    for (int i = 0; i < 10; ++i) {
      const Clock::time_point start = Clock::now();
      told += trainer.step().step_ms * 1e-3;
      seen += seconds_since(start);
    }
    EXPECT_LE(told, seen);
    EXPECT_GE(told, 0.6 * seen);
  });
}

TEST_F(FiguresOfRunsTest, RatesOfBenchmarksAreWorkOverTime) {
  const test::Ran ran =
      run("bench --benchmark_filter='^op/(add|scale|matmul|gelu_mlp)/.*' --benchmark_format=json "
          "--benchmark_min_time=0.001");
  ASSERT_EQ(ran.status, 0) << ran.err;
  const json all = json::parse(ran.out);
  constexpr double kPlane = 12 * 256 * 384, kProduct = 3'623'878'656;
  // Elements read and written once, and products.
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
  size_t seen = 0;
  for (const json& row : all["benchmarks"]) {
    const std::string name = row["name"].get<std::string>().substr(3);  // behind "op/"
    const bool wide = name.ends_with("fp32");
    const auto [elements, flops] = work.at(name.substr(0, name.size() - 5));
    const double bytes = elements * (wide ? 4 : 2), seconds = row["real_time"].get<double>() * 1e-6;
    EXPECT_EQ(row["time_unit"], "us");
    EXPECT_NEAR(row["bytes/s"].get<double>() * seconds, bytes, 1e-6 * bytes) << name;
    EXPECT_EQ(row.contains("FLOP/s"), flops > 0) << name;
    if (flops > 0) {
      EXPECT_NEAR(row["FLOP/s"].get<double>() * seconds, flops, 1e-6 * flops) << name;
    }
    double roof_bytes = 0, roof_flops = 0;  // "10.1 GB/s, 120.2 GFLOP/s"
    ASSERT_EQ(std::sscanf(all["context"][wide ? "ceiling_fp32" : "ceiling_bf16"].get<std::string>().c_str(),
                          "%lf GB/s, %lf GFLOP/s", &roof_bytes, &roof_flops),
              2);
    const double least = std::max(bytes / roof_bytes, flops / roof_flops) * 1e-9;
    EXPECT_NEAR(row["share"].get<double>() * seconds, least, 0.05 * least) << name;
    ++seen;
  }
  EXPECT_EQ(seen, 2 * work.size());
}

TEST_F(FiguresOfRunsTest, GenerationTakesTheTimeThatItSays) {
  ASSERT_EQ(train("--ranks 1 --out run").status, 0);
  const Clock::time_point start = Clock::now();
  const test::Ran ran = run("generate run --prompt Line --tokens 50");
  const double seconds = seconds_since(start);
  std::smatch found;
  ASSERT_TRUE(std::regex_search(ran.err, found,
                                std::regex("50 tokens from .*, ([0-9.]+)(K?) tokens/s; the first after ([0-9.]+) s")))
      << ran.err;
  const double rate = std::stod(found[1]) * (found[2].length() > 0 ? 1e3 : 1);
  EXPECT_LE(49 / rate + std::stod(found[3]), 1.06 * seconds);
}

}  // namespace
}  // namespace tessera
