// Standard output and progress lines.
#include "app/output.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <string>
#include <string_view>
#include <vector>

#include "app/options.h"
#include "parallel/comm/launch.h"

namespace tessera {

void open_standard_descriptors() {
  for (int fd = STDIN_FILENO; fd <= STDERR_FILENO; ++fd)
    if (::fcntl(fd, F_GETFD) < 0 && ::open("/dev/null", O_RDWR) != fd)  // the lowest free descriptor
      std::abort();
}

bool print(std::string_view raw) {
  static const bool terminal = ::isatty(STDOUT_FILENO) == 1;
  const std::string escaped = terminal ? for_terminal(raw) : std::string();
  const std::string_view text = terminal ? escaped : raw;
  errno = 0;
  if (std::fwrite(text.data(), 1, text.size(), stdout) == text.size() && std::fflush(stdout) == 0) return true;
  const int cause = errno;
  std::clearerr(stdout);
  if (cause == EPIPE) return false;
  throw OutputError(fmt::format("cannot write to standard output: {}", std::strerror(cause)));
}

namespace {

constexpr double kNewStep = 0.1;  // weight of the newest step in the moving average
constexpr std::chrono::milliseconds kBetweenRewrites{80};
constexpr std::chrono::milliseconds kBetweenPlainWork{10'000};
constexpr int64_t kPlainLines = 20;  // per run
constexpr int64_t kBar = 20, kMinBar = 5;
constexpr int64_t kDefaultWidth = 200;  // if the width cannot be queried

int64_t terminal_width(std::FILE* file) {
  struct winsize size {};
  return ::ioctl(::fileno(file), TIOCGWINSZ, &size) == 0 && size.ws_col > 0 ? size.ws_col : kDefaultWidth;
}

std::string tight(const std::string& text) {
  std::string out;
  for (const char c : text)
    if (c != ' ' || out.empty() || out.back() != ' ') out += c;
  return out;
}

}  // namespace

std::string format_si(double v) {
  if (v >= 1e9) return fmt::format("{:.2f}B", v / 1e9);
  if (v >= 1e6) return fmt::format("{:.2f}M", v / 1e6);
  if (v >= 1e3) return fmt::format("{:.1f}K", v / 1e3);
  return v < 100 ? fmt::format("{:.3g}", v) : fmt::format("{:.0f}", v);
}

std::string megabytes(int64_t bytes) { return fmt::format("{:.2f}", static_cast<double>(bytes) / 1e6); }

std::string duration(double seconds) {
  const auto s = static_cast<int64_t>(std::lround(std::clamp(seconds, 0.0, 1e9)));
  if (s >= 3600) return fmt::format("{} h {:02} min", s / 3600, s / 60 % 60);
  if (s >= 60) return fmt::format("{} min {:02} s", s / 60, s % 60);
  return fmt::format("{} s", s);
}

std::string sparkline(const std::vector<double>& values, size_t width) {
  constexpr std::array<std::string_view, 8> kBars{"▁", "▂", "▃", "▄", "▅", "▆", "▇", "█"};
  const size_t n = std::min(width, values.size());
  std::vector<double> means;
  for (size_t i = 0; i < n; ++i) {
    const size_t begin = i * values.size() / n, end = (i + 1) * values.size() / n;
    double sum = 0;
    for (size_t j = begin; j < end; ++j) sum += values[j];
    means.push_back(sum / static_cast<double>(end - begin));
  }
  std::string out;
  if (means.empty()) return out;
  const auto [low, high] = std::ranges::minmax_element(means);
  for (const double m : means) {
    const double height = *high > *low ? (m - *low) / (*high - *low) : 0;
    out += kBars[static_cast<size_t>(std::lround(height * (kBars.size() - 1)))];
  }
  return out;
}

Progress::Options Progress::for_stderr(int64_t steps, bool quiet) {
  const char *const no_color = std::getenv("NO_COLOR"), *const term = std::getenv("TERM");
  const bool terminal = ::isatty(STDERR_FILENO) == 1 && !(term != nullptr && std::string(term) == "dumb");
  return {.to = stderr,
          .terminal = terminal,
          .color = terminal && (no_color == nullptr || *no_color == '\0'),
          .quiet = quiet,
          .steps = steps};
}

std::string Progress::line(const StepReport& r) const {
  const double left = static_cast<double>(o_.steps - r.step) * step_ms_ / 1e3;
  return fmt::format("step {}/{}  loss {:.4f}  lr {:.2e}  grad norm {:.2f}  {} tok/s  {} left", r.step, o_.steps,
                     r.loss, r.lr, r.grad_norm, format_si(r.tokens_per_s), duration(left));
}

// One column stays free, because a wrapped line cannot be rewritten.
int64_t Progress::cols() const { return (o_.columns > 0 ? o_.columns : terminal_width(o_.to)) - 1; }

std::string Progress::terminal_line(const StepReport& r) const {
  const std::string text = line(r);
  const int64_t size = std::min(kBar, cols() - std::ssize(text) - 1);
  if (size < kMinBar) return (std::ssize(text) > cols() ? tight(text) : text).substr(0, static_cast<size_t>(cols()));
  const double fraction = o_.steps > 0 ? static_cast<double>(r.step) / static_cast<double>(o_.steps) : 1;
  std::string bar;
  for (int64_t i = 0; i < size; ++i) bar += i < static_cast<int64_t>(fraction * static_cast<double>(size)) ? "━" : "╌";
  return (o_.color ? fmt::format("\033[36m{}\033[0m ", bar) : bar + " ") + text;
}

void say(const std::string& line) { std::fputs((one_line(with_options(line)) + "\n").c_str(), stderr); }

void say_above_progress(const std::string& line) {
  const std::string text =
      fmt::format("{}tessera: {}\n", ::isatty(STDERR_FILENO) == 1 ? "\r\033[K" : "", one_line(line));
  std::fputs(text.c_str(), stderr);
}

bool speaks_for_all() {
  return std::ranges::none_of(std::array{"OMPI_COMM_WORLD_RANK", "MV2_COMM_WORLD_RANK", "PMI_RANK"},
                              [](const char* rank) {
                                const char* const value = std::getenv(rank);
                                return mpi_surroundings() && value && std::string_view(value) != "0";
                              });
}

void say_notes(const std::vector<std::string>& notes) {
  if (!speaks_for_all()) return;
  for (const std::string& note : notes) say(note);
}

void Progress::step(const StepReport& r) {
  if (o_.quiet) return;
  step_ms_ = step_ms_ == 0 ? r.step_ms : step_ms_ + kNewStep * (r.step_ms - step_ms_);
  if (o_.terminal) {
    const auto now = std::chrono::steady_clock::now();
    if (r.step < o_.steps && now - last_ < kBetweenRewrites) return;
    last_ = now;
    return rewrite(terminal_line(r));
  }
  if (r.step < next_plain_ && r.step < o_.steps) return;
  const int64_t every = std::max<int64_t>(1, o_.steps / kPlainLines);
  next_plain_ = (r.step / every + 1) * every;
  put(line(r) + "\n");
}

void Progress::work(const std::string& raw) {
  const std::string text = one_line(raw);
  const auto now = std::chrono::steady_clock::now();
  if (o_.quiet || now - last_ < (o_.terminal ? kBetweenRewrites : kBetweenPlainWork)) return;
  const bool first = last_.time_since_epoch().count() == 0;
  last_ = now;
  if (o_.terminal)
    rewrite(text.substr(0, static_cast<size_t>(cols())));
  else if (!first)
    put(text + "\n");  // short work is not reported
}

void Progress::message(const std::string& text) {
  if (o_.quiet) return;
  clear();
  put(one_line(text) + "\n");
}

void Progress::put(const std::string& text) {
  std::fputs(text.c_str(), o_.to);
  std::fflush(o_.to);
}

void Progress::rewrite(const std::string& text) {
  put("\r\033[K" + text);
  shown_ = true;
}

void Progress::clear() {
  if (shown_) std::fputs("\r\033[K", o_.to);
  shown_ = false;
}

}  // namespace tessera
