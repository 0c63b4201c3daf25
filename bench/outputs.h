// Where the rows of the microbenchmarks go: standard output, and the file of `--benchmark_out` when all are there.
#pragma once
#include <benchmark/benchmark.h>

#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <ostream>
#include <sstream>
#include <streambuf>
#include <string>
#include <string_view>
#include <vector>

namespace tessera::bench {

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
  // What was wrong in the first row that had an error; empty: in none.
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

}  // namespace tessera::bench
