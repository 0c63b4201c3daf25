// What the schedules of a pipeline cost for a given GPT: the passes of its stages are timed one after another on one
// rank, and the schedules then run on the simulated clock with these times; where the machine has a processor for each
// rank they also run in earnest, beside what the clock predicted. Prints Markdown.
//
//   build/release/bin/pipeline_bench [--layers 16 --heads 4 --channels 128 --context 64 --vocab 256 --microbatch 4]
//                                    [--rounds 5] [--quick]
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <map>
#include <numeric>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "bench/main/gpt_pipeline.h"
#include "parallel/pipeline/schedules.h"
#include "parallel/pipeline/simulate.h"
#include "tensor/error.h"

namespace tessera {
namespace {

using StagesTimes = std::map<int, std::vector<StageTimes>>;  // by the number of stages

struct Bench {
  PipelineCase what;
  std::vector<int> ranks{2, 4, 8};
  int processors = 1;
};

double total(const std::vector<StageTimes>& times, double StageTimes::*part) {
  return std::accumulate(times.begin(), times.end(), 0.0,
                         [&](double sum, const StageTimes& t) { return sum + t.*part; });
}

// Of a step without a bubble and with whole backward passes.
double ideal(const Schedule& s, const std::vector<StageTimes>& times) {
  return s.microbatches * (total(times, &StageTimes::forward) + total(times, &StageTimes::backward)) / s.ranks;
}

std::string percent(double share) { return fmt::format("{:.1f}%", 100 * share); }

std::vector<Schedule> schedules_of(int ranks, int microbatches) {
  std::vector<Schedule> out;
  for (const std::string& name : schedule_names()) out.push_back(make_schedule(name, ranks, microbatches));
  return out;
}

void introduce(const Bench& bench) {
  const ModelConfig& c = bench.what.model;
  fmt::print(
      "A GPT of {} layers, {} heads, {} channels, context {}, vocabulary {}; micro-batches of {} sequences; fp32; one "
      "thread per rank; medians of {} round{} in turn. Forward and backward passes only: no optimizer.\n\n"
      "This machine has {} processor{}. Ranks beyond that share them, and a rank that waits gives its processor to "
      "another: what a bubble costs cannot be seen there. So the schedules run on a simulated clock, on which each "
      "rank "
      "has a processor like this one for itself and messages take no time.\n",
      c.layers, c.heads, c.channels, c.context, c.vocab, bench.what.sequences, bench.what.rounds,
      bench.what.rounds == 1 ? "" : "s", bench.processors, bench.processors == 1 ? "" : "s");
}

void print_stage(const std::string& head, const StageTimes& t) {
  fmt::print("| {} | {:.2f} | {:.2f} | {:.2f} | {:.2f} | {:.2f} |\n", head, 1e3 * t.forward, 1e3 * t.backward,
             1e3 * t.input, 1e3 * t.weight, (t.input + t.weight) / t.backward);
}

// Of the stages between the first and the last one, the middle one by its forward pass stands for all.
void print_stages(const StagesTimes& all) {
  fmt::print(
      "\nMilliseconds of the processor for a micro-batch, measured with one rank: forward F, backward B, or its halves "
      "I (gradients of the input) and W (of the weights).\n\n"
      "| stages | stage | F | B | I | W | (I + W) / B |\n|---|---|---|---|---|---|---|\n");
  for (const auto& [stages, times] : all) {
    print_stage(fmt::format("{} | first", stages), times.front());
    std::vector<StageTimes> inner(times.begin() + 1, times.end() - 1);
    std::sort(inner.begin(), inner.end(), [](const auto& a, const auto& b) { return a.forward < b.forward; });
    if (!inner.empty()) print_stage(fmt::format("{} | an inner one", stages), inner[inner.size() / 2]);
    print_stage(fmt::format("{} | last", stages), times.back());
    print_stage(fmt::format("{} | all", stages),
                {total(times, &StageTimes::forward), total(times, &StageTimes::backward),
                 total(times, &StageTimes::input), total(times, &StageTimes::weight)});
  }
}

void print_simulated(const Bench& bench, const Schedule& s, const std::vector<StageTimes>& times) {
  const Simulation equal = simulate(s), clock = simulate(s, {.stages = times});
  const auto formula = bubble_formula(s);
  const int in_flight = *std::max_element(equal.in_flight.begin(), equal.in_flight.end());
  const int64_t messages = int64_t{2} * s.wire_boundaries() * s.microbatches;
  fmt::print("| {} | {} | {} | {} | {} | {} | {} | {:.3f} | {:g} | {} | {:.2f} |\n", s.ranks, s.microbatches, s.name,
             percent(equal.bubble_share()), formula ? percent(*formula) : "", percent(clock.bubble_share()),
             percent(clock.largest_idle_inside() / clock.makespan), clock.makespan / ideal(s, times),
             static_cast<double>(in_flight) / s.chunks(), messages,
             static_cast<double>(messages * bench.what.activation_bytes()) * 1e-6);
}

void print_all_simulated(const Bench& bench, const StagesTimes& all) {
  fmt::print(
      "\nOn the simulated clock. A bubble is a share of the step, the mean of the ranks; \"inside\" is the most that "
      "one "
      "rank waits between its first and its last action. The ideal step has no bubble and whole backward passes. In "
      "flight: micro-batches on the fullest rank. Messages and MB (1e6 bytes) are of one step, over all boundaries.\n\n"
      "| p | m | schedule | bubble, equal times | by formula | bubble, measured times | inside | step / ideal | in "
      "flight | messages | MB |\n|---|---|---|---|---|---|---|---|---|---|---|\n");
  for (const int p : bench.ranks)
    for (const int m : {p, 2 * p, 4 * p})
      for (const Schedule& s : schedules_of(p, m)) print_simulated(bench, s, all.at(s.stages));
}

void print_run(const Schedule& s, const std::vector<StageTimes>& alone, const PipelineRun& run) {
  const Simulation predicted = simulate(s, {.stages = alone});
  fmt::print("| {} | {} | {} | {:.1f} | {:.1f} | {:.2f} | {} | {} | {} |\n", s.ranks, s.microbatches, s.name,
             1e3 * predicted.makespan, 1e3 * run.seconds, run.seconds / predicted.makespan,
             percent(predicted.bubble_share()), percent(run.replayed), percent(run.bubble));
}

void print_runs(const Bench& bench, const StagesTimes& all) {
  fmt::print(
      "\nIn earnest, on thread ranks with a processor each. Predicted: on the clock with the times of the first table; "
      "replayed: with the time that each pass of each micro-batch took in the run itself, step by step.\n\n"
      "| p | m | schedule | step predicted, ms | measured | ratio | bubble predicted | replayed | measured |\n"
      "|---|---|---|---|---|---|---|---|---|\n");
  for (const int p : bench.ranks)
    for (const int m : {p, 2 * p, 4 * p}) {
      if (p > bench.processors) continue;
      const std::vector<Schedule> schedules = schedules_of(p, m);
      const std::vector<PipelineRun> runs = run_pipelines(bench.what, schedules);
      for (size_t i = 0; i < runs.size(); ++i) print_run(schedules[i], all.at(schedules[i].stages), runs[i]);
    }
}

void measure(Bench bench) {
  introduce(bench);
  std::erase_if(bench.ranks, [&](int p) { return 2 * p > bench.what.model.layers; });
  if (bench.ranks.empty()) throw Error("--layers: two ranks of two stages need 4 or more layers");
  std::vector<int> stages;
  for (const int p : bench.ranks)
    for (const int s : {p, 2 * p})
      if (std::find(stages.begin(), stages.end(), s) == stages.end()) stages.push_back(s);
  const std::vector<std::vector<StageTimes>> times = time_stages(bench.what, stages);
  StagesTimes all;
  for (size_t i = 0; i < stages.size(); ++i) all[stages[i]] = times[i];
  print_stages(all);
  print_all_simulated(bench, all);
  if (bench.ranks.front() <= bench.processors) print_runs(bench, all);
}

int run(int argc, char** argv) {
  Bench bench;
  bench.processors = static_cast<int>(std::thread::hardware_concurrency());
  bool quick = false;
  CLI::App app("Times the stages of a GPT and simulates the schedules of a pipeline with these times.");
  ModelConfig& model = bench.what.model;
  model.layers = 16;
  bench.what.sequences = 4;
  for (const auto& [name, size] : {std::pair<const char*, int64_t*>{"--layers", &model.layers},
                                   {"--heads", &model.heads},
                                   {"--channels", &model.channels},
                                   {"--context", &model.context},
                                   {"--vocab", &model.vocab},
                                   {"--microbatch", &bench.what.sequences}})
    app.add_option(name, *size)->check(CLI::PositiveNumber);
  app.add_option("--rounds", bench.what.rounds)->check(CLI::PositiveNumber);
  app.add_flag("--quick", quick, "one round, up to 4 ranks: to see that it works");
  CLI11_PARSE(app, argc, argv);
  if (quick) {
    bench.what.rounds = 1;
    bench.ranks = {2, 4};
  }
  measure(bench);
  return 0;
}

}  // namespace
}  // namespace tessera

int main(int argc, char** argv) {
  try {
    return tessera::run(argc, argv);
  } catch (const std::exception& e) {
    std::fprintf(stderr, "pipeline_bench: %s\n", e.what());
    return 2;
  }
}
