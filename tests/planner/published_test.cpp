// Runs that were published, none of which any figure was fitted to: step times, ratios, order, and memory.
// TESSERA_TABLE=1 prints every run.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <fstream>
#include <nlohmann/json.hpp>

#include "planner/case_json.h"

namespace tessera::planner {
namespace {

struct Record {
  std::string source, group;
  Case c;
  double step_s = 0, memory_bytes = 0;  // published; 0: not
  Prediction p;
  double time_error() const { return std::abs(p.step_s / step_s - 1); }
};

std::vector<Record> published() {
  std::ifstream file(TESSERA_SOURCE_DIR "/tests/planner/published.jsonl");
  std::vector<Record> out;
  for (std::string line; std::getline(file, line);) {
    const auto json = nlohmann::json::parse(line);
    Record r{json.at("source"),
             json.at("group"),
             case_from_json(json.at("case").dump(), "published.jsonl"),
             json.value("step_s", 0.0),
             json.value("memory_bytes", 0.0),
             {}};
    r.p = predict(r.c);
    out.push_back(std::move(r));
  }
  return out;
}

double quantile(std::vector<double> x, double q) {
  std::ranges::sort(x);
  return x.at(static_cast<size_t>(q * static_cast<double>(x.size() - 1) + 0.5));
}
double mean(const std::vector<double>& x) {
  double sum = 0;
  for (const double v : x) sum += v;
  return sum / static_cast<double>(x.size());
}

void print(const std::vector<Record>& runs) {
  for (const Record& r : runs)
    fmt::print("{:28} {:10.4g} s, predicted {:10.4g} s, {:+.1f}%{}\n", r.group, r.step_s, r.p.step_s,
               100 * (r.p.step_s / r.step_s - 1),
               r.memory_bytes > 0
                   ? fmt::format("; memory {:+.1f}%", 100 * (r.p.memory[r.p.fullest].peak() / r.memory_bytes - 1))
                   : "");
}

TEST(Published, RunsAreWithinTheBars) {
  const std::vector<Record> runs = published();
  ASSERT_GT(runs.size(), 200u);
  if (std::getenv("TESSERA_TABLE")) print(runs);
  std::vector<double> a100, h100, memory;
  int outside = 0;
  for (const Record& r : runs) {
    const bool hopper = r.c.hardware.multiprocessors == 132;
    (hopper ? h100 : a100).push_back(r.time_error());
    if (hopper && (r.step_s < r.p.fastest_s * 0.97 || r.step_s > r.p.slowest_s)) ++outside;
    if (r.memory_bytes > 0) memory.push_back(std::abs(r.p.memory[r.p.fullest].peak() / r.memory_bytes - 1));
    EXPECT_TRUE(r.p.fits) << r.group << ": over by " << r.p.over_bytes;
  }
  const auto bars = [](const char* what, const std::vector<double>& x, double median, double ninetieth) {
    fmt::print("{}: {} values, median {:.1f}%, 90th percentile {:.1f}%\n", what, x.size(), 100 * quantile(x, 0.5),
               100 * quantile(x, 0.9));
    EXPECT_LE(quantile(x, 0.5), median) << what;
    EXPECT_LE(quantile(x, 0.9), ninetieth) << what;
  };
  bars("step times, A100", a100, 0.10, 0.20);
  bars("step times, H100", h100, 0.25, 0.40);
  bars("memory", memory, 0.06, 0.20);
  fmt::print("H100 outside its range: {} of {}\n", outside, h100.size());
  EXPECT_LE(outside, static_cast<int>(h100.size() / 7));
}

// Each of the A100's tables with one speed factor: the median of the other tables'. The H100 has two tables, too few.
TEST(Published, OneFactorForAGeneration) {
  std::map<std::string, std::vector<double>> tables;  // published over predicted
  for (const Record& r : published())
    if (r.c.hardware.multiprocessors == 108) tables[r.source].push_back(r.step_s / r.p.step_s);
  std::vector<double> medians;
  for (const auto& [table, ratios] : tables) {
    std::vector<double> factors, errors;
    for (const auto& [other, theirs] : tables)
      if (other != table) factors.push_back(quantile(theirs, 0.5));
    for (const double ratio : ratios) errors.push_back(std::abs(quantile(factors, 0.5) / ratio - 1));
    medians.push_back(quantile(errors, 0.5));
  }
  fmt::print("A100, one factor: {} tables, mean of their medians {:.1f}%\n", tables.size(), 100 * mean(medians));
  EXPECT_LE(mean(medians), 0.08);
}

// Plans of one model on one cluster: the group of a run.
TEST(Published, PlansAreInTheirOrder) {
  std::map<std::string, std::vector<Record>> groups;
  for (Record& r : published())
    if (!r.group.starts_with("mosaic")) groups[r.group].push_back(std::move(r));
  std::vector<double> ratios, order, regret;
  for (const auto& [name, runs] : groups) {
    if (runs.size() < 2) continue;
    const auto published_s = [](const Record& r) { return r.step_s; };
    const auto predicted_s = [](const Record& r) { return r.p.step_s; };
    for (size_t i = 0; i < runs.size(); ++i)
      for (size_t j = i + 1; j < runs.size(); ++j) {
        const double was = runs[i].step_s / runs[j].step_s, is = runs[i].p.step_s / runs[j].p.step_s;
        ratios.push_back(std::abs(is / was - 1));
        if (was != 1) order.push_back((is > 1) == (was > 1) ? 1 : -1);
      }
    const double best = std::ranges::min_element(runs, {}, published_s)->step_s;
    regret.push_back(std::ranges::min_element(runs, {}, predicted_s)->step_s / best - 1);
  }
  fmt::print("{} ratios, median {:.1f}%, 90th percentile {:.1f}%; tau {:.2f}; regret {:.1f}% mean, {:.1f}% worst\n",
             ratios.size(), 100 * quantile(ratios, 0.5), 100 * quantile(ratios, 0.9), mean(order), 100 * mean(regret),
             100 * quantile(regret, 1));
  EXPECT_LE(quantile(ratios, 0.5), 0.04);
  EXPECT_LE(quantile(ratios, 0.9), 0.10);
  EXPECT_GE(mean(order), 0.95);
  EXPECT_LE(mean(regret), 0.02);
  EXPECT_LE(quantile(regret, 1), 0.08);
}

}  // namespace
}  // namespace tessera::planner
