// Compares the pages with the programs: a page shows the actual output of a command, quoted code matches its source,
// and links resolve to files.
//
//   ```console
//   $ ./tessera verify --ranks 4
//   ```
//   ```
//   what it printed
//   ```
//
// The commands are `./tessera verify`, `./tessera lab`, `./tessera plan` (a page may replace lines of its output, and
// of that of `verify --defect`, by `...`), `./tessera bench --benchmark_list_tests`, `./tessera data SOURCE --out
// FOLDER`, `./tessera report RUN --format text`, `build/release/bin/schedules`, and `cat FILE`, whose block becomes
// that file for later commands of the page. `./tessera train --trace` runs for a report and has no output block;
// `./tessera report --figure NAME --svg --out FILE` has none either, because FILE is in the repository and shown by the
// page. Figures of plans are compared byte by byte, figures of runs by structure, including memory with closed forms.
//
// Whitespace is ignored and numbers are compared, but a loss may differ by 0.01 and peak memory by 10%, and rounding
// differences are not compared, because CPUs sum matmuls in different orders; oneDNN, whose workspace varies most, is
// limited to AVX2, with which the pages were generated. In reports, times are not compared: ms, lengths in figures, and
// bubbles derived from them; planned values, bytes sent and memory are. Reports are generated on two cores, because
// they mention whether there are fewer cores than ranks. TESSERA_UPDATE_DOCS=1 writes the output into the pages
// instead.

#include <sched.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <fstream>
#include <map>
#include <regex>
#include <sstream>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include "tests/app/program.h"
#include "tests/support/draw.h"

namespace tessera {
namespace {

using Lines = std::vector<std::string>;

// Removes trailing empty lines.
Lines to_lines(const std::string& text) { return test::to_lines(text.substr(0, text.find_last_not_of('\n') + 1)); }

Lines split_words(const std::string& line) {
  std::istringstream in(line);
  return {std::istream_iterator<std::string>(in), {}};
}

bool is_fence(const std::string& line) { return line.starts_with("```"); }

// A command of a page, and the lines [begin, end) of its expected output; lines are counted from 0.
struct Example {
  std::string program, arguments;
  size_t begin = 0, end = 0;
  bool shows() const { return end > 0; }
  bool is_report() const { return arguments.starts_with("report "); }
  // The file written by `report --figure`; otherwise empty.
  std::string figure() const {
    static const std::string out = " --out ";
    const size_t at = arguments.find(out);
    return is_report() && arguments.find("--figure ") != std::string::npos && at != std::string::npos
               ? arguments.substr(at + out.size())
               : "";
  }
  // Whether the page may omit lines of this command's output.
  bool leaves_out() const {
    return arguments.starts_with("plan ") || arguments.find(" --defect ") != std::string::npos;
  }
};

// Throws std::runtime_error for a command without an output block.
std::vector<Example> find_examples(const Lines& page) {
  static const std::regex command(
      R"(\$ (?:\./tessera (?=schedules )|\./|build/release/bin/)?(tessera(?= verify| plan| lab| bench --benchmark_list_tests| data .*--out| train .*--trace| report .*--format text| report .*--figure .*--svg.* --out \S+)|schedules|cat) (.*))");
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
      throw std::runtime_error(fmt::format("{}: expected a block with the output after the command", i + 2));
    out.push_back({match[1], match[2], begin, end});
    i = end;
  }
  return out;
}

// The code blocks quoted from a file: path and lines.
std::vector<std::pair<std::string, Lines>> find_quotes(const Lines& page) {
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

// The lines of `found` with "..." for every section that the page omits: up to the line that starts with the same words
// as the page's next line.
Lines left_out(const Lines& page, const Lines& found) {
  Lines out;
  size_t at = 0;
  for (size_t i = 0; i < page.size(); ++i) {
    if (page[i] != "...") {
      if (at < found.size()) out.push_back(found[at]);
      ++at;
      continue;
    }
    out.push_back(page[i]);
    const Lines next = i + 1 < page.size() ? split_words(page[i + 1]) : Lines();
    const auto begins = [&](const std::string& line) {
      const Lines tokens = split_words(line);
      return std::equal(next.begin(), next.begin() + std::min<std::ptrdiff_t>(2, std::ssize(next)), tokens.begin(),
                        tokens.begin() + std::min<std::ptrdiff_t>(2, std::ssize(tokens)));
    };
    while (at < found.size() && (next.empty() || !begins(found[at]))) ++at;
  }
  out.insert(out.end(), found.begin() + static_cast<std::ptrdiff_t>(std::min(at, found.size())), found.end());
  return out;
}

// The reproducible parts of a figure: its text without numbers, the number of boxes of each name, its style rules, and
// bytes with closed forms; no durations, and no boxes that may be too short to be drawn.
std::map<std::string, int> count_elements(const std::string& svg) {
  static const std::regex number("[0-9]+([.,][0-9]+)*( (ms|µs|s|B|KB|MB)\\b)?|[0-9.]+%"),
      stored(
          "<title id[^/]*|<desc[^/]*|<text class=\"(?:title|name|end)\"[^>]*>[^<]*|\n[a-z.][^\n]* \\{[^\n]*|<rect "
          "class=\"[^\"]*\"[^>]*><title>[^,<]*,[^,<]*");
  std::map<std::string, int> out;
  for (std::sregex_iterator it(svg.begin(), svg.end(), stored), end; it != end; ++it) {
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

bool within(const std::string& a, const std::string& b, double absolute, double relative) {
  char *end_a = nullptr, *end_b = nullptr;
  const double x = std::strtod(a.c_str(), &end_a), y = std::strtod(b.c_str(), &end_b);
  if (end_a == a.c_str() || std::string(end_a) != std::string(end_b)) return false;
  return std::abs(x - y) <= absolute + relative * std::max(std::abs(x), std::abs(y));
}

// Compares output line by line, with tolerances for peaks and bounds (selected by table column) and for times in
// reports.
class Difference {
 public:
  explicit Difference(bool report = false) : report_(report) {}
  // The first difference of `found` from `expected` in one line; empty if there is none.
  std::string between(const Lines& expected, const Lines& found, size_t first_line) {
    for (size_t i = 0; i < std::max(expected.size(), found.size()); ++i) {
      const std::string e = i < expected.size() ? expected[i] : "(no more)", f = i < found.size() ? found[i] : "(ends)";
      if (!(report_ && is_diagram(e) ? same_diagram(e, f) : same(split_words(e), split_words(f))))
        return fmt::format("{}: the page has\n  {}\nfound\n  {}", first_line + i, e, f);
    }
    return "";
  }

 private:
  static bool is_diagram(const std::string& line) { return line.ends_with('|') && line.find('|') + 1 < line.size(); }
  // Text timelines match if their widths are equal; timelines without measured values must be identical. Computation is
  // always visible, communication (in the line without a name) may be too short.
  bool same_diagram(const std::string& e, const std::string& f) const {
    if (planned_) return e == f;
    const size_t bar = e.find('|');
    return e.size() == f.size() && e.substr(0, bar + 1) == f.substr(0, bar + 1) && is_diagram(f) &&
           (e[0] == ' ' || std::any_of(f.begin() + static_cast<std::ptrdiff_t>(bar), f.end(),
                                       [](char c) { return c >= 'A' && c <= 'Z'; }));
  }
  bool same(const Lines& e, const Lines& f) {
    if (e.size() != f.size()) return false;
    if (e.empty()) return true;
    if (e[0] == "rank") columns_ = e;
    if (e[0].ends_with(':') || e[0] == "Each") planned_ = e[0] == "planned:";
    const bool is_loss = e[0] == "loss", is_rounding = e[0].starts_with("relative") || e[0] == "bound";
    size_t marks = 0;  // number of "ok" up to this word: these have no column heading
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
  // Measured words of a report: milliseconds (three decimals), the step, fractions, and memory of concurrent ranks.
  static bool is_measured(const Lines& e, size_t w, const std::string& column, const std::string& found) {
    static const std::regex ms("\\d+\\.\\d{3}"), number("\\d+[,;]?"), share("\\d+\\.\\d%");
    const auto both = [&](const std::regex& form) {
      return std::regex_match(e[w], form) && std::regex_match(found, form);
    };
    if (both(ms) || (w > 0 && e[w - 1] == "step" && both(number))) return true;
    if (e[0] == "replayed" || e[0] == "measured") return both(share);
    const bool is_held =
        column == "activations" || column == "workspace" || column == "communication" || column == "peak";
    return (is_held && within(e[w], found, 1 << 14, 0.1)) || (column == "MB" && within(e[w], found, 0.02, 0.1));
  }
  // A number, or the name of the tensor with the largest difference from the oracle.
  static bool is_figure(const std::string& word) {
    return word[0] == '(' || word.find_first_of("0123456789") != std::string::npos;
  }
  bool report_, planned_ = false;
  Lines columns_;
};

// Restricts started programs to two cores, if available.
class OnTwoCores {
 public:
  OnTwoCores() {
    CPU_ZERO(&all_);
    if (::sched_getaffinity(0, sizeof all_, &all_) != 0) return;
    cpu_set_t two;
    CPU_ZERO(&two);
    for (int core = 0; core < CPU_SETSIZE && CPU_COUNT(&two) < 2; ++core)
      if (CPU_ISSET(core, &all_)) CPU_SET(core, &two);
    ::sched_setaffinity(0, sizeof two, &two);
  }
  ~OnTwoCores() { ::sched_setaffinity(0, sizeof all_, &all_); }
  OnTwoCores(const OnTwoCores&) = delete;
  OnTwoCores& operator=(const OnTwoCores&) = delete;
  bool are_there() const { return CPU_COUNT(&all_) >= 2; }

 private:
  cpu_set_t all_{};
};

std::vector<fs::path> pages() {
  const fs::path root = TESSERA_SOURCE_DIR;
  std::vector<fs::path> out = {root / "README.md"};
  for (const auto& entry : fs::recursive_directory_iterator(root / "docs"))
    if (entry.path().extension() == ".md") out.push_back(entry.path());
  std::sort(out.begin(), out.end());
  return out;
}

std::string to_string(const fs::path& page) { return page.lexically_relative(TESSERA_SOURCE_DIR).generic_string(); }

// Link targets of a page with their lines; without links to other sites and within the page.
std::vector<std::pair<std::string, size_t>> find_links(const Lines& page) {
  static const std::regex link(R"(\]\(([^)#\s]+)[^)]*\))"), code("`[^`]*`");
  std::vector<std::pair<std::string, size_t>> out;
  bool fenced = false;
  for (size_t i = 0; i < page.size(); ++i) {
    if (is_fence(page[i])) fenced = !fenced;
    if (fenced) continue;
    const std::string text = std::regex_replace(page[i], code, "");
    for (std::sregex_iterator it(text.begin(), text.end(), link), end; it != end; ++it)
      if (const std::string target = (*it)[1]; target.find(':') == std::string::npos) out.emplace_back(target, i + 1);
  }
  return out;
}

class DocsTest : public ProgramTest {
 protected:
  // Pages train on the README, so it is in the working directory of their commands.
  DocsTest() {
    fs::copy_file(fs::path(TESSERA_SOURCE_DIR) / "README.md", path("README.md"));
    fs::create_directories(path("docs/strategies/figures"));
    setenv("TESSERA_MAX_CPU_ISA", "avx2", 1);
  }
  ~DocsTest() override { unsetenv("TESSERA_MAX_CPU_ISA"); }
  // Compares the figure file shown on the page with the one that the example draws.
  void check_figure(const Example& e, const fs::path& page, const Lines& text, bool update) const {
    const fs::path stored = fs::path(TESSERA_SOURCE_DIR) / e.figure();
    const std::string shown = "](" + stored.lexically_relative(page.parent_path()).generic_string() + ")";
    EXPECT_TRUE(std::ranges::any_of(text, [&](const std::string& line) { return line.find(shown) != line.npos; }))
        << to_string(page) << " does not show " << e.figure();
    const std::string made = read_file(path(e.figure())), before = fs::exists(stored) ? read_file(stored) : "";
    const bool planned =
        e.arguments.starts_with("report --") && e.arguments.find("--figure memory") == std::string::npos;
    const auto [left, right] = std::pair(count_elements(before), count_elements(made));
    if (planned ? made == before : left == right) return;
    if (update) write_file(stored, made);
    if (update || (!planned && !OnTwoCores().are_there())) return;
    ADD_FAILURE() << e.figure() << " is not what tessera " << e.arguments << " draws";
    for (const auto& [part, times] : left)
      if (const auto found = right.find(part); found == right.end() || found->second != times)
        ADD_FAILURE() << times << " times " << part << ", now " << (found == right.end() ? 0 : found->second);
  }

  // The output of the example; `shown` is the page's version of it.
  Lines printed(const Example& e, const Lines& shown) const {
    if (e.program == "cat") {
      std::ofstream file(path(e.arguments));
      for (const std::string& line : shown) file << line << '\n';
      return shown;
    }
    const OnTwoCores two;
    const fs::path sibling = fs::path(TESSERA_BINARY).parent_path() / e.program;
    const Ran r = run_program(sibling.string(), e.arguments);
    if (!e.shows()) {
      EXPECT_EQ(r.status, 0) << e.arguments << ": " << r.err;
    }
    const Lines all = to_lines(r.out + r.err);
    return e.leaves_out() ? left_out(shown, all) : all;
  }
};

TEST_F(DocsTest, PagesQuoteActualOutput) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "many times slower with sanitizers, and tests/verify runs the same there";
#endif
  const bool update = std::getenv("TESSERA_UPDATE_DOCS") != nullptr;
  size_t count = 0, number = 0;
  for (const fs::path& page : pages()) {
    if (!test::is_selected(number++, 3)) continue;
    Lines text = to_lines(read_file(page));
    std::vector<Example> examples;
    ASSERT_NO_THROW(examples = find_examples(text)) << to_string(page);
    count += examples.size();
    std::vector<Lines> found;
    size_t figures = 0;
    for (const Example& e : examples) {
      const Lines shown(text.begin() + static_cast<std::ptrdiff_t>(e.begin),
                        text.begin() + static_cast<std::ptrdiff_t>(e.end));
      found.push_back(printed(e, shown));
      if (!e.figure().empty()) check_figure(e, page, text, update), ++figures;
      if (update || !e.shows() || (e.is_report() && !OnTwoCores().are_there())) continue;
      if (const std::string wrong = Difference(e.is_report()).between(shown, found.back(), e.begin + 1); !wrong.empty())
        ADD_FAILURE() << to_string(page) << ":" << wrong << "\nby " << e.program << " " << e.arguments;
    }
    if (page.parent_path().filename() == "strategies") {
      EXPECT_GE(figures, 1U) << to_string(page) << " shows no figure";
    }
    if (!update) continue;
    for (size_t i = examples.size(); i-- > 0;) {  // from the end, since line numbers change
      if (!examples[i].shows()) continue;
      const auto begin = text.begin() + static_cast<std::ptrdiff_t>(examples[i].begin),
                 end = text.begin() + static_cast<std::ptrdiff_t>(examples[i].end);
      text.insert(text.erase(begin, end), found[i].begin(), found[i].end());
    }
    std::ofstream out(page);
    for (const std::string& line : text) out << line << '\n';
  }
  EXPECT_GE(count, 4U);
}

TEST(Docs, QuotedCodeMatchesSource) {
  size_t count = 0;
  for (const fs::path& page : pages())
    for (const auto& [file, lines] : find_quotes(to_lines(read_file(page)))) {
      ++count;
      const fs::path path = fs::path(TESSERA_SOURCE_DIR) / file;
      ASSERT_TRUE(fs::exists(path)) << to_string(page) << ": there is no " << file;
      const Lines code = to_lines(read_file(path));
      EXPECT_NE(std::search(code.begin(), code.end(), lines.begin(), lines.end()), code.end())
          << to_string(page) << ": " << file << " no longer has these lines:\n"
          << fmt::format("{}", fmt::join(lines, "\n"));
    }
  EXPECT_GE(count, 1U);
}

TEST(Docs, LinksResolveToFiles) {
  size_t count = 0;
  for (const fs::path& page : pages())
    for (const auto& [target, line] : find_links(to_lines(read_file(page)))) {
      ++count;
      EXPECT_TRUE(fs::exists(page.parent_path() / target))
          << to_string(page) << ":" << line << ": there is no " << target;
    }
  EXPECT_GE(count, 8U);
}

TEST(Docs, CheckDetectsOutdatedOutput) {
  const Lines page = to_lines("text\n```console\n$ ./tessera verify --ranks 2\n```\n\n```\na  1\n```\nmore\n");
  const std::vector<Example> examples = find_examples(page);
  ASSERT_EQ(examples.size(), 1U);
  EXPECT_EQ(std::tie(examples[0].program, examples[0].arguments), std::tuple("tessera", "verify --ranks 2"));
  EXPECT_EQ(std::tie(examples[0].begin, examples[0].end), std::tuple(6U, 7U));
  for (const char* other : {"$ ls", "$ ./tessera train", "$ ./tessera report runs/a"})
    EXPECT_TRUE(find_examples({"```console", other, "```"}).empty()) << other;
  EXPECT_EQ(find_examples({"```console", "$ cat a.txt", "```", "```", "text", "```"}).at(0).program, "cat");
  EXPECT_EQ(find_examples({"```console", "$ build/release/bin/schedules 4 8", "```", "```", "```"}).at(0).arguments,
            "4 8");
  EXPECT_EQ(find_quotes({"```cpp", "// nn/a.h", "int b;", "```", "```cpp", "int c;", "```"}),
            (std::vector<std::pair<std::string, Lines>>{{"nn/a.h", {"int b;"}}}));
  EXPECT_THROW(find_examples({"```console", "$ tessera verify", "```", "text"}), std::runtime_error);
  EXPECT_THROW(find_examples({"```console", "$ tessera verify", "$ ls", "```", "```", "```"}), std::runtime_error);
  const auto same = [](const Lines& a, const Lines& b) { return Difference().between(a, b, 1).empty(); };
  EXPECT_TRUE(same({"dp  1920 ok"}, {"  dp 1920  ok"}));
  EXPECT_FALSE(same({"dp 1920 ok"}, {"dp 1921 ok"}));
  EXPECT_FALSE(same({"a", "b"}, {"a"}));
  EXPECT_TRUE(same({"loss 4.1799 -> 2.8294; same"}, {"loss 4.1802 -> 2.8301; same"}));
  EXPECT_FALSE(same({"loss 4.1799 -> 2.8294; same"}, {"loss 4.1799 -> 2.8494; same"}));
  const auto same_row = [&](const char* heading, const char* a, const char* b) {
    return same({heading, a}, {heading, b});
  };
  EXPECT_TRUE(same_row("rank held peak", "0 100 1000 ok", "0 100 1090 ok"));
  EXPECT_TRUE(same_row("rank held peak bound bytes", "0 100 ok 1000 900 ok", "0 100 ok 1090 950 ok"));
  EXPECT_FALSE(same_row("rank held peak bound bytes", "0 100 ok 1000 ok", "0 101 ok 1000 ok"));
  for (const auto& [a, b] : {std::pair{"0 100 ok 1000", "0 100 WRONG 1000"},
                             {"0 100 1000 ok", "0 100 1200 ok"},
                             {"0 100 1000 ok", "0 101 1000 ok"}})
    EXPECT_FALSE(same_row("rank held peak", a, b)) << b;
  EXPECT_TRUE(same({"relative: loss 1e-9, all 1e-6 (norm.bias)"}, {"relative: loss 0, all 2e-6 (tokens.weight)"}));
  EXPECT_TRUE(same({"bound 1e-6; the rest: same"}, {"bound 2e-6; the rest: same"}));
  EXPECT_FALSE(same({"bound 1e-6; the rest: same"}, {"bound 1e-6; the rest: differs"}));
}

TEST(Docs, CheckDetectsOutdatedOutputOfReports) {
  const std::vector<Example> examples =
      find_examples({"```console", "$ ./tessera train --pp 2 --trace --out runs/a", "```", "text", "```console",
                     "$ ./tessera report runs/a --format text", "```", "```", "out", "```"});
  ASSERT_EQ(examples.size(), 2U);
  EXPECT_TRUE(!examples[0].shows() && examples[1].shows() && examples[1].is_report() && examples[1].begin == 8);
  const Lines page = {"```console", "$ ./tessera report runs/a --figure timeline --svg --out a.svg", "```", "text"};
  const std::vector<Example> random_page = find_examples(page);
  EXPECT_TRUE(random_page.size() == 1 && random_page[0].figure() == "a.svg" && !random_page[0].shows());
  const auto structure = [](const std::string& part) { return count_elements("<svg>\n" + part + "</svg>"); };
  EXPECT_EQ(structure("<rect class=\"k-F\" x=\"1\"><title>0F0, forward, from 1 ms</title></rect>"),
            structure("<rect class=\"k-F\" x=\"2\"><title>0F0, forward, from 3.5 ms</title></rect>"));
  EXPECT_NE(structure("<rect class=\"k-F\" x=\"1\"><title>0F0, forward, x</title></rect>"), structure(""));
  EXPECT_NE(structure("<text class=\"end\" x=\"1\">computing</text>"),
            structure("<text class=\"end\" x=\"1\">dp</text>"));
  EXPECT_NE(structure(".k-F { fill: #123456; }\n"), structure(".k-F { fill: #123457; }\n"));
  const auto same = [](const Lines& a, const Lines& b) { return Difference(true).between(a, b, 1).empty(); };
  EXPECT_TRUE(same({"step 7, the median of 9, took 1.234 ms"}, {"step 8, the median of 9, took 12.345 ms"}));
  EXPECT_FALSE(same({"step 7, the median of 9, took 1.234 ms"}, {"step 8, the median of 8, took 1.234 ms"}));
  const std::string send = "pp send 8 4096 1.234 99";
  for (const auto& [a, b] : {std::pair<std::string, std::string>{"measured 20.1%", "measured 30.4%"},
                             {"       |.C.|", "       |...|"},
                             {send, "pp send 8 4096 0.034 99"}})
    EXPECT_TRUE(same({a}, {b})) << b;
  for (const auto& [a, b] : {std::pair<std::string, std::string>{"measured 20.1%", "measured null"},
                             {"planned 20.1%", "planned 30.4%"},
                             {"formula 20.1%", "formula 30.4%"},
                             {"rank 0 |FF.|", "rank 0 |...|"},
                             {"       |.C.|", "       |..|"},
                             {send, "pp send 8 4095 1.234 99"}})
    EXPECT_FALSE(same({a}, {b})) << b;
  for (const char* other : {"rank 0 |F0-..B0-|", "rank 0 |F0-..B0|", "rank 1 |F0-B0-..|", "rank 0 |........|"})
    EXPECT_EQ(same({"measured: it", "rank 0 |F0-B0-..|"}, {"measured: it", other}), std::string(other).ends_with("-|"))
        << other;
  EXPECT_FALSE(same({"planned: it", "rank 0 |F0-B0-..|"}, {"planned: it", "rank 0 |F0-..B0-|"}));
  EXPECT_TRUE(same({"rank parameters peak", "0 100 1000000"}, {"rank parameters peak", "0 100 1050000"}));
  EXPECT_FALSE(same({"rank parameters peak", "0 100 1000000"}, {"rank parameters peak", "0 101 1000000"}));
}

TEST(Docs, CheckAllowsOmittedLines) {
  const Lines found = {"a 1", "b 2", "- x 1", "- y 2", "end"};
  EXPECT_EQ(left_out({"a 1", "...", "- y 2", "..."}, found), (Lines{"a 1", "...", "- y 2", "..."}));
  EXPECT_EQ(left_out({"a 1", "...", "- y 3", "..."}, found), (Lines{"a 1", "...", "- y 2", "..."}));
  EXPECT_EQ(left_out({"...", "- z 2", "end"}, found), (Lines{"..."}));
  EXPECT_EQ(left_out({"a 1", "..."}, found), (Lines{"a 1", "..."}));
  EXPECT_EQ(left_out({"a 1", "b 2"}, found), found);
}

TEST(Docs, FindsRelativeLinksOutsideCode) {
  EXPECT_EQ(find_links({"[a](b.md) `[c](d.md)` [e](f.md#g)", "```", "[h](i.md)", "```", "[j](https://k) [l](#m)"}),
            (std::vector<std::pair<std::string, size_t>>{{"b.md", 1}, {"f.md", 1}}));
}

// The page on fine-tuning: its commands run in order in a directory with the files it names, and print what the page
// shows, except for numbers.

// Numbers may differ between machines, and so may generated text and column widths.
std::string without_numbers(const std::string& line) {
  const std::regex number("[0-9][0-9.e+-]*|two|three|four|five|six|seven|eight");
  return std::regex_replace(std::regex_replace(line, number, "#"), std::regex(" +"), " ");
}

TEST(FineTuningPage, QuotesActualOutput) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "many times slower with sanitizers";
#endif
  if (!test::is_selected(0, 3)) GTEST_SKIP() << "takes a minute; TESSERA_DRAW selects every third run";
  const fs::path source = TESSERA_SOURCE_DIR;
  const TemporaryDirectory directory(fs::temp_directory_path() / "tessera-page-");
  fs::create_directory_symlink(source / "examples", directory.path() / "examples");
  fs::create_symlink(source / "README.md", directory.path() / "README.md");
  fs::create_symlink(TESSERA_BINARY, directory.path() / "tessera");
  const Lines page = to_lines(read_file(source / "docs/fine_tuning.md"));
  size_t commands = 0;
  for (size_t i = 0; i + 2 < page.size(); ++i) {
    if (page[i] != "```console") continue;
    ASSERT_TRUE(page[i + 1].starts_with("$ ./tessera ")) << page[i + 1];
    const std::string command = page[i + 1].substr(2);
    const int status = std::system(
        fmt::format("cd '{}' && TESSERA_CACHE=cache {} > out.txt 2> err.txt", directory.path().string(), command)
            .c_str());
    ASSERT_EQ(status, 0) << command << "\n" << read_file(directory.path() / "err.txt");
    ++commands;
    if (page[i + 3] != "```") continue;
    Lines shown;
    size_t at = i + 4;
    for (; page[at] != "```"; ++at) shown.push_back(without_numbers(page[at]));
    Lines found;
    for (const std::string& line : to_lines(read_file(directory.path() / "out.txt")))
      found.push_back(without_numbers(line));
    EXPECT_EQ(shown, left_out(shown, found)) << command;
    i = at;
  }
  EXPECT_GE(commands, 9u);
}

}  // namespace
}  // namespace tessera
