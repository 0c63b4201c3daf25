// `train --trace` and `tessera report`: what the files say of a run is held against each other and against the run.
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <sys/wait.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <csignal>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <regex>
#include <set>
#include <sstream>
#include <string>
#include <thread>
#include <tuple>
#include <utility>
#include <variant>
#include <vector>

#include "app/command_line.h"
#include "app/report/measured.h"
#include "app/report/record.h"
#include "app/report/svg.h"
#include "app/trace/rank_log.h"
#include "app/trainer.h"
#include "app/verify/expected.h"
#include "data/files.h"
#include "parallel/pipeline/schedule.h"
#include "parallel/pipeline/simulate.h"
#include "tensor/arena.h"
#include "tests/app/program.h"

namespace tessera {
namespace {
namespace fs = std::filesystem;
using Json = nlohmann::json;
using test::Ran;

const std::string kTiny =
    "--data text.txt --layers 2 --heads 2 --channels 16 --context 8 --batch 8 --steps 3 --warmup 1 --lr 0.01 "
    "--threads-per-rank 1 --quiet ";

struct Plan {
  std::string options;
  int ranks;
  std::string name;
};
const std::vector<Plan> kPlans = {{"--pp 2 --dp 1 --microbatches 4 ", 2, "1f1b"},
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

struct Span {
  double begin, end;
  std::string name;
};

// Sorted by their begin, none begins before the one before has ended (to the nanosecond that times are rounded to).
void expect_apart(std::vector<Span> spans, const std::string& where) {
  std::sort(spans.begin(), spans.end(), [](const Span& a, const Span& b) { return a.begin < b.begin; });
  for (size_t i = 1; i < spans.size(); ++i)
    EXPECT_GE(spans[i].begin, spans[i - 1].end - 0.002) << where << ": " << spans[i - 1].name << ", " << spans[i].name;
}

// Every event has a track with a name; nothing on a track overlaps, nor do two actions of a rank.
void expect_tracks(const Json& trace, int ranks) {
  static const std::regex known(
      "step|forward|backward|input gradient|weight gradient|send|receive|update|collective .+");
  std::map<std::pair<int, int>, std::string> tracks;
  std::map<std::string, std::vector<Span>> spans;
  std::set<int> processes;
  for (const Json& e : trace["traceEvents"]) {
    if (e["ph"] == "M" && e["name"] == "process_name") processes.insert(e["pid"].get<int>());
    if (e["ph"] == "M" && e["name"] == "thread_name") tracks[{e["pid"], e["tid"]}] = e["args"]["name"];
    if (e["ph"] != "X") continue;
    const auto track = tracks.find({e["pid"], e["tid"]});
    ASSERT_NE(track, tracks.end()) << e;
    EXPECT_TRUE(std::regex_match(track->second, known)) << track->second;
    EXPECT_GE(e["ts"].get<double>(), 0);
    EXPECT_GE(e["dur"].get<double>(), 0);
    const Span span{e["ts"], e["ts"].get<double>() + e["dur"].get<double>(), e["name"]};
    const std::string rank = fmt::format("rank {}", e["pid"].get<int>());
    spans[rank + " " + track->second].push_back(span);
    if (e["args"].contains("stage")) spans[rank + " actions"].push_back(span);
  }
  EXPECT_EQ(static_cast<int>(processes.size()), ranks);
  for (const auto& [where, list] : spans) expect_apart(list, where);
}

// Each rank did what its list in the schedule says, once in each of the three steps.
void expect_actions(const Json& trace, const Json& report) {
  const Schedule schedule = parse_schedule(report["plan"]["schedule"]["text"].get<std::string>(), "text");
  std::map<std::tuple<int, int64_t, std::string>, int> found;
  for (const Json& e : trace["traceEvents"])
    if (e["ph"] == "X" && e["args"].contains("stage")) ++found[{e["pid"], e["args"]["step"], e["name"]}];
  size_t expected = 0;
  for (int rank = 0; rank < static_cast<int>(report["ranks"].size()); ++rank)
    for (const Action& action : schedule.actions[report["ranks"][static_cast<size_t>(rank)]["at"]["pp"].get<size_t>()])
      for (int64_t step = 1; step <= 3; ++step) {
        ++expected;
        const int times = found[{rank, step, action.str()}];
        EXPECT_EQ(times, 1) << "rank " << rank << ", step " << step << ", " << action.str();
      }
  EXPECT_EQ(found.size(), expected);
}

// The trace has, by axis and operation, the calls and bytes of three steps that theory expects, and none that were not
// counted by the run (which counts validation too).
void expect_bytes(const Json& trace, const Json& report, const TrainOptions& options) {
  using Counts = std::map<std::string, std::pair<int64_t, int64_t>>;
  Counts traced, expected;
  for (const Json& e : trace["traceEvents"])
    if (e["ph"] == "X" && e["args"].contains("operation")) {
      const Json& args = e["args"];
      auto& [calls, bytes] = traced[args["axis"].get<std::string>() + " " + args["operation"].get<std::string>()];
      ++calls;
      bytes += args["sent"].get<int64_t>();
    }
  for (const SentBytes& s : expected_bytes(options, gpt_config(options, report["model"]["vocab"]), 3))
    expected[s.axis + " " + s.operation] = {s.calls, s.bytes};
  EXPECT_EQ(traced, expected);
  for (const Json& s : report["sent"]) {
    const auto [calls, bytes] = traced[s["axis"].get<std::string>() + " " + s["operation"].get<std::string>()];
    EXPECT_GE(s["calls"].get<int64_t>(), calls) << s;
    EXPECT_GE(s["bytes"].get<int64_t>(), bytes) << s;
  }
}

// The memory of a rank never exceeds its peaks, and holds its parameters at the end of a step.
void expect_memory(const Json& trace, const Json& report) {
  std::map<int, int> samples;
  for (const Json& e : trace["traceEvents"]) {
    if (e["ph"] != "C") continue;
    const Json& rank = report["ranks"][e["pid"].get<size_t>()];
    ++samples[e["pid"]];
    int64_t sum = 0;
    for (const auto& [category, bytes] : e["args"].items()) {
      EXPECT_LE(bytes.get<int64_t>(), rank["peaks"][category].get<int64_t>()) << category;
      sum += bytes.get<int64_t>();
    }
    EXPECT_GT(e["args"]["parameters"].get<int64_t>(), 0);
    EXPECT_LE(sum, rank["peak_bytes"].get<int64_t>());
  }
  EXPECT_EQ(samples.size(), report["ranks"].size());
  for (const auto& [rank, count] : samples) EXPECT_GT(count, 6) << rank;
}

// Tags open and close in order, quotes are even within each, and text has none of their characters; what stands in
// styles and scripts is no text.
void expect_balanced(const std::string& html) {
  std::vector<std::string> open;
  for (size_t at = html.find('<'); at != std::string::npos; at = html.find('<', at + 1)) {
    const size_t end = html.find('>', at);
    ASSERT_NE(end, std::string::npos);
    const std::string tag = html.substr(at + 1, end - at - 1), name = tag.substr(0, tag.find_first_of(" /", 1));
    EXPECT_EQ(tag.find('<'), std::string::npos) << tag;
    EXPECT_EQ(std::count(tag.begin(), tag.end(), '"') % 2, 0) << tag;
    if (tag.starts_with("!") || tag.ends_with("/")) continue;
    if (tag.starts_with("/")) {
      ASSERT_FALSE(open.empty()) << tag;
      ASSERT_EQ("/" + open.back(), tag);
      open.pop_back();
    } else {
      open.push_back(name);
      if (name == "style" || name == "script") at = html.find("</", end) - 1;
    }
  }
  EXPECT_TRUE(open.empty());
}

void expect_page(const std::string& html) {
  expect_balanced(html);
  for (const char* none : {"http", "url(", "@import", " src=", "\"nan", ",nan", ">nan", " nan", "inf "})
    EXPECT_EQ(html.find(none), std::string::npos) << none;
}

void expect_figures(const std::string& html, const Json& report) {
  for (const Json& s : report["sent"])
    EXPECT_NE(html.find(fmt::format("<td>{}</td><td>{}</td><td class=\"n\">{}</td><td class=\"n\">{}</td>",
                                    s["axis"].get<std::string>(), s["operation"].get<std::string>(),
                                    report::grouped(s["calls"]), report::grouped(s["bytes"]))),
              std::string::npos)
        << s;
  for (const Json& rank : report["ranks"]) {
    std::string row = fmt::format("<tr><td>{}</td>", rank["name"].get<std::string>());
    for (const char* category : {"parameters", "gradients", "optimizer", "activations", "workspace", "communication"})
      row += fmt::format("<td class=\"n\">{}</td>", report::grouped(rank["peaks"][category]));
    row += fmt::format("<td class=\"n\"><b>{}</b></td></tr>", report::grouped(rank["peak_bytes"]));
    EXPECT_NE(html.find(row), std::string::npos) << row;
  }
}

TEST_F(ReportTest, EveryPlanLeavesATimelineThatTheReportDraws) {
  for (const Plan& plan : kPlans) {
    SCOPED_TRACE(plan.options);
    fs::remove_all(path("run"));
    expect_trained(plan.options, "run");
    const Json trace = json("run/trace.json"), report = json("run/report.json");
    expect_tracks(trace, plan.ranks);
    expect_actions(trace, report);
    expect_bytes(trace, report, options_of(plan.options));
    expect_memory(trace, report);
    const Ran r = run("report run");
    ASSERT_EQ(r.status, 0) << r.err;
    EXPECT_EQ(r.out, "run/report.html\n");
    const std::string html = read_file(path("run/report.html"));
    expect_page(html);
    expect_figures(html, report);
    const bool pipeline = plan.name != "one stage";
    for (const char* id : {"run", "loss", "timeline", "memory", "bytes"})
      EXPECT_NE(html.find(fmt::format("<section id=\"{}\">", id)), std::string::npos) << id;
    EXPECT_EQ(html.find("<section id=\"pipeline\">") != std::string::npos, pipeline);
    EXPECT_EQ(html.find("Planned, measured times") != std::string::npos, pipeline);
    EXPECT_NE(html.find("prefers-color-scheme: dark"), std::string::npos);
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
  EXPECT_NE(html.find(fmt::format("is not the plan's here: {} threads of ranks share {} cores", 2 * cores, cores)),
            std::string::npos);
  const double replayed = shared["bubble"]["replayed"];
  EXPECT_GT(replayed, 0);
  EXPECT_LT(replayed, 1);
  const Json alone = numbers("1").first;
  const Json report = json("run/report.json");
  EXPECT_EQ(alone["bubble"]["measured"].is_null(), report["processors"]["shared"].get<bool>());
  EXPECT_EQ(report["processors"]["threads"], 2);
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

RankLog log_of(const std::string& host, double origin, double meeting, std::vector<int> cores) {
  RankLog log;
  log.host = host;
  log.origin = origin;
  log.meeting = meeting;
  log.cores = std::move(cores);
  log.threads = 2;
  log.steps = {{1, 0.5, 1}};
  return log;
}

TEST(Report, ClocksOfHostsAreSetByTheirMeeting) {
  // Rank 1 began 2 s after rank 0 on the same clock; rank 2's host is 1000 s ahead and began with rank 0.
  const Alignment a =
      align({log_of("a", 10, 20, {0, 1}), log_of("a", 12, 20.1, {0, 1}), log_of("b", 1010, 1020, {0, 1, 2})});
  EXPECT_EQ(a.add, (std::vector<double>{-0.5, 1.5, -0.5}));
  EXPECT_NE(a.words.find("2 clocks"), std::string::npos);
  EXPECT_NE(align({log_of("a", 1, 2, {0})}).words.find("one clock"), std::string::npos);
}

TEST(Report, ProcessorsAreThoseOfTheNarrowestHost) {
  const auto shared = [](std::vector<RankLog> logs) { return processors_of(logs).shared(); };
  EXPECT_FALSE(shared({log_of("a", 0, 0, {0, 1}), log_of("a", 0, 0, {2, 3})}));  // bound to cores of their own
  EXPECT_TRUE(shared({log_of("a", 0, 0, {0, 1}), log_of("a", 0, 0, {0, 1})}));
  EXPECT_TRUE(shared({log_of("a", 0, 0, {0, 1}), log_of("b", 0, 0, {0})}));
  EXPECT_EQ(processors_of({log_of("a", 0, 0, {0, 1, 2}), log_of("b", 0, 0, {7})}).cores, 1);
}

// A record of 2 ranks, 1f1b with 3 micro-batches, in which all happens as the simulator says.
report::Record made_record() {
  report::Record r;
  r.schedule = parse_schedule("0F0 0F1 0B0 0F2 0B1 0B2\n1F0 1B0 1F1 1B1 1F2 1B2\n", "made");
  r.schedule.name = "1f1b";
  const Simulation sim =
      simulate(r.schedule, {.stages = {{.forward = 2, .backward = 5}, {.forward = 3, .backward = 4}}});
  for (size_t rank = 0; rank < 2; ++rank) {
    report::Rank& made = r.ranks.emplace_back();
    made.at = {{"pp", static_cast<int64_t>(rank)}, {"dp", 0}};
    for (int64_t step = 1; step <= 3; ++step) {
      const double begin = static_cast<double>(step) * 1000, slow = step == 2 ? 3 : step == 1 ? 2 : 1;
      made.events.push_back({"step", "step", begin, begin + 100 * slow, step, -1, -1, "", "", 0, 0});
      for (const TimedAction& t : sim.actions[rank])
        made.events.push_back({"", t.action.str(), begin + 7 + t.start * slow, begin + 7 + t.end * slow, step,
                               t.action.stage, t.action.microbatch, "", "", 0, 0});
    }
  }
  return r;
}

TEST(Report, TheMeasuredPipelineIsThatOfTheMedianStep) {
  report::Record r = made_record();
  const report::StepSpan step = report::median_step(r);
  EXPECT_EQ(step.step, 1);
  EXPECT_EQ(step.end - step.begin, 200);
  const auto p = report::measure_pipeline(r, step);
  ASSERT_TRUE(p);
  const std::array<double, 4> expected = {4, 10, 6, 8};
  const std::array<double, 4> found = {p->times.stages[0].forward, p->times.stages[0].backward,
                                       p->times.stages[1].forward, p->times.stages[1].backward};
  for (size_t i = 0; i < 4; ++i) EXPECT_NEAR(found[i], expected[i], 1e-9);
  EXPECT_NEAR(p->measured.makespan, p->replayed.makespan, 1e-9);
  EXPECT_NEAR(p->measured.bubble_share(), p->replayed.bubble_share(), 1e-9);
  EXPECT_GT(p->measured.bubble_share(), 0.1);
  EXPECT_NEAR(*p->formula, 0.25, 1e-12);
  r.ranks[1].events.pop_back();  // of step 3, which is not drawn
  EXPECT_TRUE(report::measure_pipeline(r, step));
  std::erase_if(r.ranks[1].events, [](const report::Event& e) { return e.name == "1B2"; });
  EXPECT_FALSE(report::measure_pipeline(r, step));
}

}  // namespace
}  // namespace tessera
