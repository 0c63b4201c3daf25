// The figures that the programs print agree with each other: rate x time = work, and the same figure everywhere.
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <map>
#include <nlohmann/json.hpp>
#include <regex>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#include "app/report/report.h"
#include "tests/app/program.h"
#include "tests/support/scalars.h"
#include "train/trainer.h"

namespace tessera {
namespace {

using nlohmann::json;
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
