// Rows for two reporters of Google Benchmark.
#include "bench/run.h"

#include <benchmark/benchmark.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <malloc.h>

#include <charconv>
#include <cstdlib>
#include <memory>
#include <optional>
#include <system_error>
#include <utility>

#include "bench/collective_bench.h"
#include "bench/op_bench.h"
#include "bench/strategy_bench.h"
#include "parallel/comm/launch.h"
#include "tensor/cpu/vectorize.h"
#include "tensor/error.h"
#include "tensor/ops/matmul/matmul.h"
#include "tensor/write_file.h"

namespace tessera::bench {

namespace {

std::optional<std::string> take(std::vector<std::string>& words, std::string_view flag) {
  std::optional<std::string> value;
  const std::string begin = fmt::format("--{}=", flag);
  std::erase_if(words, [&](const std::string& word) {
    if (!word.starts_with(begin)) return false;
    value = word.substr(begin.size());
    return true;
  });
  return value;
}

std::unique_ptr<benchmark::BenchmarkReporter> reporter(const std::string& format) {
  if (format == "json") return std::make_unique<benchmark::JSONReporter>();
  return std::make_unique<benchmark::ConsoleReporter>(benchmark::ConsoleReporter::OO_None);
}

// The field has another name since version 1.8.
template <class Run>
std::string error_of(const Run& row) {
  if constexpr (requires { row.error_message; })
    return row.error_message;
  else
    return row.skip_message;
}

}  // namespace

OutputChoice take_output_choice(std::vector<std::string>& words) {
  const char* const usual = std::getenv("BENCHMARK_OUT");  // read by Google Benchmark too
  OutputChoice out{.file = take(words, "benchmark_out").value_or(usual != nullptr ? usual : "")};
  out.format = take(words, "benchmark_out_format").value_or(out.format);
  if (out.format != "json" && out.format != "console")
    throw Error(fmt::format("--benchmark_out_format: expected json or console, found '{}'", out.format));
  words.emplace_back("--benchmark_out=");
  std::error_code error;
  if (const std::filesystem::path folder = out.file.parent_path();
      !folder.empty() && !std::filesystem::is_directory(folder, error))
    throw OutputError(fmt::format("--benchmark_out: {} is no folder", folder.string()));
  return out;
}

std::optional<double> take_min_time(std::vector<std::string>& words) {
  const std::optional<std::string> given = take(words, "benchmark_min_time");
  if (!given) return {};
  const char* const end = given->data() + given->size();
  double seconds = 0;
  const auto [rest, error] = std::from_chars(given->data(), end, seconds);
  if (error != std::errc() || seconds <= 0 || (rest != end && std::string_view(rest, end) != "s"))
    throw Error(fmt::format("--benchmark_min_time: expected seconds, as 0.1 or 0.1s, found '{}'", *given));
  return seconds;
}

Outputs::Outputs(const OutputChoice& choice, Print print, std::function<Rows()> last)
    : choice_(choice),
      last_(std::move(last)),
      printed_(std::move(print)),
      shown_(&printed_),
      display_(benchmark::CreateDefaultDisplayReporter()) {
  shown_.exceptions(std::ios::badbit);  // lets exceptions of print pass
  SetOutputStream(&shown_);
  display_->SetOutputStream(&shown_);
  if (choice_.file.empty()) return;
  file_ = reporter(choice_.format);
  file_->SetOutputStream(&written_);
}

bool Outputs::ReportContext(const Context& context) {
  return (!file_ || file_->ReportContext(context)) && display_->ReportContext(context);
}

// A row has our name, without Google Benchmark's words about how it was timed.
void Outputs::ReportRuns(const std::vector<Run>& rows) {
  Rows named = rows;
  for (Run& row : named) {
    benchmark::BenchmarkName& name = row.run_name;
    name.min_time = name.iterations = name.time_type = "";
    if (first_error_.empty() && !error_of(row).empty()) first_error_ = name.str() + ": " + error_of(row);
  }
  show(named);
}

void Outputs::show(const Rows& rows) {
  if (rows.empty()) return;
  display_->ReportRuns(rows);
  if (file_) file_->ReportRuns(rows);
}

void Outputs::Finalize() {
  show(last_());
  display_->Finalize();
  if (file_) file_->Finalize();
}

void Outputs::write_file() const {
  if (file_) tessera::write_file(choice_.file, written_.str());
}

Outputs::Printed::int_type Outputs::Printed::overflow(int_type c) {
  const char letter = traits_type::to_char_type(c);
  print_({&letter, 1});
  return traits_type::not_eof(c);
}

std::streamsize Outputs::Printed::xsputn(const char* text, std::streamsize size) {
  print_({text, static_cast<size_t>(size)});
  return size;
}

// The filter and the list.

namespace {

std::regex expression_of(const std::string& filter) {
  try {
    return std::regex(filter.empty() || filter == "all" ? "." : filter, std::regex::extended);
  } catch (const std::regex_error& e) {
    throw Error(fmt::format("--benchmark_filter: expected a regular expression, found '{}' ({})", filter, e.what()));
  }
}

}  // namespace

Selection::Selection(const std::string& filter)
    : inverted_(filter.starts_with('-')), expression_(expression_of(inverted_ ? filter.substr(1) : filter)) {}

bool take_listing(std::vector<std::string>& words) {
  constexpr std::string_view kFlag = "--benchmark_list_tests";
  bool lists = false;
  std::erase_if(words, [&](const std::string& word) {
    if (!word.starts_with(kFlag)) return false;
    const std::string value = word.substr(kFlag.size());
    if (!value.empty() && value != "=true" && value != "=false")
      throw Error(fmt::format("{}: expected true or false, found '{}'", kFlag, value.substr(1)));
    lists = value != "=false";
    return true;
  });
  return lists;
}

// Choosing rows, running them, and what is said after them.

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

// Rows with the cost of the collectives by size, behind all other rows.
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

// The least time of a row that counts no iterations of its own, so that all operations take less than two minutes.
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
