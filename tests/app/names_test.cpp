// Names on pages and in comments exist: files, tests, options, commands and faults. Ratios stated on pages follow from
// the schedules and the closed forms.
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <regex>
#include <set>
#include <string>
#include <tuple>
#include <vector>

#include "app/report/report.h"
#include "parallel/pipeline/schedules.h"
#include "parallel/pipeline/simulate.h"
#include "tests/app/program.h"
#include "tests/conventions/sources.h"

namespace tessera {
namespace {

using conventions::first_groups;
using conventions::Source;
using Set = std::set<std::string>;

// Options and files of other programs, of scripts used for dated measurements, and of examples.
const std::string kOthers =
    " --build --expert-model-parallel-size --gpus --gtest_filter --install --ipc --mca --mpi --network --no-deps "
    "--preset "
    "--rm --shm-size --stat --stop-timeout --target --test-dir --variant --wait --wrap preserve_rng_state llama.cpp "
    "compare.py modeling_rope_utils.py qlinear_cuda_old.py tokenization_auto.py train_gpt2.py "
    "--slack --large --flag --voices --off-key --lay to.h data/tinyshakespeare/input.txt "
    "data/texts/austen.txt ";

bool is_known(const Set& ours, const std::string& name) {
  return ours.contains(name) || kOthers.find(" " + name + " ") != std::string::npos;
}

bool is_page(const Source& s) {
  return s.path == "README.md" || (s.ends_with(".md") && (s.directory() == "docs" || s.path.starts_with("lab/pages/")));
}

// All existing paths, tests, options, commands and fault names.
class DocsNames : public ProgramTest {
 protected:
  DocsNames() {
    for (const Source& s : sources_) {
      paths_.insert(s.path);
      for (size_t at = 0; (at = s.path.find('/', at) + 1) > 0;) paths_.insert(s.path.substr(at));
      if (s.directory() == "tests" && (s.is_code())) add(tests_, s.text, R"(\bTEST(?:_F|_P)?\((\w+, *\n? *\w+)\))");
      // Options of scripts and examples: add_argument("--x"), --x) in a shell's case.
      if (s.ends_with(".py") || s.ends_with(".sh") || s.directory() == "examples")
        add(options_, s.text, R"(["'| (](--[a-z][a-z_-]*)["')])");
      if (s.path == "verify/diagnosis/diagnosis.cpp") add(faults_, s.text, R"re(\n    \{"([a-z-]+)",)re");
    }
    const Json described = Json::parse(must("describe --format json").out);
    for (const Json& command : described["commands"]) {
      commands_.insert(first_word(command["command"]));
      for (const Json& option : command["options"]) {
        options_.insert("--" + option["name"].get<std::string>());
        for (const Json& choice : option.value("choices", Json::array())) faults_.insert(choice);
      }
    }
    for (const std::string& name : schedule_names()) faults_.insert(name);
    for (const std::string& line : test::to_lines(must("verify --defect list").out)) faults_.insert(first_word(line));
  }
  static std::string first_word(const std::string& text) { return text.substr(0, text.find(' ')); }
  static void add(Set& to, const std::string& text, const char* pattern) {
    for (std::string name : first_groups(text, std::regex(pattern))) {
      std::erase_if(name, [](char c) { return std::isspace(static_cast<unsigned char>(c)); });
      to.insert(name);
    }
  }

  // Nonexistent names in a code span, a command or a comment, separated by blanks.
  std::string unknown(const std::string& text) const {
    static const std::regex file(
        R"((?:^|[^\w./$~<{*-])((?:[\w-]+/)*[\w.-]+\.(?:h|cpp|cuh?|py|sh|cmake|md|txt))(?![\w/*.-]\w))"),
        test(R"((?:^|[^\w:.])([A-Z]\w+\.[A-Z]\w*[a-z]\w*))"), option(R"((?:^|[^\w<-])(--[a-z][\w-]*)(?!\w|-*>))"),
        command(R"((?:^|`|\$ |\./)tessera ([a-z]+))"), fault("--defect[ =]([a-z-]+)"), clone("git clone (\\S+ ?\\w*)"),
        stem(R"((?:^|[^\w/.-])([a-z_]+_test)(?![\w.]))");
    std::string out;
    const auto check = [&](const std::regex& form, const auto& exists) {
      for (const std::string& name : first_groups(text, form))
        if (name.find("NAME") == std::string::npos && !exists(name)) out += name + " ";
    };
    check(file, [&](const std::string& name) {
      // Text files without a directory belong to a run or to the reader.
      const bool ours = name.find('/') == std::string::npos ? !name.ends_with(".txt") && !name.ends_with(".md")
                                                            : fs::is_directory(root_ / name.substr(0, name.find('/')));
      return !ours || is_known(paths_, name);
    });
    check(clone, [&](const std::string& name) { return name == "URL tessera"; });  // the README explains URL
    check(stem, [&](const std::string& name) { return paths_.contains(name + ".cpp"); });
    check(test, [&](std::string name) { return tests_.contains(name.replace(name.find('.'), 1, ",")); });
    if (text.find("-->") == std::string::npos)  // an arrow with a label
      check(option,
            [&](const std::string& name) { return is_known(options_, name) || name.starts_with("--benchmark_"); });
    check(command, [&](const std::string& name) { return commands_.contains(name); });
    check(fault, [&](const std::string& name) { return faults_.contains(name); });
    return out;
  }
  // In sections "What breaks" and in the table of symptoms, every hyphenated name is that of a fault.
  std::string unknown_faults(const std::string& section) const {
    std::string out;
    for (const std::string& name : first_groups(section, std::regex("`([a-z]+(?:[_-][a-z]+)+)`")))
      if (!is_known(faults_, name)) out += name + " ";
    return out;
  }

  const fs::path root_ = TESSERA_SOURCE_DIR;
  const std::vector<Source> sources_ = conventions::all_sources(root_, {});
  Set paths_, tests_, options_ = {"--help", "--version"}, commands_ = {"test", "schedules"},
                      faults_ = {"list", "random"};
};

TEST_F(DocsNames, NamesOnPagesExist) {
  size_t pages = 0;
  for (const Source& page : sources_) {
    if (!is_page(page)) continue;
    ++pages;
    bool fenced = false, breaks = false;
    size_t number = 0;
    for (const std::string& line : test::to_lines(page.text)) {
      const std::string where = fmt::format("{}:{}", page.path, ++number);
      if (line.starts_with("```")) fenced = !fenced;
      if (line.starts_with("## ")) breaks = line == "## What breaks" || line == "## Symptoms and causes";
      if (fenced) {
        if (line.starts_with("$ ") || line.starts_with("./tessera ") || line.starts_with("git ")) {
          EXPECT_EQ(unknown(line), "") << where;
        }
        continue;
      }
      for (const std::string& span : first_groups(line, std::regex("`([^`]+)`"))) EXPECT_EQ(unknown(span), "") << where;
      if (breaks) {
        EXPECT_EQ(unknown_faults(line), "") << where;
      }
    }
  }
  EXPECT_GE(pages, 60U);
}

TEST_F(DocsNames, NamesInCommentsExist) {
  for (const Source& source : sources_) {
    const bool hash = source.ends_with(".py") || source.ends_with(".sh") || source.ends_with(".cmake");
    if (!source.is_code() && !hash) continue;
    for (const std::string& comment : first_groups(source.text, std::regex(hash ? "\n *#([^\n]*)" : "[\n ]//([^\n]*)")))
      if (source.path != "tests/app/names_test.cpp") {
        EXPECT_EQ(unknown(comment), "") << source.path << ":" << comment;
      }
  }
}

TEST_F(DocsNames, CheckDetectsUnknownNames) {
  for (const char* known :
       {"tests/app/names_test.cpp", "names_test.cpp", "DocsNames.NamesOnPagesExist", "$ ./tessera train --lr 1",
        "x --embed--> y", "ReduceOp.SUM", "metrics.jsonl", "--defect stale-part", "runs/a.txt", "parallel/NAME.cpp",
        "transformer.h.0.attn", "bench/pack.sh --double"})
    EXPECT_EQ(unknown(known), "") << known;
  for (const auto& [text, name] : std::map<std::string, std::string>{{"tests/app/gone.cpp", "tests/app/gone.cpp"},
                                                                     {"see gone_test.cpp:", "gone_test.cpp"},
                                                                     {"gone_test", "gone_test"},
                                                                     {"git clone https://gone", "https://gone"},
                                                                     {"DocsNames.AreGone", "DocsNames.AreGone"},
                                                                     {"tessera train --gone 3", "--gone"},
                                                                     {"./tessera gone --lr 1", "gone"},
                                                                     {"verify --defect gone", "gone"}})
    EXPECT_EQ(unknown(text), name + " ");
  EXPECT_EQ(unknown_faults("`drop_reduction`, `stale-part`, `zb-v`, `wrong_mask`"), "drop_reduction wrong_mask ");
}

// Bytes of these operations in a step of a plan, on the busiest rank.
double busiest(const Args& plan, const Set& operations) {
  double sum = 0;
  for (const auto& s : report::planned(plan).at(0).sent)
    if (operations.contains(s.operation)) sum += static_cast<double>(s.busiest);
  return sum;
}

// Bubble time or maximum number of micro-batches in flight, relative to 1f1b.
double ratio_to_1f1b(const std::string& name, int ranks, bool memory) {
  const auto measured = [&](const std::string& schedule) {
    const Simulation s = simulate(make_schedule(schedule, ranks, 6 * ranks));
    return memory ? std::ranges::max(s.in_flight) / static_cast<double>(s.schedule.chunks())
                  : s.bubble_fraction() * s.makespan / s.schedule.chunks();
  };
  return measured(name) / measured("1f1b");
}

TEST(DocsRatios, MatchClosedFormsAndSchedules) {
  const auto dp = [](const char* n) {
    return busiest({{"ranks", n}, {"batch", n}, {"dp-mode", "dataparallel"}}, {"broadcast", "scatter"});
  };
  const auto sums = [](const char* by) { return busiest({{"ranks", "4"}, {"all-reduce", by}}, {"all_reduce"}); };
  const std::string strategies = "docs/strategies/";
  const std::tuple<std::string, const char*, double, double> rows[] = {
      {strategies + "data-parallel.md", "three times from 2 to 4 ranks,", dp("4") / dp("2"), 3},
      {strategies + "data-parallel.md", "2.14 times from 8 to 16.", dp("16") / dp("8"), 2.14},
      {"docs/course.md", "The busiest rank of the tree sends a third more.", sums("tree") / sums("ring"), 4 / 3.0},
      {strategies + "zero_bubble.md", "it waits a third as long as 1F1B.", ratio_to_1f1b("zb-h1", 4, false), 1 / 3.0},
      {strategies + "zero_bubble.md", "it has half of the memory,", ratio_to_1f1b("v-min", 8, true), 0.5},
      {strategies + "zero_bubble.md", "and waits 64% as long.", ratio_to_1f1b("v-min", 8, false), 0.64},
      {strategies + "zero_bubble.md", "it has 62% of the memory,", ratio_to_1f1b("v-half", 8, true), 0.62},
      {strategies + "zero_bubble.md", "and waits 52% as long.", ratio_to_1f1b("v-half", 8, false), 0.52}};
  for (const auto& [page, statement, found, stated] : rows) {
    EXPECT_NE(read_file(fs::path(TESSERA_SOURCE_DIR) / page).find(statement), std::string::npos) << statement;
    EXPECT_NEAR(found, stated, 0.0051) << statement;
  }
}

TEST(DocsRatios, ParsesRatios) {
  const std::regex vague("a\\s(?:little|bit)\\s(?:more|less|fewer)|the\\sfewest\\ssteps");
  for (const Source& page : conventions::all_sources(TESSERA_SOURCE_DIR, {".md"}))
    if (is_page(page)) {
      EXPECT_EQ(conventions::matches(page.text, vague).size(), 0U) << page.path;
    }
}

}  // namespace
}  // namespace tessera
