// Standard output and progress lines.
#pragma once
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <string>
#include <string_view>
#include <vector>

#include "train/step.h"

namespace tessera {

// Writes and flushes text, escaped by for_terminal() on a terminal. Returns false if the reader has closed the pipe, as
// in `| head -1`, which is not an error. Throws OutputError for other failures, such as a full disk.
bool print(std::string_view text);

// Opens /dev/null for closed descriptors 0, 1 and 2, so that files opened later do not receive printed output.
void open_standard_descriptors();

// Progress on standard error: one rewritten line on a terminal, otherwise occasional plain lines. Numbers are formatted
// independently of the locale; a closed output is not an error.

// "12.3K" for 12345.
std::string format_si(double v);
// MB (10^6 bytes) with two digits: "12.35".
std::string megabytes(int64_t bytes);
// "1 h 02 min", "3 min 05 s", "42 s".
std::string duration(double seconds);

// At most `width` bars, each the mean of consecutive values, scaled from minimum to maximum.
std::string sparkline(const std::vector<double>& values, size_t width);

// Prints a line on standard error, with field names replaced by options (with_options()) and without control
// characters.
void say(const std::string& line);
// Prints a line on standard error in one write, overwriting a terminal's progress line. Thread- and process-safe.
void say_above_progress(const std::string& line);

class Progress {
 public:
  struct Options {
    std::FILE* to = stderr;
    bool terminal = false;
    bool color = false;
    bool quiet = false;
    int64_t steps = 0;
    int64_t columns = 0;  // 0: queried for each line, since windows can be resized
  };
  explicit Progress(const Options& options) : o_(options) {}
  ~Progress() { clear(); }
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;
  static Options for_stderr(int64_t steps, bool quiet);

  void step(const StepReport& report);
  // Progress of other work: rewritten on a terminal, otherwise printed every ten seconds.
  void work(const std::string& line);
  void message(const std::string& line);

 private:
  std::string line(const StepReport& r) const;
  std::string terminal_line(const StepReport& r) const;
  int64_t cols() const;
  void put(const std::string& text);
  void rewrite(const std::string& text);
  void clear();
  Options o_;
  bool shown_ = false;
  double step_ms_ = 0;  // moving average, so that one slow step hardly changes the remaining time
  int64_t next_plain_ = 1;
  std::chrono::steady_clock::time_point last_{};
};

}  // namespace tessera
