// Arguments, output and execution of `tessera bench`.
#include "bench/run.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <malloc.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <ctime>
#include <filesystem>
#include <fstream>
#include <functional>
#include <map>
#include <memory>
#include <numeric>
#include <optional>
#include <sstream>
#include <string>
#include <string_view>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "base/write_file.h"
#include "bench/op_bench.h"
#include "bench/ranks.h"
#include "tensor/cpu/vectorize.h"

namespace tessera::bench {

namespace {

using Args = std::vector<std::string>;
using Print = std::function<void(std::string_view)>;

// Removes `--flag=value` and returns the value; `bare` is the value of a flag without one.
std::optional<std::string> take(Args& args, std::string_view flag, const char* bare = nullptr) {
  std::optional<std::string> value;
  const std::string begin = fmt::format("--{}=", flag);
  std::erase_if(args, [&](const std::string& arg) {
    if (bare && arg + "=" == begin)
      value = bare;
    else if (arg.starts_with(begin))
      value = arg.substr(begin.size());
    else
      return false;
    return true;
  });
  return value;
}

// Whether a flag that accepts two values is set to the first.
bool take_first(Args& args, std::string_view flag, const std::array<std::string, 2>& two, bool first_by_default,
                const char* bare = nullptr) {
  const std::string value = take(args, flag, bare).value_or(two[first_by_default ? 0 : 1]);
  if (value != two[0] && value != two[1])
    throw Error(fmt::format("--{}: expected {} or {}, got '{}'", flag, two[0], two[1], value));
  return value == two[0];
}

// Target of --benchmark_out; Google Benchmark would write the file row by row.
struct OutputChoice {
  std::filesystem::path file = {};  // empty: none
  bool json = true;
};
OutputChoice take_output_choice(Args& args) {
  const char* const default_value = std::getenv("BENCHMARK_OUT");  // also read by Google Benchmark
  OutputChoice out{.file = take(args, "benchmark_out").value_or(default_value != nullptr ? default_value : ""),
                   .json = take_first(args, "benchmark_out_format", {"json", "console"}, true)};
  args.emplace_back("--benchmark_out=");
  std::error_code error;
  if (const std::filesystem::path directory = out.file.parent_path();
      !directory.empty() && !std::filesystem::is_directory(directory, error))
    throw OutputError(fmt::format("--benchmark_out: {} is not a directory", directory.string()));
  return out;
}

// In seconds: 0.1 or 0.1s, depending on the version of Google Benchmark.
std::optional<double> take_min_time(Args& args) {
  const std::optional<std::string> value = take(args, "benchmark_min_time");
  if (!value) return {};
  const char* const end = value->data() + value->size();
  double seconds = 0;
  const auto [rest, error] = std::from_chars(value->data(), end, seconds);
  if (error != std::errc() || seconds <= 0 || (rest != end && std::string_view(rest, end) != "s"))
    throw Error(fmt::format("--benchmark_min_time: expected seconds, such as 0.1 or 0.1s, got '{}'", *value));
  return seconds;
}

// Encodes lists as counters of a row, named "list NAME INDEX".
constexpr std::string_view kList = "list ";

// Google Benchmark 1.8 renamed the field.
template <class Run>
std::string error_message(const Run& row) {
  if constexpr (requires { row.error_message; })
    return row.error_message;
  else
    return row.skip_message;
}

// Forwards rows to standard output, and to the file, which is written at the end. Must be created after
// benchmark::Initialize(), which sets the display format. `last` returns rows to append.
class Outputs final : public benchmark::BenchmarkReporter {
 public:
  using Rows = std::vector<Run>;
  Outputs(const OutputChoice& choice, const Choice& wanted, Print print, std::function<Rows()> last)
      : choice_(choice),
        wanted_(wanted),
        print_(std::move(print)),
        last_(std::move(last)),
        display_(wanted.table ? &for_table_ : benchmark::CreateDefaultDisplayReporter()) {
    SetOutputStream(&shown_);
    display_->SetOutputStream(&shown_);
    if (choice_.file.empty()) return;
    if (choice_.json)
      file_ = std::make_unique<benchmark::JSONReporter>();
    else
      file_ = std::make_unique<benchmark::ConsoleReporter>(benchmark::ConsoleReporter::OO_None);
    file_->SetOutputStream(&written_);
  }
  bool ReportContext(const Context& context) override {
    return to_both([&](benchmark::BenchmarkReporter& to) { return to.ReportContext(context); });
  }
  // Removes Google Benchmark's timing suffixes from names.
  void ReportRuns(const Rows& rows) override {
    Rows named = rows;
    for (Run& row : named) {
      benchmark::BenchmarkName& name = row.run_name;
      name.min_time = name.iterations = name.time_type = "";
      if (first_error_.empty() && !error_message(row).empty()) first_error_ = name.str() + ": " + error_message(row);
    }
    show(named);
  }
  void Finalize() override {
    show(last_());
    to_both([](benchmark::BenchmarkReporter& to) { return to.Finalize(), true; });
    if (wanted_.table) print_(wanted_.table(shown_.str()));
  }
  // Throws OutputError.
  void write_file() const {
    if (file_) tessera::write_file(choice_.file, written_.str());
  }
  const std::string& first_error() const { return first_error_; }

 private:
  void show(const Rows& rows) {
    for (Run row : rows) {
      const Lists lists = take_lists(row);
      if (file_) add(*file_, written_, row, lists);
      add(*display_, shown_, row, lists);
      to_both([](benchmark::BenchmarkReporter&) { return true; });
      if (wanted_.done) wanted_.done(row.run_name.str());
    }
  }
  // In the row's unit; empty for aggregates over repetitions.
  using Lists = std::map<std::string, std::vector<double>, std::greater<>>;  // `rounds` first
  static Lists take_lists(Run& row) {
    Lists out;
    std::erase_if(row.counters, [&](const auto& counter) {
      const bool is_in_list = counter.first.starts_with(kList);
      if (is_in_list && row.run_type == Run::RT_Iteration)
        out[counter.first.substr(kList.size(), counter.first.rfind(' ') - kList.size())].push_back(
            counter.second.value * benchmark::GetTimeUnitMultiplier(row.time_unit));
      return is_in_list;
    });
    return out;
  }
  static void add(benchmark::BenchmarkReporter& to, std::ostringstream& text, Run row, const Lists& lists) {
    const bool is_json = dynamic_cast<benchmark::JSONReporter*>(&to) != nullptr;
    if (!is_json) std::erase_if(row.counters, [](const auto& c) { return std::isnan(c.second.value); });
    const std::string before = text.str();
    text.str("");
    to.ReportRuns({row});
    std::string added = std::regex_replace(text.str(), std::regex(": NaN"), ": null");
    if (is_json && lists.contains("rounds")) {
      const std::vector<double>& rounds = lists.at("rounds");
      std::string keys = fmt::format(",\n      \"median\": {},\n      \"quartiles\": [{}, {}]", quantile(rounds, 0.5),
                                     quantile(rounds, 0.25), quantile(rounds, 0.75));
      for (const auto& [name, values] : lists)
        keys += fmt::format(",\n      \"{}\": [{}]", name, fmt::join(values, ", "));
      added.insert(added.rfind("\n    }"), keys);
    }
    text.str("");
    text << before << added;
  }
  // Prints pending standard output. Returns true if both reporters continue.
  template <class F>
  bool to_both(const F& report) {
    const bool proceeds = (!file_ || report(*file_)) && report(*display_);
    if (wanted_.table) return proceeds;
    print_(shown_.str());
    shown_.str("");
    return proceeds;
  }

  OutputChoice choice_;
  const Choice& wanted_;
  Print print_;
  std::function<Rows()> last_;
  std::string first_error_;
  std::ostringstream shown_, written_;
  benchmark::JSONReporter for_table_;
  benchmark::BenchmarkReporter* display_;  // for_table_ or a library reporter
  std::unique_ptr<benchmark::BenchmarkReporter> file_;
};

std::regex to_regex(const std::string& filter) {
  try {
    return std::regex(filter.empty() || filter == "all" ? "." : filter, std::regex::extended);
  } catch (const std::regex_error& e) {
    throw Error(fmt::format("--benchmark_filter: expected a regular expression, got '{}' ({})", filter, e.what()));
  }
}

}  // namespace

double quantile(std::vector<double> values, double fraction) {
  std::ranges::sort(values);
  const double at = fraction * static_cast<double>(values.size() - 1), below = std::floor(at);
  const auto i = static_cast<size_t>(below);
  return std::lerp(values[i], values[std::min(i + 1, values.size() - 1)], at - below);
}

void add_rounds(benchmark::State& state, const std::vector<double>& seconds, std::string_view name) {
  for (size_t i = 0; i < seconds.size(); ++i) state.counters[fmt::format("{}{} {:09}", kList, name, i)] = seconds[i];
}

double machine_seconds() {
  thread_local std::vector<char> from(4 << 20, 1), to(4 << 20);
  return measure_seconds([&] {
    std::ranges::copy(from, to.begin());
    float x = to.back();
    for (int i = 0; i < 100'000; ++i) x = x * 0.999F + 0.5F;  // a dependency chain
    benchmark::DoNotOptimize(x);
  });
}

bool Choice::has(const std::string& name) const {
  const bool is_op = name.starts_with("op/"), is_collective = name.starts_with("collective/");
  return (!dtype || (*dtype == DType::bfloat16) == (name.find("/bf16") != name.npos)) && (ranks.empty() || !is_op) &&
         (bytes.empty() || is_collective) && (model.empty() || !(is_op || is_collective));
}

Selection::Selection(const std::string& filter)
    : inverted_(filter.starts_with('-')), expression_(to_regex(inverted_ ? filter.substr(1) : filter)) {}

namespace {

constexpr double kTimeout = 120;  // seconds, longer than any wait of a row

void report(benchmark::State& state, const Measured& m) {
  if (!m.error.empty()) return state.SkipWithError(m.error.c_str());
  for (auto _ : state) state.SetIterationTime(m.seconds);
  add_rounds(state, m.rounds);
  add_rounds(state, m.reference, "reference_rounds");
  add_rounds(state, m.machine, "machine_rounds");
  for (const auto& [name, value] : m.counters) state.counters[name] = value;
  if (!m.label.empty()) state.SetLabel(m.label);
}

// All ranks of a job have the same rows. Rank 0 runs Google Benchmark and broadcasts (row, iterations) or kNoMore.
using Order = std::array<int64_t, 2>;
constexpr Order kNoMore{-1, 0};

Order broadcast_order(Communicator& job, const Order& order) {
  const Tensor message = Tensor::of<int64_t>(order, {2}, make_arena());
  job.broadcast(message, 0);
  return {message.data<int64_t>()[0], message.data<int64_t>()[1]};
}

// Rank 0 of a launch is the calling thread, so it may write `found`.
Measured measured(const Place& place, const std::vector<RankRow>& rows, size_t i, int64_t iterations) {
  const RankRow& row = rows[i];
  if (place.processes()) {
    broadcast_order(*place.job, {static_cast<int64_t>(i), iterations});
    return row.measure(*place.job, iterations);
  }
  Measured found;
  launch({.backend = row.backend, .ranks = row.ranks, .threads_per_rank = 1, .timeout_s = kTimeout},
         [&](Communicator& world) {
           Measured local = row.measure(world, iterations);
           if (world.rank() == 0) found = std::move(local);
         });
  return found;
}

// Google Benchmark stores the pointer to argv[0], so `args` must outlive the run.
void initialise(Args& args) {
  args.insert(args.begin(), "tessera bench");
  std::vector<char*> argv;
  for (std::string& arg : args) argv.push_back(arg.data());
  int argc = static_cast<int>(argv.size());
  benchmark::Initialize(&argc, argv.data());
  if (argc > 1) throw Error(fmt::format("bench: expected a Google Benchmark flag, got '{}'", argv[1]));
}

// Identical on every rank of a job.
std::vector<RankRow> rank_rows(const Place& place, const Selection& selection, Families& families) {
  std::vector<RankRow> all = collective_rows(place, families);
  for (const auto& more : {strategy_rows(place), schedule_rows(place)}) all.insert(all.end(), more.begin(), more.end());
  std::erase_if(all, [&](const RankRow& row) {
    return !selection.has(row.name) || !place.has(row.name) ||
           !(place.ranks.empty() || std::ranges::count(place.ranks, row.ranks) > 0);
  });
  return all;
}

// Final rows: the fitted cost of each collective.
Outputs::Rows fit_rows(const Families& families) {
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

// CPUs used by other programs, including other virtual machines (`steal`); nullopt if not reported. The load average is
// unsuitable because it covers several minutes, including preceding rounds of an A/B series.
class OtherPrograms {
 public:
  // Average since the last call at least kWindow ago, because the system counts in units of 10 ms. `processes`: equally
  // busy processes of this program on this host.
  std::optional<double> busy_cores(int processes = 1) {
    const Usage now;
    if (now.at - last_.at >= kWindow) first_ = std::exchange(last_, now);
    const double wall = std::chrono::duration<double>(now.at - first_.at).count();
    if (now.busy <= 0 || now.busy < first_.busy || wall <= 0) return std::nullopt;
    return std::max(0.0, (now.busy - first_.busy - processes * (now.own - first_.own)) / wall);
  }
  static constexpr std::chrono::milliseconds kWindow{200};

 private:
  struct Usage {
    std::chrono::steady_clock::time_point at = std::chrono::steady_clock::now();
    double busy = 0, own = static_cast<double>(std::clock()) / CLOCKS_PER_SEC;  // CPU time: all, own
    Usage() {
      std::ifstream in("/proc/stat");
      std::string name;
      std::array<double, 8> times{};  // user, nice, system, idle, iowait, irq, softirq, steal
      in >> name;
      for (double& time : times) in >> time;
      times[3] = times[4] = 0;
      if (in) busy = std::accumulate(times.begin(), times.end(), 0.0) / static_cast<double>(sysconf(_SC_CLK_TCK));
    }
  };
  Usage first_, last_ = first_;
};

void add_context() {
  OtherPrograms others;
  std::this_thread::sleep_for(others.kWindow);
  if (const auto busy = others.busy_cores())
    benchmark::AddCustomContext("busy_processors", fmt::format("{:.2f}", *busy));
#ifdef NDEBUG
  benchmark::AddCustomContext("tessera_build", "release");
#else
  benchmark::AddCustomContext("tessera_build", "debug");
#endif
  benchmark::AddCustomContext("matmul", cpu::matmul_library());
  benchmark::AddCustomContext("threads", std::to_string(cpu::threads()));
  benchmark::AddCustomContext(
      "google_benchmark", "a DEBUG build (Debian's) does not affect the results: Tessera measures the times itself");
}

// Per row without a fixed iteration count, so that all ops take less than two minutes.
constexpr double kSeconds = 0.05;

void register_rows(const std::vector<Row>& rows, std::optional<double> seconds, int processes) {
  const auto others = std::make_shared<OtherPrograms>();
  for (const Row& row : rows) {
    const auto run = [=, run = row.run](benchmark::State& state) {
      run(state);
      state.counters["other_processors"] = others->busy_cores(processes).value_or(kNone);
    };
    auto* made = benchmark::RegisterBenchmark(row.name.c_str(), run)->UseManualTime()->Unit(row.unit);
    if (row.iterations > 0 && !seconds)
      made->Iterations(row.iterations);
    else
      made->MinTime(seconds.value_or(kSeconds));
  }
}

// Retains freed message buffers; otherwise a row's page faults depend on the preceding rows. 32 MiB is the maximum of
// M_MMAP_THRESHOLD.
void reuse_freed_memory() {
  mallopt(M_MMAP_THRESHOLD, 32 << 20);
  mallopt(M_TRIM_THRESHOLD, 1 << 30);
}

// Called by every rank of a job.
void run_rows(const Args& args, const Place& place, const Print& print) {
  Args remaining = args;
  const OutputChoice choice = take_output_choice(remaining);
  const bool lists = take_first(remaining, "benchmark_list_tests", {"true", "false"}, false, "true");
  const std::optional<double> seconds = take_min_time(remaining);
  initialise(remaining);
  const std::string filter = benchmark::GetBenchmarkFilter();
  const Selection selection(filter);
  Families families;
  const std::vector<RankRow> by_ranks = rank_rows(place, selection, families);
  OpRows ops = place.processes() ? OpRows{} : op_rows(place.device);
  std::vector<Row> rows = std::move(ops.rows);
  std::erase_if(rows, [&](const Row& row) { return !selection.has(row.name) || !place.has(row.name); });
  for (size_t i = 0; i < by_ranks.size(); ++i)
    rows.push_back({.name = by_ranks[i].name,
                    .run = [&, i](auto& state) { report(state, measured(place, by_ranks, i, state.max_iterations)); },
                    .unit = by_ranks[i].unit,
                    .iterations = by_ranks[i].iterations});
  if (rows.empty())
    throw Error(fmt::format(
        "bench: no benchmark matches the filter '{}' and the other options; expected part of a name, "
        "such as op/matmul/forward/fp32 or collective/all_reduce, and a number of ranks that divides the model",
        filter));
  if (place.processes() && place.job->rank() > 0) {
    reuse_freed_memory();
    for (Order next = broadcast_order(*place.job, kNoMore); next != kNoMore;
         next = broadcast_order(*place.job, kNoMore))
      by_ranks[static_cast<size_t>(next[0])].measure(*place.job, next[1]);
    return;
  }
  const auto dismiss = [&] {
    if (place.processes()) broadcast_order(*place.job, kNoMore);
  };
  if (lists) {
    for (const Row& row : rows) print(row.name + "\n");
    return dismiss();
  }
  reuse_freed_memory();
  add_context();
  if (ops.ceilings)
    for (const auto& [name, value] : ops.ceilings(rows)) benchmark::AddCustomContext(name, value);
  register_rows(rows, seconds, place.processes() ? place.job->size() : 1);
  Outputs outputs(choice, place, print, [&] { return fit_rows(families); });
  benchmark::RunSpecifiedBenchmarks(&outputs, "all");
  dismiss();
  outputs.write_file();
  benchmark::ClearRegisteredBenchmarks();
  benchmark::Shutdown();
  if (!outputs.first_error().empty())
    throw Error(fmt::format("bench: {}", outputs.first_error()), Status::verification);
}

}  // namespace

void run_benchmarks(const Args& args, const Choice& choice, const Print& print) {
  const auto job = mpi_surroundings();
  if (!kWithMpi || !job || job->ranks == 1) return run_rows(args, {choice}, print);
  launch({.backend = choice.device == Device::cuda ? Backend::nccl : Backend::mpi,
          .threads_per_rank = 1,
          .same = {{"arguments of `bench`", fmt::format("{}", fmt::join(args, " "))}}},
         [&](Communicator& world) {
           run_rows(args, {choice, &world}, print);
         });
}

}  // namespace tessera::bench
