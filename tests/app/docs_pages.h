// Helpers of the test of the pages: the commands and quotations of a page, and whether two outputs say the same.
#pragma once
#include <fmt/format.h>
#include <sched.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdlib>
#include <map>
#include <regex>
#include <sstream>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace tessera::test {

using Lines = std::vector<std::string>;

inline Lines lines_of(const std::string& text) {
  Lines out;
  std::istringstream in(text);
  for (std::string line; std::getline(in, line);) out.push_back(line);
  while (!out.empty() && out.back().empty()) out.pop_back();
  return out;
}

inline Lines words_of(const std::string& line) {
  Lines out;
  std::istringstream in(line);
  for (std::string word; in >> word;) out.push_back(word);
  return out;
}

inline bool is_fence(const std::string& line) { return line.starts_with("```"); }

// A command of a page, and the lines [begin, end) that it is said to print; lines are counted from 0.
struct Example {
  std::string program, arguments;
  size_t begin = 0, end = 0;
  bool shows() const { return end > 0; }
  bool is_report() const { return arguments.starts_with("report "); }
  // The file that `report --figure` writes; empty for others.
  std::string figure() const {
    static const std::string out = " --out ";
    const size_t at = arguments.find(out);
    return is_report() && arguments.find("--figure ") != std::string::npos && at != std::string::npos
               ? arguments.substr(at + out.size())
               : "";
  }
  // Whether a page may leave out lines of the command's output.
  bool leaves_out() const {
    return arguments.starts_with("plan ") || arguments.find(" --defect ") != std::string::npos;
  }
};

// Throws std::runtime_error for a command without a block of output.
inline std::vector<Example> examples_of(const Lines& page) {
  static const std::regex command(
      R"(\$ (?:\./|build/release/bin/)?(tessera(?= verify| plan| lab| data .*--out| train .*--trace| report .*--format text| report .*--figure .*--svg.* --out \S+)|schedules|cat) (.*))");
  std::vector<Example> out;
  std::smatch match;
  for (size_t i = 0; i + 1 < page.size(); ++i) {
    if (page[i] != "```console" || !std::regex_match(page[i + 1], match, command)) continue;
    size_t at = i + 3;
    if (at > page.size() || page[i + 2] != "```")
      throw std::runtime_error(fmt::format("{}: expected one command in the block", i + 1));
    if (const Example silent{match[1], match[2]}; match.str(2).starts_with("train ") || !silent.figure().empty()) {
      out.push_back(silent);
      continue;
    }
    while (at < page.size() && page[at].empty()) ++at;
    const size_t begin = at + 1;
    size_t end = begin;
    while (end < page.size() && !is_fence(page[end])) ++end;
    if (end >= page.size() || page[at] != "```")
      throw std::runtime_error(fmt::format("{}: expected a block with the output behind the command", i + 2));
    out.push_back({match[1], match[2], begin, end});
    i = end;
  }
  return out;
}

// The blocks of code that are quoted from a file: its path, and the lines.
inline std::vector<std::pair<std::string, Lines>> quotes_of(const Lines& page) {
  static const std::regex path("// ([a-z0-9_/]+\\.(?:h|cpp))");
  std::vector<std::pair<std::string, Lines>> out;
  std::smatch match;
  for (size_t i = 0; i + 1 < page.size(); ++i) {
    if (page[i] != "```cpp" || !std::regex_match(page[i + 1], match, path)) continue;
    Lines& lines = out.emplace_back(match[1], Lines()).second;
    for (i += 2; i < page.size() && !is_fence(page[i]); ++i) lines.push_back(page[i]);
  }
  return out;
}

// The lines of `found`, with each run of lines that the page leaves out as its "...": those up to the line with the
// same first words as the next one that the page has.
inline Lines left_out(const Lines& page, const Lines& found) {
  Lines out;
  size_t at = 0;
  for (size_t i = 0; i < page.size(); ++i) {
    if (page[i] != "...") {
      if (at < found.size()) out.push_back(found[at]);
      ++at;
      continue;
    }
    out.push_back(page[i]);
    const Lines next = i + 1 < page.size() ? words_of(page[i + 1]) : Lines();
    const auto begins = [&](const std::string& line) {
      const Lines words = words_of(line);
      return std::equal(next.begin(), next.begin() + std::min<std::ptrdiff_t>(2, std::ssize(next)), words.begin(),
                        words.begin() + std::min<std::ptrdiff_t>(2, std::ssize(words)));
    };
    while (at < found.size() && (next.empty() || !begins(found[at]))) ++at;
  }
  out.insert(out.end(), found.begin() + static_cast<std::ptrdiff_t>(std::min(at, found.size())), found.end());
  return out;
}

// The parts of a figure that are the same each time it is drawn of a run like it: its words without numbers, how many
// boxes of which name it has, its rules, and bytes that have closed forms; not how long anything took, nor what was too
// short to be drawn.
inline std::map<std::string, int> structure_of(const std::string& svg) {
  static const std::regex number("[0-9]+([.,][0-9]+)*( (ms|µs|s|B|KB|MB)\\b)?|[0-9.]+%"),
      kept(
          "<title id[^/]*|<desc[^/]*|<text class=\"(?:title|name|end)\"[^>]*>[^<]*|\n[a-z.][^\n]* \\{[^\n]*|<rect "
          "class=\"[^\"]*\"[^>]*><title>[^,<]*,[^,<]*");
  std::map<std::string, int> out;
  for (std::sregex_iterator it(svg.begin(), svg.end(), kept), end; it != end; ++it) {
    const std::string part = it->str();
    if (part.find("\"wait\"") != std::string::npos || part.find("\"idle\"") != std::string::npos) continue;
    const bool box = part.starts_with("<rect");
    const std::string word = box ? part.substr(part.find("<title>")) : part;
    static const std::regex exact("\n.*|<title>(parameters|gradients|optimizer): [^]*");
    ++out[std::regex_match(part, exact) || std::regex_match(word, exact) ? word
                                                                         : std::regex_replace(word, number, "#")];
  }
  return out;
}

inline bool within(const std::string& a, const std::string& b, double absolute, double relative) {
  char *end_a = nullptr, *end_b = nullptr;
  const double x = std::strtod(a.c_str(), &end_a), y = std::strtod(b.c_str(), &end_b);
  if (end_a == a.c_str() || std::string(end_a) != std::string(end_b)) return false;
  return std::abs(x - y) <= absolute + relative * std::max(std::abs(x), std::abs(y));
}

// Compares output line by line; knows in which columns of a table the peaks and their bounds are, and in a report what
// is a time.
class Difference {
 public:
  explicit Difference(bool report = false) : report_(report) {}
  // The first difference of `found` from `expected`, in one line; empty if there is none.
  std::string between(const Lines& expected, const Lines& found, size_t first_line) {
    for (size_t i = 0; i < std::max(expected.size(), found.size()); ++i) {
      const std::string e = i < expected.size() ? expected[i] : "(no more)", f = i < found.size() ? found[i] : "(ends)";
      if (!(report_ && is_picture(e) ? same_picture(e, f) : same(words_of(e), words_of(f))))
        return fmt::format("{}: the page has\n  {}\nfound\n  {}", first_line + i, e, f);
    }
    return "";
  }

 private:
  static bool is_picture(const std::string& line) { return line.ends_with('|') && line.find('|') + 1 < line.size(); }
  // Pictures are the same when they are of the same width; to the letter where nothing in them was measured. The time
  // in which a rank computes can be seen; its communication, in the line without a name, may be too short to be drawn.
  bool same_picture(const std::string& e, const std::string& f) const {
    if (planned_) return e == f;
    const size_t bar = e.find('|');
    return e.size() == f.size() && e.substr(0, bar + 1) == f.substr(0, bar + 1) && is_picture(f) &&
           (e[0] == ' ' || std::any_of(f.begin() + static_cast<std::ptrdiff_t>(bar), f.end(),
                                       [](char c) { return c >= 'A' && c <= 'Z'; }));
  }
  bool same(const Lines& e, const Lines& f) {
    if (e.size() != f.size()) return false;
    if (e.empty()) return true;
    if (e[0] == "rank") columns_ = e;
    if (e[0].ends_with(':') || e[0] == "Each") planned_ = e[0] == "planned:";
    const bool is_loss = e[0] == "loss", is_rounding = e[0].starts_with("relative") || e[0] == "bound";
    size_t marks = 0;  // before the word: they have no name in the heading
    for (size_t w = 0; w < e.size(); ++w) {
      marks += e[w] == "ok" ? 1 : 0;
      const std::string column = w - marks < columns_.size() ? columns_[w - marks] : "";
      const bool is_memory = column == "peak" || column == "bound";
      if (e[w] != f[w] && !(report_ && is_measured(e, w, column, f[w])) && !(is_loss && within(e[w], f[w], 0.01, 0)) &&
          !(is_memory && within(e[w], f[w], 0, 0.1)) && !(column == "MB" && within(e[w], f[w], 0.02, 0.1)) &&
          !(is_rounding && is_figure(e[w])))
        return false;
    }
    return true;
  }
  // Words of a report that are measured: milliseconds, which have three decimals, the step that is shown, shares of
  // them, and what is held while ranks run beside each other.
  static bool is_measured(const Lines& e, size_t w, const std::string& column, const std::string& found) {
    static const std::regex ms("\\d+\\.\\d{3}"), number("\\d+,?"), share("\\d+\\.\\d%");
    const auto both = [&](const std::regex& form) {
      return std::regex_match(e[w], form) && std::regex_match(found, form);
    };
    if (both(ms) || (w > 0 && e[w - 1] == "step" && both(number))) return true;
    if (e[0] == "replayed" || e[0] == "measured") return both(share);
    const bool is_held =
        column == "activations" || column == "workspace" || column == "communication" || column == "peak";
    return (is_held && within(e[w], found, 1 << 14, 0.1)) || (column == "MB" && within(e[w], found, 0.02, 0.1));
  }
  // A number, or the name of the tensor that is farthest from the oracle's.
  static bool is_figure(const std::string& word) {
    return word[0] == '(' || word.find_first_of("0123456789") != std::string::npos;
  }
  bool report_, planned_ = false;
  Lines columns_;
};

// As long as it lives, programs are started on two processors, if there are so many.
class OnTwoProcessors {
 public:
  OnTwoProcessors() {
    CPU_ZERO(&all_);
    if (::sched_getaffinity(0, sizeof all_, &all_) != 0) return;
    cpu_set_t two;
    CPU_ZERO(&two);
    for (int core = 0; core < CPU_SETSIZE && CPU_COUNT(&two) < 2; ++core)
      if (CPU_ISSET(core, &all_)) CPU_SET(core, &two);
    ::sched_setaffinity(0, sizeof two, &two);
  }
  ~OnTwoProcessors() { ::sched_setaffinity(0, sizeof all_, &all_); }
  OnTwoProcessors(const OnTwoProcessors&) = delete;
  OnTwoProcessors& operator=(const OnTwoProcessors&) = delete;
  bool are_there() const { return CPU_COUNT(&all_) >= 2; }

 private:
  cpu_set_t all_{};
};

}  // namespace tessera::test
