// Holds the pages to the programs: what a page says that a command prints is what it prints, code that a page quotes is
// the code of its file, and links lead to files.
//
//   ```console
//   $ ./tessera verify --ranks 4
//   ```
//   ```
//   what it printed
//   ```
//
// The commands are `./tessera verify`, `build/release/bin/schedules`, and `cat FILE`, whose block becomes that file for
// the page's later commands. Of a block of C++ that begins with a line `// path`, all other lines stand together in
// that file.
//
// Spaces do not count, numbers do; but a loss may be 0.01 away and a peak of memory 10%, and the rounding of sums may
// be anything, since processors multiply matrices in different ways. TESSERA_UPDATE_DOCS=1 writes what is printed into
// the pages instead.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <regex>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "data/files.h"
#include "tests/app/program.h"

namespace tessera {
namespace {

using Lines = std::vector<std::string>;

Lines lines_of(const std::string& text) {
  Lines out;
  std::istringstream in(text);
  for (std::string line; std::getline(in, line);) out.push_back(line);
  while (!out.empty() && out.back().empty()) out.pop_back();
  return out;
}

Lines words_of(const std::string& line) {
  Lines out;
  std::istringstream in(line);
  for (std::string word; in >> word;) out.push_back(word);
  return out;
}

bool is_fence(const std::string& line) { return line.starts_with("```"); }

// A command of a page, and the lines [begin, end) that it is said to print; lines are counted from 0.
struct Example {
  std::string program, arguments;
  size_t begin = 0, end = 0;
};

// Throws std::runtime_error for a command without a block of output.
std::vector<Example> examples_of(const Lines& page) {
  static const std::regex command(R"(\$ (?:\./|build/release/bin/)?(tessera(?= verify)|schedules|cat) (.*))");
  std::vector<Example> out;
  std::smatch match;
  for (size_t i = 0; i + 1 < page.size(); ++i) {
    if (page[i] != "```console" || !std::regex_match(page[i + 1], match, command)) continue;
    size_t at = i + 3;
    if (at > page.size() || page[i + 2] != "```")
      throw std::runtime_error(fmt::format("{}: expected one command in the block", i + 1));
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
std::vector<std::pair<std::string, Lines>> quotes_of(const Lines& page) {
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

bool within(const std::string& a, const std::string& b, double absolute, double relative) {
  char *end_a = nullptr, *end_b = nullptr;
  const double x = std::strtod(a.c_str(), &end_a), y = std::strtod(b.c_str(), &end_b);
  if (end_a == a.c_str() || std::string(end_a) != std::string(end_b)) return false;
  return std::abs(x - y) <= absolute + relative * std::max(std::abs(x), std::abs(y));
}

// Compares output line by line; knows in which columns of a table the peaks and their bounds are.
class Difference {
 public:
  // What is wrong with `found`, in one line; empty if nothing is.
  std::string between(const Lines& expected, const Lines& found, size_t first_line) {
    for (size_t i = 0; i < std::max(expected.size(), found.size()); ++i) {
      const std::string e = i < expected.size() ? expected[i] : "(no more)", f = i < found.size() ? found[i] : "(ends)";
      if (!same(words_of(e), words_of(f)))
        return fmt::format("{}: the page has\n  {}\nfound\n  {}", first_line + i, e, f);
    }
    return "";
  }

 private:
  bool same(const Lines& e, const Lines& f) {
    if (e.size() != f.size()) return false;
    if (e.empty()) return true;
    if (e[0] == "rank") columns_ = e;
    const bool is_loss = e[0] == "loss", is_rounding = e[0].starts_with("relative") || e[0] == "bound";
    size_t marks = 0;  // before the word: they have no name in the heading
    for (size_t w = 0; w < e.size(); ++w) {
      marks += e[w] == "ok" ? 1 : 0;
      const std::string column = w - marks < columns_.size() ? columns_[w - marks] : "";
      const bool is_memory = column == "peak" || column == "bound";
      if (e[w] != f[w] && !(is_loss && within(e[w], f[w], 0.01, 0)) && !(is_memory && within(e[w], f[w], 0, 0.1)) &&
          !(is_rounding && is_figure(e[w])))
        return false;
    }
    return true;
  }
  // A number, or the name of the tensor that is farthest from the oracle's.
  static bool is_figure(const std::string& word) {
    return word[0] == '(' || word.find_first_of("0123456789") != std::string::npos;
  }
  Lines columns_;
};

std::vector<std::filesystem::path> pages() {
  const std::filesystem::path root = TESSERA_SOURCE_DIR;
  std::vector<std::filesystem::path> out = {root / "README.md"};
  for (const auto& entry : std::filesystem::recursive_directory_iterator(root / "docs"))
    if (entry.path().extension() == ".md") out.push_back(entry.path());
  std::sort(out.begin(), out.end());
  return out;
}

std::string name_of(const std::filesystem::path& page) {
  return page.lexically_relative(TESSERA_SOURCE_DIR).generic_string();
}

// Where the links of a page lead, with their lines; not those to other sites, nor within the page.
std::vector<std::pair<std::string, size_t>> links_of(const Lines& page) {
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

class DocsTest : public test::ProgramTest {
 protected:
  // What the example prints; `shown` is what the page says.
  Lines printed(const Example& e, const Lines& shown) const {
    if (e.program == "cat") {
      std::ofstream file(path(e.arguments));
      for (const std::string& line : shown) file << line << '\n';
      return shown;
    }
    const std::filesystem::path beside = std::filesystem::path(TESSERA_BINARY).parent_path() / e.program;
    const test::Ran r = run_program(beside.string(), e.arguments);
    return lines_of(r.out + r.err);
  }
};

TEST_F(DocsTest, PagesShowWhatIsPrinted) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "many times slower with sanitizers, and tests/verify runs the same there";
#endif
  const bool update = std::getenv("TESSERA_UPDATE_DOCS") != nullptr;
  size_t count = 0;
  for (const std::filesystem::path& page : pages()) {
    Lines text = lines_of(read_file(page));
    std::vector<Example> examples;
    ASSERT_NO_THROW(examples = examples_of(text)) << name_of(page);
    count += examples.size();
    std::vector<Lines> found;
    for (const Example& e : examples) {
      const Lines shown(text.begin() + static_cast<std::ptrdiff_t>(e.begin),
                        text.begin() + static_cast<std::ptrdiff_t>(e.end));
      found.push_back(printed(e, shown));
      if (update) continue;
      if (const std::string wrong = Difference().between(shown, found.back(), e.begin + 1); !wrong.empty())
        ADD_FAILURE() << name_of(page) << ":" << wrong << "\nby " << e.program << " " << e.arguments;
    }
    if (!update) continue;
    for (size_t i = examples.size(); i-- > 0;) {  // from the end, since lines move
      const auto begin = text.begin() + static_cast<std::ptrdiff_t>(examples[i].begin),
                 end = text.begin() + static_cast<std::ptrdiff_t>(examples[i].end);
      text.insert(text.erase(begin, end), found[i].begin(), found[i].end());
    }
    std::ofstream out(page);
    for (const std::string& line : text) out << line << '\n';
  }
  EXPECT_GE(count, 8U);
}

TEST(Docs, QuotedCodeIsInItsFile) {
  size_t count = 0;
  for (const std::filesystem::path& page : pages())
    for (const auto& [file, lines] : quotes_of(lines_of(read_file(page)))) {
      ++count;
      const std::filesystem::path path = std::filesystem::path(TESSERA_SOURCE_DIR) / file;
      ASSERT_TRUE(std::filesystem::exists(path)) << name_of(page) << ": there is no " << file;
      const Lines code = lines_of(read_file(path));
      EXPECT_NE(std::search(code.begin(), code.end(), lines.begin(), lines.end()), code.end())
          << name_of(page) << ": " << file << " has not these lines any more:\n"
          << fmt::format("{}", fmt::join(lines, "\n"));
    }
  EXPECT_GE(count, 1U);
}

TEST(Docs, LinksLeadToFiles) {
  size_t count = 0;
  for (const std::filesystem::path& page : pages())
    for (const auto& [target, line] : links_of(lines_of(read_file(page)))) {
      ++count;
      EXPECT_TRUE(std::filesystem::exists(page.parent_path() / target))
          << name_of(page) << ":" << line << ": there is no " << target;
    }
  EXPECT_GE(count, 8U);
}

TEST(Docs, DifferencesAreSeen) {
  const Lines page = lines_of("text\n```console\n$ ./tessera verify --ranks 2\n```\n\n```\na  1\n```\nmore\n");
  const std::vector<Example> examples = examples_of(page);
  ASSERT_EQ(examples.size(), 1U);
  EXPECT_EQ(examples[0].program, "tessera");
  EXPECT_EQ(examples[0].arguments, "verify --ranks 2");
  EXPECT_EQ(examples[0].begin, 6U);
  EXPECT_EQ(examples[0].end, 7U);
  EXPECT_TRUE(examples_of({"```console", "$ ls", "```"}).empty());
  EXPECT_TRUE(examples_of({"```console", "$ ./tessera train", "```"}).empty());
  EXPECT_EQ(examples_of({"```console", "$ cat a.txt", "```", "```", "text", "```"}).at(0).program, "cat");
  EXPECT_EQ(examples_of({"```console", "$ build/release/bin/schedules 4 8", "```", "```", "```"}).at(0).arguments,
            "4 8");
  EXPECT_EQ(quotes_of({"```cpp", "// nn/a.h", "int b;", "```", "```cpp", "int c;", "```"}),
            (std::vector<std::pair<std::string, Lines>>{{"nn/a.h", {"int b;"}}}));
  EXPECT_THROW(examples_of({"```console", "$ tessera verify", "```", "text"}), std::runtime_error);
  EXPECT_THROW(examples_of({"```console", "$ tessera verify", "$ ls", "```", "```", "```"}), std::runtime_error);
  const auto same = [](const Lines& a, const Lines& b) { return Difference().between(a, b, 1).empty(); };
  EXPECT_TRUE(same({"dp  1920 ok"}, {"  dp 1920  ok"}));
  EXPECT_FALSE(same({"dp 1920 ok"}, {"dp 1921 ok"}));
  EXPECT_FALSE(same({"a", "b"}, {"a"}));
  EXPECT_TRUE(same({"loss 4.1799 -> 2.8294; same"}, {"loss 4.1802 -> 2.8301; same"}));
  EXPECT_FALSE(same({"loss 4.1799 -> 2.8294; same"}, {"loss 4.1799 -> 2.8494; same"}));
  EXPECT_TRUE(same({"rank held peak", "0 100 1000 ok"}, {"rank held peak", "0 100 1090 ok"}));
  EXPECT_TRUE(same({"rank held peak bound bytes", "0 100 ok 1000 900 ok"},
                   {"rank held peak bound bytes", "0 100 ok 1090 950 ok"}));
  EXPECT_FALSE(
      same({"rank held peak bound bytes", "0 100 ok 1000 ok"}, {"rank held peak bound bytes", "0 101 ok 1000 ok"}));
  EXPECT_FALSE(same({"rank held peak", "0 100 ok 1000"}, {"rank held peak", "0 100 WRONG 1000"}));
  EXPECT_TRUE(same({"relative: loss 1e-9, all 1e-6 (norm.bias)"}, {"relative: loss 0, all 2e-6 (tokens.weight)"}));
  EXPECT_TRUE(same({"bound 1e-6; the rest: same"}, {"bound 2e-6; the rest: same"}));
  EXPECT_FALSE(same({"bound 1e-6; the rest: same"}, {"bound 1e-6; the rest: differs"}));
  EXPECT_FALSE(same({"rank held peak", "0 100 1000 ok"}, {"rank held peak", "0 100 1200 ok"}));
  EXPECT_FALSE(same({"rank held peak", "0 100 1000 ok"}, {"rank held peak", "0 101 1000 ok"}));
}

TEST(Docs, LinksAreFound) {
  const auto links =
      links_of({"[a](b.md) `[c](d.md)` [e](f.md#g)", "```", "[h](i.md)", "```", "[j](https://k) [l](#m)"});
  ASSERT_EQ(links.size(), 2U);
  EXPECT_EQ(links[0].first, "b.md");
  EXPECT_EQ(links[1].first, "f.md");
}

}  // namespace
}  // namespace tessera
