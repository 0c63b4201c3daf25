// Standard output as a product: what cannot be written there is an error, unless the reader has closed it.
#pragma once
#include <cstdio>

#include "train/step.h"

namespace tessera {

// Writes the text to standard output at once. False when its reader is gone (`| head -1`), which is the reader's
// choice and no error. Throws OutputError for anything else, such as a full disk. A terminal gets for_terminal(text), a
// pipe or a file the text itself.
bool print(std::string_view text);

// Opens /dev/null where descriptor 0, 1 or 2 is closed, before a file gets its number and with it what is printed.
void open_standard_descriptors();

// The progress of a run for a person, on standard error: one line that is rewritten on a terminal, a plain line now and
// then elsewhere. Numbers keep their point in any locale, and a closed output is not an error.

// "12.3K" for 12345.
std::string format_si(double v);
// Bytes in MB, of 10^6 bytes, as it stands in tables beside the bytes: "12.35".
std::string megabytes(int64_t bytes);
// "1 h 02 min", "3 min 05 s", "42 s".
std::string duration(double seconds);

// A line of bars, one per `width`-th part of the values (its mean): the highest is full, the lowest a thin line.
std::string sparkline(const std::vector<double>& values, size_t width);

// A line on standard error from any rank's thread, or process: in one piece, and over a terminal's line of progress,
// which the next step writes again.
void say_above_progress(const std::string& line);

class Progress {
 public:
  struct Options {
    std::FILE* to = stderr;
    bool terminal = false;
    bool color = false;
    bool quiet = false;
    int64_t steps = 0;    // steps of the whole run
    int64_t columns = 0;  // columns of the terminal; 0: ask it at every line, since windows change
  };
  explicit Progress(const Options& options) : o_(options) {}
  ~Progress() { clear(); }
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;
  // For standard error as it is: a terminal or not, NO_COLOR or not.
  static Options for_stderr(int64_t steps, bool quiet);

  void step(const StepReport& report);
  // A line about other work that goes on: rewritten on a terminal, elsewhere every ten seconds.
  void work(const std::string& line);
  void message(const std::string& line);  // a line of its own above the progress; not shown when quiet

 private:
  std::string line(const StepReport& r) const;
  std::string terminal_line(const StepReport& r) const;
  int64_t room() const;  // columns for a line
  void put(const std::string& text);
  void rewrite(const std::string& text);
  void clear();
  Options o_;
  bool shown_ = false;
  double step_ms_ = 0;  // moving mean: the time left does not jump with one slow step
  int64_t next_plain_ = 1;
  std::chrono::steady_clock::time_point last_{};
};

}  // namespace tessera
