// A row of the microbenchmarks: its name and what it does under Google Benchmark.
#pragma once
#include <benchmark/benchmark.h>

#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <ostream>
#include <regex>
#include <sstream>
#include <streambuf>
#include <string>
#include <string_view>
#include <vector>

#include "tensor/device.h"

namespace tessera::bench {

struct Row {
  std::string name;
  std::function<void(benchmark::State&)> run;
  benchmark::TimeUnit unit = benchmark::kMicrosecond;
  int64_t iterations = 0;  // unless `--benchmark_min_time` says how long; 0: as many as that takes
};

// The outputs of the microbenchmarks' rows: standard output, and the file of `--benchmark_out` when all are there.

using Print = std::function<void(std::string_view)>;

// The words about the file are ours, since Google Benchmark would write into it row by row.
struct OutputChoice {
  std::filesystem::path file = {};  // empty: none
  std::string format = "json";
};
// Takes them out of the words. Throws Error (usage) for an unknown format, and OutputError for a folder that is none.
OutputChoice take_output_choice(std::vector<std::string>& words);
// The seconds of --benchmark_min_time, which versions of Google Benchmark write as 0.1 or as 0.1s: both are read.
// Throws Error (usage).
std::optional<double> take_min_time(std::vector<std::string>& words);

class Outputs final : public benchmark::BenchmarkReporter {
 public:
  using Rows = std::vector<Run>;
  // After benchmark::Initialize(), which knows how the rows are to be shown. `last` gives rows to show after all
  // others.
  Outputs(const OutputChoice& choice, Print print, std::function<Rows()> last);
  bool ReportContext(const Context& context) override;
  void ReportRuns(const std::vector<Run>& rows) override;
  void Finalize() override;
  // Throws OutputError.
  void write_file() const;
  // The error of the first row that had one; empty: none had.
  const std::string& first_error() const { return first_error_; }

 private:
  class Printed final : public std::streambuf {
   public:
    explicit Printed(Print print) : print_(std::move(print)) {}

   protected:
    int_type overflow(int_type c) override;
    std::streamsize xsputn(const char* text, std::streamsize size) override;

   private:
    Print print_;
  };

  void show(const Rows& rows);

  OutputChoice choice_;
  std::function<Rows()> last_;
  std::string first_error_;
  Printed printed_;
  std::ostream shown_;
  std::ostringstream written_;
  benchmark::BenchmarkReporter* display_;  // the library's own
  std::unique_ptr<benchmark::BenchmarkReporter> file_;
};

// Which rows run: the names that `--benchmark_filter` means. Google Benchmark reads it so too, but compares it with
// names that have words of its own at their end.

class Selection {
 public:
  // A POSIX extended expression, which may be found anywhere in a name; behind a minus, all names that it is not found
  // in. Empty or "all": every name. Throws Error (usage) for what is no expression.
  explicit Selection(const std::string& filter);
  bool has(const std::string& name) const { return std::regex_search(name, expression_) != inverted_; }

 private:
  bool inverted_;
  std::regex expression_;
};

// Takes the flag `--benchmark_list_tests` out of the words: whether names are only to be listed. Throws Error (usage)
// for a value that is neither true nor false.
bool take_listing(std::vector<std::string>& words);

// The microbenchmarks of `tessera bench`, under Google Benchmark: the groups `op/`, `collective/`, `strategy/` and
// `schedule/`. Under mpirun those whose ranks are the job's; rank 0 prints.

// Runs with the words behind `bench` (Google Benchmark's flags). `print` gets what is for standard output. Throws
// Error: usage for a word that it does not know and for a filter that matches nothing, verification where a row sent
// other bytes than the closed form says; and OutputError.
void run_benchmarks(const std::vector<std::string>& words, Device device,
                    const std::function<void(std::string_view)>& print);

}  // namespace tessera::bench
