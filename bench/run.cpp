// Choosing rows, running them, and what is said after them.
#include "bench/run.h"

#include <benchmark/benchmark.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <malloc.h>

#include <memory>
#include <optional>
#include <utility>

#include "bench/collective_bench.h"
#include "bench/op_bench.h"
#include "bench/outputs.h"
#include "bench/schedule_bench.h"
#include "bench/selection.h"
#include "bench/strategy_bench.h"
#include "parallel/comm/backends.h"
#include "parallel/comm/surroundings.h"
#include "tensor/cpu/vectorize.h"
#include "tensor/error.h"
#include "tensor/ops/matmul/matmul.h"

namespace tessera::bench {
namespace {

using Words = std::vector<std::string>;

// Google Benchmark keeps the first word, the program's name, as it lies there.
void initialise(Words& words) {
  words.insert(words.begin(), "tessera bench");
  std::vector<char*> argv;
  for (std::string& word : words) argv.push_back(word.data());
  int argc = static_cast<int>(argv.size());
  benchmark::Initialize(&argc, argv.data());
  if (argc > 1) throw Error(fmt::format("bench: expected a flag of Google Benchmark, found '{}'", argv[1]));
}

// The ranks' part of all groups, the same on every rank of a job.
std::vector<RankRow> rank_rows(const Place& place, const Selection& selection, Families& families) {
  std::vector<RankRow> all = collective_rows(place, families);
  for (const auto& more : {strategy_rows(place), schedule_rows(place)}) all.insert(all.end(), more.begin(), more.end());
  std::erase_if(all, [&](const RankRow& row) { return !selection.has(row.name); });
  return all;
}

// What the collectives cost by size, as rows behind all others.
Outputs::Rows fits(const Families& families) {
  Outputs::Rows out;
  for (const Family& family : families) {
    const std::optional<Fit> found = fit(family.samples);
    if (!found) continue;
    benchmark::BenchmarkReporter::Run row;
    row.run_name.function_name = family.name + "/fit";
    row.iterations = 1;
    row.time_unit = benchmark::kMicrosecond;
    row.real_accumulated_time = found->latency;
    row.counters = {{"latency_s", found->latency},
                    {"algbw", found->bytes_per_s},
                    {"busbw", family.bus_factor * found->bytes_per_s},
                    {"worst_error", found->worst}};
    out.push_back(row);
  }
  return out;
}

void add_context() {
#ifdef NDEBUG
  benchmark::AddCustomContext("tessera_build", "release");
#else
  benchmark::AddCustomContext("tessera_build", "debug");
#endif
  benchmark::AddCustomContext("matmul", cpu::matmul_library());
  benchmark::AddCustomContext("threads", std::to_string(cpu::threads()));
}

// Of a row that counts no iterations of its own, so that all operations take less than two minutes.
constexpr double kSeconds = 0.05;

void register_rows(const std::vector<Row>& rows, std::optional<double> seconds) {
  for (const Row& row : rows) {
    auto* made = benchmark::RegisterBenchmark(row.name.c_str(), row.run)->UseManualTime()->Unit(row.unit);
    if (row.iterations > 0 && !seconds)
      made->Iterations(row.iterations);
    else
      made->MinTime(seconds.value_or(kSeconds));
  }
}

// Memory that messages have taken stays with the process: otherwise it depends on the rows before whether the next one
// pays for fresh pages. 32 MiB is the most that malloc takes.
void keep_memory() {
  mallopt(M_MMAP_THRESHOLD, 32 << 20);
  mallopt(M_TRIM_THRESHOLD, 1 << 30);
}

// All rows of one process, which is rank 0 where there is a job.
void run_rows(const Words& words, const Place& place, const Print& print) {
  Words kept = words;
  const OutputChoice choice = take_output_choice(kept);
  const bool lists = take_listing(kept);
  const std::optional<double> seconds = take_min_time(kept);
  initialise(kept);
  const std::string filter = benchmark::GetBenchmarkFilter();
  const Selection selection(filter);
  Families families;
  const RankRows by_ranks(place, rank_rows(place, selection, families));
  OpRows ops = place.processes() ? OpRows{} : op_rows(place.device);
  std::vector<Row> rows = std::move(ops.rows);
  std::erase_if(rows, [&](const Row& row) { return !selection.has(row.name); });
  for (const Row& row : by_ranks.rows()) rows.push_back(row);
  if (rows.empty())
    throw Error(
        fmt::format("bench: no benchmark matches the filter '{}'; expected part of a name, as op/matmul/forward/fp32 "
                    "or collective/all_reduce",
                    filter));
  if (place.processes() && place.job->rank() > 0) {
    keep_memory();
    return by_ranks.follow();
  }
  if (lists) {
    for (const Row& row : rows) print(row.name + "\n");
    return by_ranks.dismiss();
  }
  keep_memory();
  add_context();
  if (ops.ceilings)
    for (const auto& [name, value] : ops.ceilings(rows)) benchmark::AddCustomContext(name, value);
  register_rows(rows, seconds);
  Outputs outputs(choice, print, [&] { return fits(families); });
  benchmark::RunSpecifiedBenchmarks(&outputs, "all");
  by_ranks.dismiss();
  outputs.write_file();
  benchmark::ClearRegisteredBenchmarks();  // and what they hold
  benchmark::Shutdown();
  if (!outputs.first_error().empty())
    throw Error(fmt::format("bench: {}", outputs.first_error()), Status::verification);
}

}  // namespace

void run_benchmarks(const Words& words, Device device, const Print& print) {
  const auto job = mpi_surroundings();
  if (!kWithMpi || !job || job->ranks == 1) return run_rows(words, {.device = device}, print);
  launch({.backend = device == Device::cuda ? Backend::nccl : Backend::mpi,
          .threads_per_rank = 1,
          .same = {{"words behind `bench`", fmt::format("{}", fmt::join(words, " "))}}},
         [&](Communicator& world) { run_rows(words, {.device = device, .job = &world}, print); });
}

}  // namespace tessera::bench
