// `train --trace` and `tessera report`: what the files say of a run is held against each other and against the run.

#include "app/commands.h"
#include "app/report/drawing.h"
#include "app/trace/timeline.h"
#include "tests/app/program.h"
#include "tests/app/report_checks.h"
#include "tests/app/timeline_checks.h"

namespace tessera {
namespace {
namespace fs = std::filesystem;
using Json = nlohmann::json;
using test::Ran;

const std::string kTiny =
    "--data text.txt --layers 2 --heads 2 --channels 16 --context 8 --batch 8 --steps 3 --warmup 1 --lr 0.01 "
    "--threads-per-rank 1 --quiet ";

struct TracedPlan {
  std::string options;
  int ranks;
  std::string name;
};
const std::vector<TracedPlan> kPlans = {{"--pp 2 --dp 1 --microbatches 4 ", 2, "1f1b"},
                                        {"--pp 2 --dp 1 --microbatches 4 --schedule zb-h1 ", 2, "zb-h1"},
                                        {"--pp 2 --tp 2 --dp 2 --microbatches 2 ", 8, "1f1b"},
                                        {"--tp 2 --dp 2 --zero 3 --microbatches 2 ", 4, "one stage"},
                                        {"--cp 2 --dp 1 ", 2, "one stage"},
                                        {"--ranks 1 ", 1, "one stage"}};

class ReportTest : public test::ProgramTest {
 protected:
  void expect_trained(const std::string& more, const std::string& out) const {
    const Ran r = run("train " + kTiny + "--trace " + more + " --out " + out);
    ASSERT_EQ(r.status, 0) << more << r.err;
  }
  Json json(const std::string& file) const { return Json::parse(read_file(path(file))); }
};

TrainOptions options_of(const std::string& more) {
  std::istringstream in("tessera train " + kTiny + more);
  std::vector<std::string> words;
  for (std::string word; in >> word;) words.push_back(word);
  std::vector<const char*> argv;
  for (const std::string& word : words) argv.push_back(word.c_str());
  return std::get<TrainOptions>(parse_command_line(static_cast<int>(argv.size()), argv.data()));
}

// Bytes: what the text says of the step, and the whole run.
void expect_figures(const std::string& html, const std::string& text, const Json& report) {
  for (const Json& s : report["sent"]) {
    const std::string axis = s["axis"], operation = s["operation"];
    int64_t calls = 0, bytes = 0;
    if (const size_t row = text.find(fmt::format("\n{:<6} {:<15} ", axis, operation)); row != std::string::npos)
      std::istringstream(text.substr(row + 24, 40)) >> calls >> bytes;
    EXPECT_TRUE(std::regex_search(
        html,
        std::regex(fmt::format("<tr><td>{}</td><td>{}</td><td class=\"n\">{}</td><td class=\"n\">{}</td><td><svg.*\n?"
                               ".*</svg></td><td class=\"n\">{}</td><td class=\"n\">{}</td>",
                               axis == "dp+cp" ? "dp\\+cp" : axis, operation, report::grouped(calls),
                               report::grouped(bytes), report::grouped(s["calls"]), report::grouped(s["bytes"])))))
        << s << calls << " " << bytes;
  }
  for (const Json& rank : report["ranks"]) {
    std::string row = fmt::format("<tr><td>{}</td>", rank["name"].get<std::string>());
    for (const char* category : {"parameters", "gradients", "optimizer", "activations", "workspace", "communication"})
      row += fmt::format("<td class=\"n\">{}</td>", report::grouped(rank["peaks"][category]));
    row += fmt::format("<td class=\"all n\">{}</td></tr>", report::grouped(rank["peak_bytes"]));
    EXPECT_NE(html.find(row), std::string::npos) << row;
  }
}

TEST_F(ReportTest, EveryPlanLeavesATimelineThatTheReportDraws) {
  for (const TracedPlan& plan : kPlans) {
    SCOPED_TRACE(plan.options);
    fs::remove_all(path("run"));
    expect_trained(plan.options, "run");
    const Json trace = json("run/trace.json"), report = json("run/report.json");
    test::expect_tracks(trace, plan.ranks);
    test::expect_actions(trace, report);
    test::expect_bytes(trace, report, options_of(plan.options));
    test::expect_memory(trace, report);
    const Ran r = run("report run");
    ASSERT_EQ(r.status, 0) << r.err;
    EXPECT_EQ(r.out, "run/report.html\n");
    const std::string html = read_file(path("run/report.html"));
    test::expect_page(html);
    const bool pipeline = plan.name != "one stage";
    for (const char* id : {"run", "loss", "timeline", "memory", "bytes"})
      EXPECT_NE(html.find(fmt::format("<section id=\"{}\">", id)), std::string::npos) << id;
    EXPECT_EQ(html.find("<section id=\"pipeline\">") != std::string::npos, pipeline);
    EXPECT_EQ(html.find("Planned, measured times") != std::string::npos, pipeline);
    EXPECT_NE(html.find("prefers-color-scheme: dark"), std::string::npos);
    fs::remove(path("run/report.html"));
    const Ran told = run("report run --format text");
    ASSERT_EQ(told.status, 0) << told.err;
    test::expect_text(told.out, report, trace);
    expect_figures(html, told.out, report);
    EXPECT_FALSE(fs::exists(path("run/report.html")));
  }
}

TEST_F(ReportTest, BubblesAreThoseOfTheScheduleAndNullWhereCoresAreShared) {
  const auto numbers = [&](const std::string& threads) {
    fs::remove_all(path("run"));
    expect_trained("--pp 2 --dp 1 --microbatches 4 --threads-per-rank " + threads, "run");
    EXPECT_EQ(run("report run --out page.html").status, 0);
    EXPECT_FALSE(fs::exists(path("run/report.html")));
    const std::string html = read_file(path("page.html")), before = "id=\"numbers\">";
    const size_t begin = html.find(before) + before.size();
    return std::pair(Json::parse(html.substr(begin, html.find("</script>", begin) - begin)), html);
  };
  const size_t cores = describe_rank(*make_arena()).cores.size();
  const auto [shared, html] = numbers(fmt::format("{}", cores));
  EXPECT_NEAR(shared["bubble"]["formula"].get<double>(), 1.0 / 5, 1e-12);
  EXPECT_NEAR(shared["bubble"]["equal"].get<double>(), 1.0 / 5, 1e-9);
  EXPECT_TRUE(shared["bubble"]["measured"].is_null());
  EXPECT_NE(html.find("not meaningful here"), std::string::npos);
  EXPECT_NE(html.find(fmt::format("is not drawn: {} threads of ranks share {} cores", 2 * cores, cores)),
            std::string::npos);
  EXPECT_EQ(html.find("<h3>Measured, step"), std::string::npos) << "of which the text says that it is not drawn";
  const double replayed = shared["bubble"]["replayed"];
  EXPECT_GT(replayed, 0);
  EXPECT_LT(replayed, 1);
  const Json alone = numbers("1").first;
  const Json report = json("run/report.json");
  EXPECT_EQ(alone["bubble"]["measured"].is_null(), report["processors"]["shared"].get<bool>());
  EXPECT_EQ(report["processors"]["threads"], 2);
}

// A pass of all layers is one action; what it keeps is seen layer by layer.
TEST_F(ReportTest, ActivationsPileUpWithinAPass) {
  expect_trained("--ranks 2 --layers 4", "run");
  std::set<int64_t> held;
  double begin = 0, end = 0;
  const Json trace = json("run/trace.json");
  for (const Json& e : trace["traceEvents"])
    if (e["pid"] == 0 && e["ph"] == "X" && e["name"] == "0F0") begin = e["ts"], end = begin + e["dur"].get<double>();
  for (const Json& e : trace["traceEvents"])
    if (e["pid"] == 0 && e["ph"] == "C" && e["ts"] > begin && e["ts"] < end)
      held.insert(e["args"]["activations"].get<int64_t>());
  EXPECT_GE(held.size(), 4U);
}

TEST_F(ReportTest, OnlyTheLastStepsAreKept) {
  expect_trained("--steps 9 --trace-steps 2 --ranks 2", "run");
  const Json trace = json("run/trace.json");
  std::set<int64_t> steps;
  for (const Json& e : trace["traceEvents"])
    if (e["ph"] == "X") steps.insert(e["args"]["step"].get<int64_t>());
  EXPECT_EQ(steps, (std::set<int64_t>{8, 9}));
  EXPECT_EQ(trace["otherData"]["kept"], "steps 8 to 9 of 9");
  EXPECT_EQ(run("report run").status, 0);
}

TEST_F(ReportTest, AnInterruptedRunLeavesItsTimeline) {
  const pid_t child = start("train " + kTiny + "--trace --steps 100000000 --eval-every 0 --ranks 2 --out run");
  const fs::path metrics = path("run/metrics.jsonl");
  std::error_code error;
  for (int i = 0; i < 2000 && (!fs::exists(metrics) || fs::file_size(metrics, error) == 0); ++i)
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  kill(child, SIGINT);
  int status = 0;
  waitpid(child, &status, 0);
  ASSERT_TRUE(WIFEXITED(status));
  EXPECT_EQ(WEXITSTATUS(status), 130);
  const Ran r = run("report run");
  EXPECT_EQ(r.status, 0) << r.err;
  EXPECT_TRUE(half_written().empty());
}

TEST_F(ReportTest, WithoutTheOptionNothingIsWritten) {
  ASSERT_EQ(run("train " + kTiny + "--out run").status, 0);
  EXPECT_FALSE(fs::exists(path("run/trace.json")));
  EXPECT_FALSE(fs::exists(path("run/report.json")));
  expect_failure("report run", 4, "run: there is no report.json in it; train with --trace to have one");
  expect_failure("report nowhere", 4, "nowhere: no such directory");
  expect_failure("report nowhere --format text", 4, "nowhere: no such directory");
  expect_failure("report run --format pdf", 2, "--format: expected html, text, found 'pdf'");
  expect_failure("report run --format text --out page.html", 2, "--out: expected no file with --format text");
  expect_failure("train " + kTiny + "--trace --dp-mode ps-async --out other", 2, "--trace");
}

TEST_F(ReportTest, DamageIsOneLineThatNamesTheFile) {
  expect_trained("--pp 2 --dp 1 --microbatches 2", "run");
  expect_failure("report run --out nowhere/x.html", 6, "nowhere/x.html");
  const auto expect_refused = [&](const std::string& file, const std::string& from, const std::string& to) {
    const std::string good = read_file(path("run/" + file));
    const size_t at = good.find(from);
    ASSERT_NE(at, std::string::npos) << from;
    std::string bad = good;
    bad.replace(at, from.size(), to);
    std::ofstream(path("run/" + file)) << bad;
    expect_failure("report run", 4, "run/" + file);
    std::ofstream(path("run/" + file)) << good;
  };
  expect_refused("report.json", "{", "[");
  expect_refused("report.json", "\"format\": 1", "\"format\": 2");
  expect_refused("report.json", "\"ranks\": 2", "\"ranks\": 3");
  expect_refused("report.json", "0F0", "0F7");
  expect_refused("report.json", "\"calls\": ", "\"calls\": -");
  expect_refused("trace.json", "\"pid\":1", "\"pid\":2");
  expect_refused("trace.json", "\"ph\":\"X\"", "\"ph\":3");
  expect_refused("trace.json", "\"stage\":0", "\"stage\":9");
  expect_refused("trace.json", "\"dur\":", "\"dur\":-");
  expect_refused("trace.json", "\"processor\":", "\"processor\":-");
  expect_refused("metrics.jsonl", "\"loss\":", "\"lost\":");
  EXPECT_EQ(run("report run").status, 0);
}

// Points at a box of the page and writes into the title what came of it.
constexpr const char* kProbe = R"html(<script>
const box = document.querySelector("#pipeline [data-mb]"), page = document.documentElement;
box.dispatchEvent(new MouseEvent("mousemove", { bubbles: true, clientX: 9, clientY: 9 }));
box.dispatchEvent(new MouseEvent("mouseover", { bubbles: true }));
document.title = (page.scrollWidth <= page.clientWidth ? "fits" : "is too wide") + ", tip " +
  document.getElementById("tip").textContent.split("\n")[0] + ", " + document.querySelectorAll(".same").length + " alike";
</script></body>)html";

TEST_F(ReportTest, ABrowserShowsItWithoutComplaint) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "the page is the same without sanitizers";
#endif
  if (std::system("command -v chromium > /dev/null 2>&1") != 0) GTEST_SKIP() << "there is no chromium here";
  expect_trained("--pp 2 --dp 1 --microbatches 4", "run");
  ASSERT_EQ(run("report run").status, 0);
  std::string html = read_file(path("run/report.html"));
  html.replace(html.find("</body>"), 7, kProbe);
  std::ofstream(path("probe.html")) << html;
  const std::string command = fmt::format(
      "cd '{0}' && timeout 60 chromium --headless --no-sandbox --disable-gpu --user-data-dir='{0}/profile' "
      "--window-size=1366,900 --enable-logging=stderr --dump-dom 'file://{0}/probe.html' > dom.txt 2> log.txt",
      folder_.path().string());
  ASSERT_EQ(std::system(command.c_str()), 0) << read_file(path("log.txt"));
  const std::string dom = read_file(path("dom.txt")), log = read_file(path("log.txt"));
  const size_t complaint = log.find("CONSOLE");
  EXPECT_EQ(complaint, std::string::npos) << log.substr(complaint, 300);
  // Forward and backward of micro-batch 0 on both stages, in three pictures.
  EXPECT_NE(dom.find("<title>fits, tip 0F0, 12 alike</title>"), std::string::npos)
      << dom.substr(dom.find("<title>"), 200);
}

}  // namespace
}  // namespace tessera
