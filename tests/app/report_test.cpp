// `train --trace` and `tessera report`: consistency of the files with each other and with the run.
#include "app/report/report.h"

#include <array>
#include <cstdint>
#include <map>
#include <regex>
#include <set>
#include <sstream>
#include <string>
#include <tuple>
#include <vector>

#include "app/trace/timeline.h"
#include "tests/app/parsed.h"
#include "tests/app/program.h"
#include "tests/app/report_checks.h"

namespace tessera {
namespace {

const std::string kTiny =
    "--data text.txt --layers 2 --heads 2 --channels 16 --context 8 --batch 8 --steps 3 --warmup 1 --lr 0.01 "
    "--threads-per-rank 1 --quiet ";

// Plans with their numbers of ranks and schedule names.
const std::tuple<std::string, int, std::string> kPlans[] = {
    {"--pp 2 --dp 1 --microbatches 4 ", 2, "1f1b"},
    {"--pp 2 --dp 1 --microbatches 4 --schedule zb-h1 ", 2, "zb-h1"},
    {"--pp 2 --tp 2 --dp 2 --microbatches 2 ", 8, "1f1b"},
    {"--tp 2 --dp 2 --zero 3 --microbatches 2 ", 4, "one stage"},
    {"--cp 2 --dp 1 ", 2, "one stage"},
    {"--ranks 1 ", 1, "one stage"}};

class ReportTest : public ProgramTest {
 protected:
  void train_with_trace(const std::string& more) const { anew("train " + kTiny + "--trace " + more + " --out run"); }
};

// The page contains the bytes of the step, as in the text, and of the full run.
void expect_figures(const std::string& html, const std::string& text, const Json& report) {
  for (const Json& s : report["sent"]) {
    const std::string axis = s["axis"], operation = s["operation"];
    int64_t calls = 0, bytes = 0;
    if (const size_t row = text.find(fmt::format("\n{:<6} {:<15} ", axis, operation)); row != std::string::npos)
      std::istringstream(text.substr(row + 24, 40)) >> calls >> bytes;
    EXPECT_TRUE(std::regex_search(
        html, std::regex(fmt::format(
                  "<tr><td>{}</td><td>{}</td><td class=\"n\">{}</td><td "
                  "class=\"n\">{}</td><td><svg.*\n?.*</svg></td><td class=\"n\">{}</td><td class=\"n\">{}</td>",
                  axis == "dp+cp" ? "dp\\+cp" : axis, operation, report::grouped(calls), report::grouped(bytes),
                  report::grouped(s["calls"]), report::grouped(s["bytes"])))))
        << s << calls << " " << bytes;
  }
  for (const Json& rank : report["ranks"]) {
    std::string row = fmt::format("<tr><td>{}</td>", rank["name"].get<std::string>());
    for (const char* category : {"parameters", "gradients", "optimizer", "activations", "workspace", "communication"})
      row += fmt::format("<td class=\"n\">{}</td>", report::grouped(rank["peaks"][category]));
    row += fmt::format("<td class=\"all n\">{}</td></tr>", report::grouped(rank["peak_bytes"]));
    expect_has(html, row);
  }
}

TEST_F(ReportTest, EveryPlanRecordsCompleteTimeline) {
  for (const auto& [options, ranks, schedule] : kPlans) {
    SCOPED_TRACE(options);
    train_with_trace(options);
    const Json trace = to_json("run/trace.json"), report = to_json("run/report.json");
    test::expect_tracks(trace, ranks);
    test::expect_actions(trace, report);
    test::expect_bytes(trace, report, test::parsed_train(kTiny + options));
    test::expect_memory(trace, report);
    const Ran r = must("report run");
    EXPECT_EQ(r.out, "run/report.html\n");
    const std::string html = read_file(path("run/report.html"));
    test::expect_page(html);
    const bool pipeline = schedule != "one stage";
    for (const char* id : {"run", "loss", "timeline", "memory", "bytes"})
      expect_has(html, fmt::format("<section id=\"{}\">", id));
    for (const char* planned : {"<section id=\"pipeline\">", "Planned, measured times"})
      EXPECT_EQ(html.find(planned) != std::string::npos, pipeline) << planned;
    expect_has(html, "prefers-color-scheme: dark");
    fs::remove(path("run/report.html"));
    const Ran report_text = must("report run --format text");
    test::expect_text(report_text.out, report, trace);
    expect_figures(html, report_text.out, report);
    EXPECT_FALSE(fs::exists(path("run/report.html")));
  }
}

TEST_F(ReportTest, BubblesMatchScheduleAndAreNullOnSharedCores) {
  const auto read_numbers = [&](const std::string& threads) {
    train_with_trace("--pp 2 --dp 1 --microbatches 4 --threads-per-rank " + threads);
    must("report run --out page.html");
    EXPECT_FALSE(fs::exists(path("run/report.html")));
    const std::string html = read_file(path("page.html")), before = "id=\"numbers\">";
    const size_t begin = html.find(before) + before.size();
    return std::pair(Json::parse(html.substr(begin, html.find("</script>", begin) - begin)), html);
  };
  const size_t cores = describe_rank(*make_arena()).cores.size();
  const auto [shared, html] = read_numbers(fmt::format("{}", cores));
  EXPECT_NEAR(shared["bubble"]["formula"].get<double>(), 1.0 / 5, 1e-12);
  EXPECT_NEAR(shared["bubble"]["equal"].get<double>(), 1.0 / 5, 1e-9);
  EXPECT_TRUE(shared["bubble"]["measured"].is_null());
  expect_has(html,
             {"not meaningful", fmt::format("is not shown, because {} rank threads share {} cores", 2 * cores, cores)});
  expect_lacks(html, "<h3>Measured, step");  // the text states that it is not shown
  const double replayed = shared["bubble"]["replayed"];
  EXPECT_TRUE(replayed > 0 && replayed < 1) << replayed;
  const Json alone = read_numbers("1").first;
  const Json report = to_json("run/report.json");
  EXPECT_EQ(alone["bubble"]["measured"].is_null(), report["processors"]["shared"].get<bool>());
  EXPECT_EQ(report["processors"]["threads"], 2);
}

// A pass through all layers is one action; its activations are visible layer by layer.
TEST_F(ReportTest, ActivationBytesGrowWithinPass) {
  train_with_trace("--ranks 2 --layers 4");
  std::set<int64_t> held;
  double begin = 0, end = 0;
  const Json trace = to_json("run/trace.json");
  for (const Json& e : trace["traceEvents"])
    if (e["pid"] == 0 && e["ph"] == "X" && e["name"] == "0F0") begin = e["ts"], end = begin + e["dur"].get<double>();
  for (const Json& e : trace["traceEvents"])
    if (e["pid"] == 0 && e["ph"] == "C" && e["ts"] > begin && e["ts"] < end)
      held.insert(e["args"]["activations"].get<int64_t>());
  EXPECT_GE(held.size(), 4U);
}

TEST_F(ReportTest, RecordsOnlyLastSteps) {
  train_with_trace("--steps 9 --trace-steps 2 --ranks 2");
  const Json trace = to_json("run/trace.json");
  std::set<int64_t> steps;
  for (const Json& e : trace["traceEvents"])
    if (e["ph"] == "X") steps.insert(e["args"]["step"].get<int64_t>());
  EXPECT_EQ(steps, (std::set<int64_t>{8, 9}));
  EXPECT_EQ(trace["otherData"]["kept"], "steps 8 to 9 of 9");
  must("report run");
}

TEST_F(ReportTest, InterruptedRunWritesTimeline) {
  const std::string endless = "train " + kTiny + "--trace --steps 100000000 --eval-every 0 --ranks 2 --out run";
  EXPECT_EQ(interrupted(endless, SIGINT), 130);
  must("report run");
  EXPECT_TRUE(partial_files().empty());
}

TEST_F(ReportTest, WritesNothingWithoutTraceOption) {
  must("train " + kTiny + "--out run");
  EXPECT_FALSE(fs::exists(path("run/trace.json")) || fs::exists(path("run/report.json")));
  fails("report run", 4, "run: report.json is missing; train with --trace to record it");
  fails("report nowhere", 4, "nowhere: no such directory");
  fails("report nowhere --format text", 4, "nowhere: no such directory");
  fails("report run --format pdf", 2, "--format: expected html, text, got 'pdf'");
  fails("report run --format text --out page.html", 2, "--out: cannot be combined with --format text");
  fails("train " + kTiny + "--trace --dp-mode ps-async --out other", 2, "--trace");
}

TEST_F(ReportTest, RejectsDamagedFileWithOneLineError) {
  train_with_trace("--pp 2 --dp 1 --microbatches 2");
  fails("report run --out nowhere/x.html", 6, "nowhere/x.html");
  const auto expect_refused = [&](const std::string& file, const std::string& from, const std::string& to) {
    const std::string good = read_file(path("run/" + file));
    expect_has(good, from);
    write("run/" + file, std::string(good).replace(good.find(from), from.size(), to));
    fails("report run", 4, "run/" + file);
    write("run/" + file, good);
  };
  const std::pair<const char*, const char*> in_report[] = {{"{", "["},
                                                           {"\"format\": 1", "\"format\": 2"},
                                                           {"\"ranks\": 2", "\"ranks\": 3"},
                                                           {"0F0", "0F7"},
                                                           {"\"calls\": ", "\"calls\": -"}};
  const std::pair<const char*, const char*> in_trace[] = {{"\"pid\":1", "\"pid\":2"},
                                                          {"\"ph\":\"X\"", "\"ph\":3"},
                                                          {"\"stage\":0", "\"stage\":9"},
                                                          {"\"dur\":", "\"dur\":-"},
                                                          {"\"processor\":", "\"processor\":-"}};
  for (const auto& [from, to] : in_report) expect_refused("report.json", from, to);
  for (const auto& [from, to] : in_trace) expect_refused("trace.json", from, to);
  expect_refused("metrics.jsonl", "\"loss\":", "\"lost\":");
  must("report run");
}

// Figures of `tessera report`, cost of communication, and comparison of runs.

using report::Event;
using report::Record;

std::string render_svg(const char* name, const Args& args) {
  return report::as_svg_file(report::make_figure(name, report::planned(args)));
}

size_t count(const std::string& text, const std::string& part) {
  size_t n = 0;
  for (size_t at = 0; (at = text.find(part, at)) != std::string::npos; at += part.size()) ++n;
  return n;
}

// Self-contained and accessible: in light and dark mode, without CSS variables, and with alternative text.
void expect_figure(const std::string& svg) {
  test::expect_balanced(svg);
  EXPECT_TRUE(svg.starts_with("<svg xmlns=\"http://www.w3.org/2000/svg\""));
  for (const char* part :
       {"<title id=\"t\">", "<desc id=\"d\">", "@media screen and (prefers-color-scheme: dark)", "class=\"card\""})
    EXPECT_EQ(count(svg, part), 1U) << part;
  for (const char* none : {"var(", "<script", "url(", "href", "data-tip", "data-mb", "nan", "inf"})
    EXPECT_EQ(count(svg, none), 0U) << none;
}

TEST(Figures, SchedulesShareOneTimeScale) {
  const Args plan = {{"pp", "4"}, {"microbatches", "8"}, {"layers", "8"}, {"schedule", "gpipe,1f1b,zb-h1"}};
  const std::string svg = render_svg("pipeline", plan);
  expect_figure(svg);
  EXPECT_EQ(count(svg, "k-F pass"), 3 * 4 * 8U);
  EXPECT_EQ(count(svg, "k-B pass"), 2 * 4 * 8U);
  EXPECT_EQ(count(svg, "k-I pass"), 4 * 8U);
  expect_has(svg, {"schedule 1f1b: bubble 27.3% of the time, at most 4 micro-batches in flight on a rank",
                   "schedule gpipe: bubble 27.3% of the time, at most 8 micro-batches",
                   "schedule zb-h1: bubble 11.1% of the time"});
  EXPECT_EQ(svg, render_svg("pipeline", plan));
}

TEST(Figures, PlannedMemoryAndTrafficMatchClosedForms) {
  const Args plan = {{"ranks", "4"}, {"layers", "2"}, {"channels", "64"}, {"vocab", "64"}, {"zero", "0,1,3"}};
  const std::vector<Record> all = report::planned(plan);
  ASSERT_EQ(all.size(), 3U);
  // 108,288 parameters; 109,568 if units are padded for four shards (docs/strategies/zero.md).
  const auto peak = [&](size_t which, size_t category) { return all[which].ranks[3].peaks[category]; };
  EXPECT_EQ((std::array{peak(0, 0), peak(0, 2), peak(1, 0), peak(1, 2), peak(2, 1)}),
            (std::array<int64_t, 5>{4 * 108288, 8 * 108288, 4 * 109568, 8 * 109568 / 4, 4 * 109568 / 4}));
  const std::string memory = render_svg("memory", plan), bytes = render_svg("bytes", plan);
  expect_figure(memory);
  expect_figure(bytes);
  expect_has(memory, {"zero 0: each of 4 ranks", "zero 3: each of 4 ranks", "parameters: 433,152 bytes"});
  expect_has(bytes, {"<title>2,598,912 bytes in 4 calls</title>",  // 2 (n - 1) S
                     "<title>649,728 bytes of the busiest rank</title>"});
  for (const char* none : {"along world", "busiest rank: unknown"}) EXPECT_EQ(count(bytes, none), 0U) << none;
  EXPECT_EQ(count(render_svg("bytes", {{"ranks", "3"}, {"batch", "6"}, {"all-reduce", "ring"}, {"bucket-mb", "0.01"}}),
                  "busiest rank: unknown"),
            1U);
}

TEST(Figures, RejectsInvalidRequests) {
  const std::tuple<const char*, Args, const char*> table[] = {
      {"timeline", {{"ranks", "2"}}, "--figure timeline: dp=2: expected a run, got a plan that has not been run"},
      {"pipeline", {{"ranks", "2"}}, "--figure pipeline: dp=2: expected at least 2 pipeline ranks, got 1"},
      {"memory", {{"zero", "1,2"}, {"ranks", "2,4"}}, "--ranks: expected one value, because --zero has several"},
      {"memory", {{"zero", "1,7"}, {"ranks", "2"}}, "--zero"},
      {"bytes", {{"tp", "3"}}, "`tp`: 3 does not divide the 4 heads"},
      {"bytes", {{"dp-mode", "ps-async"}}, "known only from a run"}};
  for (const auto& [name, args, why] : table)
    expect_has(error_message([&, name = name, &args = args] { render_svg(name, args); }), why);
}

Event event(const char* track, const char* name, double begin, double end, const char* operation = "") {
  Event e;
  e.track = track, e.name = name, e.begin = begin, e.end = end, e.step = 1, e.operation = operation;
  if (*operation) e.axis = "dp", e.bytes = 100, e.sent = 50;
  return e;
}

// Two ranks of dp. Rank 1 reaches the first all-reduce 10 ms late, but rank 0 is not stalled, since it computes; both
// wait for the second one.
Record two_ranks() {
  Record r;
  r.label = "a", r.traced = r.waits_noted = true;
  r.steps = 1, r.step_ms = 100, r.losses = {{1, 3.5}, {2, 3.25}}, r.schedule.ranks = 1;
  r.sent = {{"dp", "all_reduce", 4, 200}};
  for (int64_t rank = 0; rank < 2; ++rank) {
    report::Rank& made = r.ranks.emplace_back();
    made.name = fmt::format("rank {}", rank), made.at = {{"pp", 0}, {"dp", rank}};
    made.peaks = {10, 20, 30, 40, 0, 0}, made.peak = 100 + rank;
    const double first = rank == 0 ? 20 : 30, second = rank == 0 ? 60 : 70;
    made.events = {event("step", "step 1", 0, 100),
                   event("forward", "0F0", 0, 20),
                   event("backward", "0B0", 20, 60),
                   event("collective dp", "all_reduce", first, 40, "all_reduce"),
                   event("collective dp", "all_reduce", second, 80, "all_reduce"),
                   event("waiting", "held up", second, 85)};
    made.memory = {{0, {10, 20, 30, 0, 0, 0}}, {10, {10, 20, 30, 20, 0, 0}}, {20, {10, 20, 30, 40, 0, 0}}};
  }
  return r;
}

TEST(Exposure, SeparatesWaitingTransferAndOverlappedTime) {
  const Record r = two_ranks();
  const auto found = report::exposures(r, report::median_step(r));
  ASSERT_TRUE(found && found->size() == 2);
  const auto expect = [&](size_t rank, double waiting, double transfer, double hidden) {
    EXPECT_NEAR((*found)[rank].waiting, waiting, 1e-9) << rank;
    EXPECT_NEAR((*found)[rank].transfer, transfer, 1e-9) << rank;
    EXPECT_NEAR((*found)[rank].hidden, hidden, 1e-9) << rank;
  };
  // Waiting from 60 to 70, transfer until 85 (the data arrived at 80), overlapped communication from 20 to 40.
  expect(0, 10, 15, 20);
  expect(1, 0, 15, 10);
  EXPECT_NEAR(report::mean(*found).exposed(), 20, 1e-9);
  Record old = r;
  old.waits_noted = false;
  EXPECT_FALSE(report::exposures(old, report::median_step(old)));
}

// Four data ranks with experts sharded over ranks 0 and 1 and over ranks 2 and 3. Ranks 1 and 3 are late, rank 3 later
// than rank 1.
TEST(Exposure, RanksWaitOnlyForTheirGroup) {
  Record r = two_ranks();
  const auto waiting = [&](const char* axis) {
    r.ranks.clear();
    for (int64_t rank = 0; rank < 4; ++rank) {
      report::Rank& made = r.ranks.emplace_back();
      made.at = {{"pp", 0}, {"dp", rank / 2}, {"cp", rank % 2}};
      const double begin = std::array<double, 4>{10, 20, 10, 40}[static_cast<size_t>(rank)];
      made.events = {event("step", "step 1", 0, 100),
                     event((std::string("collective ") + axis).c_str(), "all_to_all", begin, 50, "all_to_all"),
                     event("waiting", "held up", begin, 50)};
      made.events[1].axis = axis;
    }
    std::vector<double> out;
    const auto found = report::exposures(r, report::median_step(r));
    for (const report::Exposure& e : found.value()) out.push_back(e.waiting);
    return out;
  };
  r.experts.ranks = 2;
  EXPECT_EQ(waiting("ep"), (std::vector<double>{10, 0, 30, 0}));
  EXPECT_EQ(waiting("edp"), (std::vector<double>{0, 20, 0, 0}));
  r.shard_ranks = 2;
  EXPECT_EQ(waiting("dp.shard"), (std::vector<double>{10, 0, 30, 0}));
  EXPECT_EQ(waiting("dp.replicate"), (std::vector<double>{0, 20, 0, 0}));
  EXPECT_EQ(waiting("dp+cp"), (std::vector<double>{30, 20, 30, 0}));
  EXPECT_EQ(waiting("edp"), (std::vector<double>{0, 0, 0, 0}));  // one rank per group has an expert
}

TEST(Exposure, MeasuresOverlapOfOneOperation) {
  Record r = two_ranks();
  report::Overlap found = report::measure_overlap(r, report::median_step(r), "dp", "all_reduce");
  EXPECT_NEAR(found.all, 30, 1e-9);      // 20 and 20, 10 and 10
  EXPECT_NEAR(found.exposed, 15, 1e-9);  // 20 and 10: the second operations
  EXPECT_EQ(report::measure_overlap(r, report::median_step(r), "ep", "all_to_all").all, 0);
}

TEST(Compare, ComparesRunsWithAndWithoutTrace) {
  Record a = two_ranks(), longer = a;
  a.options = {{"dp", "2"}, {"zero", "0"}}, longer.options = {{"dp", "2"}, {"zero", "1"}};
  a.quick_ms = 90, longer.quick_ms = 45;
  longer.label = "b", longer.losses.push_back({3, 3}), longer.step_ms = 50;
  const std::string text = report::compare_to_text(a, longer, false);
  const auto row = [](const std::string& of, const std::string& name) {
    const size_t at = of.find("\n  " + name);
    return at == std::string::npos ? "no row" : of.substr(at + 45, of.find('\n', at + 1) - at - 45);
  };
  EXPECT_EQ(row(text, "median over the run"), "        100.000 ms         50.000 ms         -50.0%");
  EXPECT_EQ(row(text, "25th percentile"), "         90.000 ms         45.000 ms         -50.0%");
  EXPECT_EQ(row(text, "zero"), "                 0                 1               ");
  EXPECT_EQ(row(text, "dp  "), "no row");  // equal in both runs
  EXPECT_LT(text.find("options that differ"), text.find("step time\n"));
  EXPECT_EQ(row(text, "exposed "), "         20.000 ms         20.000 ms           same");
  EXPECT_EQ(row(text, "- waiting for other ranks "), "          5.000 ms          5.000 ms           same");
  EXPECT_EQ(row(text, "hidden behind computation, of the step"), "             15.0%             15.0%           same");
  EXPECT_EQ(row(text, "dp all_reduce"), "               200               200           same");
  EXPECT_EQ(row(text, "peak"), "               101               101           same");
  EXPECT_EQ(row(text, "at step 2"), "            3.2500            3.2500           same");
  EXPECT_EQ(row(text, "final"), "            3.2500            3.0000        -0.2500");
  expect_has(text, "b has 3 steps and a has 2: losses are compared at the last common step");
  test::expect_page(report::compare_to_text(a, longer, true));

  Record bare = report::parse_metrics(
      "{\"event\":\"step\",\"step\":1,\"loss\":3.5,\"tokens_per_s\":10,\"step_ms\":80}\n"
      "{\"event\":\"summary\",\"peak_bytes\":[7,9],\"sent_bytes\":{\"dp\":{\"all_reduce\":320}},"
      "\"plan\":{\"dp\":2,\"dp_mode\":\"ddp\",\"strategy\":\"ddp\"}}\n",
      "");
  EXPECT_EQ(bare.options, (std::map<std::string, std::string>{{"dp", "2"}, {"dp-mode", "\"ddp\""}}));
  bare.label = "bare";
  const std::string other = report::compare_to_text(bare, a, false);
  EXPECT_EQ(row(other, "median over the run"), "         80.000 ms        100.000 ms         +25.0%");
  EXPECT_EQ(row(other, "exposed "), "                 -         20.000 ms               ");
  EXPECT_EQ(row(other, "dp all_reduce"), "               320               200         -37.5%");
  EXPECT_EQ(row(other, "peak"), "                 9               101       +1022.2%");
  EXPECT_EQ(row(other, "at step 1"), "            3.5000            3.5000           same");
  expect_has(other, "bare has no trace");
  const std::string page = report::compare_to_text(bare, a, true);
  test::expect_page(page);
  EXPECT_EQ(count(page, "<polyline"), 2U);
  EXPECT_EQ(count(page, "<section id=\"timeline\">"), 1U);
  expect_figure(report::as_svg_file(report::make_figure("loss", {bare, a})));
}

TEST(Panels, ReplayedPipelineFillsPanelWidthOnSharedCores) {
  const Simulation equal = simulate(parse_schedule("0F0 0B0\n1F0 1B0\n", "made"));
  Simulation slow = equal;
  slow.makespan *= 4;  // ranks that time-share cores
  const report::MeasuredPipeline p{.times = {}, .equal = equal, .replayed = equal, .measured = slow, .formula = {}};
  Record r;
  const auto unshared = report::make_panels(r, p, {.step = 1});
  ASSERT_EQ(unshared.size(), 3U);
  EXPECT_EQ(unshared[1].scale, slow.makespan);
  r.shared = true;
  const auto panels = report::make_panels(r, p, {.step = 1});
  ASSERT_EQ(panels.size(), 2U) << "on shared cores the measured times are not those of the plan";
  EXPECT_EQ(panels[1].scale, equal.makespan);
}

// Components of reports: host clocks, cores of ranks, and the pipeline of a step.

RankLog make_log(const std::string& host, double origin, double clock_sync, const std::vector<int>& cores) {
  RankLog log;
  log.host = host, log.origin = origin, log.clock_sync = clock_sync, log.cores = cores;
  log.threads = 2, log.steps = {{1, 0.5, 1}};
  return log;
}

TEST(Report, AlignsHostClocksAtBarrier) {
  // Rank 1 started 2 s after rank 0 on the same clock; rank 2's host is 1000 s ahead and started together with rank 0.
  const Alignment a =
      align({make_log("a", 10, 20, {0, 1}), make_log("a", 12, 20.1, {0, 1}), make_log("b", 1010, 1020, {0, 1, 2})});
  EXPECT_EQ(a.add, (std::vector<double>{-0.5, 1.5, -0.5}));
  expect_has(a.text, "2 clocks");
  expect_has(align({make_log("a", 1, 2, {0})}).text, "one clock");
}

TEST(Report, CountsCoresOfMostLoadedHost) {
  const auto shared = [](std::vector<RankLog> logs) { return count_cores(logs).shared(); };
  EXPECT_FALSE(shared({make_log("a", 0, 0, {0, 1}), make_log("a", 0, 0, {2, 3})}));  // bound to separate cores
  EXPECT_TRUE(shared({make_log("a", 0, 0, {0, 1}), make_log("a", 0, 0, {0, 1})}));
  EXPECT_TRUE(shared({make_log("a", 0, 0, {0, 1}), make_log("b", 0, 0, {0})}));
  EXPECT_EQ(count_cores({make_log("a", 0, 0, {0, 1, 2}), make_log("b", 0, 0, {7})}).cores, 1);
}

// A record of 2 ranks, 1f1b with 3 micro-batches, with the times of the simulator.
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
      made.events.push_back({"step", "step", begin, begin + 100 * slow, step, -1, -1, 0, "", "", 0, 0});
      for (const TimedAction& t : sim.actions[rank])
        made.events.push_back({"", t.action.str(), begin + 7 + t.start * slow, begin + 7 + t.end * slow, step,
                               t.action.stage, t.action.microbatch, t.end - t.start, "", "", 0, 0});
    }
  }
  return r;
}

TEST(Report, MeasuresPipelineOfMedianStep) {
  report::Record r = made_record();
  const report::StepSpan step = report::median_step(r);
  EXPECT_EQ(step.step, 1);
  EXPECT_EQ(step.end - step.begin, 200);
  const auto p = report::measure_pipeline(r, step);
  ASSERT_TRUE(p);
  for (const auto& [stage, forward, backward] : {std::tuple(0U, 4, 10), {1U, 6, 8}}) {
    EXPECT_NEAR(p->times.stages[stage].forward, forward, 1e-9) << stage;
    EXPECT_NEAR(p->times.stages[stage].backward, backward, 1e-9) << stage;
  }
  EXPECT_NEAR(p->measured.makespan, p->replayed.makespan, 1e-9);
  EXPECT_NEAR(p->measured.bubble_fraction(), p->replayed.bubble_fraction(), 1e-9);
  EXPECT_GT(p->measured.bubble_fraction(), 0.1);
  EXPECT_NEAR(*p->formula, 0.25, 1e-12);
  // On shared cores a pass counts with its CPU time, here half of its duration.
  r.shared = true;
  const auto alone = report::measure_pipeline(r, step);
  ASSERT_TRUE(alone);
  EXPECT_NEAR(alone->times.stages[0].backward, 5, 1e-9);
  EXPECT_NEAR(alone->replayed.makespan, p->replayed.makespan / 2, 1e-9);
  EXPECT_NEAR(alone->replayed.bubble_fraction(), p->replayed.bubble_fraction(), 1e-9);
  EXPECT_EQ(alone->times.message, 0);
  r.shared = false;
  r.ranks[1].events.pop_back();  // of step 3, which is not shown
  EXPECT_TRUE(report::measure_pipeline(r, step));
  std::erase_if(r.ranks[1].events, [](const report::Event& e) { return e.name == "1B2"; });
  EXPECT_FALSE(report::measure_pipeline(r, step));
}

TEST(Report, TimelinesShowEachStageOfRank) {
  report::Record r;
  r.traced = true, r.clock = "one", r.schedule = v_half(1, 1);  // the simulated order is F f i I w W, one unit each
  const Simulation sim = simulate(r.schedule);
  const std::map<PassKind, const char*> tracks = {
      {PassKind::F, "forward"}, {PassKind::I, "input gradient"}, {PassKind::W, "weight gradient"}};
  for (size_t rank = 0; rank < 2; ++rank) {
    report::Rank& made = r.ranks.emplace_back();
    made.at = {{"pp", 0}, {"dp", static_cast<int64_t>(rank)}};
    made.events = {event("step", "step", 0, 6)};
    for (const TimedAction& t : sim.actions[0]) {
      report::Event& pass = made.events.emplace_back(event(tracks.at(t.action.what), "", t.start, t.end));
      pass.stage = t.action.stage, pass.microbatch = 0;
    }
  }
  const std::string text = report::make_report(r, false),
                    svg = report::as_svg_file(report::make_figure("timeline", {r}));
  EXPECT_TRUE(std::regex_search(text, std::regex("\\|F{13}f{14}i{13}I{13}w{14}W{13}\\|"))) << text;
  expect_has(text, "Lower case: a rank's later stages; for communication, less than half of a character's time.\n");
  for (const char* pass : {"k-F", "k-I", "k-W", "k-F c1", "k-I c1", "k-W c1"})  // also contained in the legend
    EXPECT_EQ(count(svg, fmt::format("<rect class=\"{}\"", pass)), pass[4] == 'c' && pass[2] != 'F' ? 2U : 3U) << pass;
  expect_has(svg, "paler: a rank's later stages");
}

TEST(Report, EveryPanelReportsIdleTime) {
  const report::Record r = made_record();
  const report::StepSpan step = report::median_step(r);
  const std::string part = report::as_html(report::pipeline_part(r, step, report::measure_pipeline(r, step)));
  EXPECT_EQ(count(part, "idle | rank "), 3 * 2U) << "planned, replayed and measured, of two ranks each";
  // Rank 0 of 1f1b is idle once before B0: p - 1 times F + B, out of 3 (F + B) plus that.
  expect_has(part, {"idle | rank 0 is idle for 3 units of 12 units", "idle | rank 1 is idle for 3 units of 12 units"});
}

TEST(RankLog, GatheredLogsAreUnchanged) {
  launch({.ranks = 2, .threads_per_rank = 1, .timeout_s = 60}, [](Communicator& world) {
    RankLog own = make_log("host", 1.5, 2.5, {3, 5});
    own.peaks[1] = 77;
    own.events = {{"send", "pp", 11, 0.25, 0.5, 0.75, 13, TraceKind::action, 0.125}};
    own.memory = {{0.375, {1, 2, 3}}};
    const std::vector<RankLog> all = gather_logs(world, own);
    ASSERT_EQ(all.size(), world.rank() == 0 ? 2U : 0U);
    for (const RankLog& log : all) {
      EXPECT_EQ(std::tie(log.host, log.origin, log.cores, log.threads, log.peaks),
                std::tie(own.host, own.origin, own.cores, own.threads, own.peaks));
      const auto fields = [](const TraceEvent& e) {
        return std::tuple(e.what, e.axis, e.bytes, e.requested, e.begin, e.end, e.sent, e.kind, e.cpu_s);
      };
      EXPECT_EQ(fields(log.events.at(0)), fields(own.events.at(0)));
      EXPECT_EQ(log.steps.at(0).begin, own.steps.at(0).begin);
      EXPECT_EQ(log.memory.at(0).time, 0.375);
      EXPECT_EQ(log.memory.at(0).live, own.memory.at(0).live);
    }
  });
}

TEST(Report, ExpertLoadsAreRelativeToUniformLoad) {
  const std::string step = R"({"event":"step","step":1,"loss":2,"tokens_per_s":9})";
  const auto record = [&](const char* experts) {
    return report::parse_metrics(step + "\n" + R"({"event":"summary","experts":)" + experts + "}\n", "made ");
  };
  const report::Record r = record(R"({"load":[[2,2,2,2],[1,5,1,1]],"dropped":4,"ranks":2})");
  const report::Part part = report::experts_part(r, {});
  expect_has(report::as_text({part}),
             {"4 of 20 choices dropped\n", "layer 1      0.50   2.50   0.50   0.50\n  by rank    1.50   0.50\n"});
  expect_has(report::as_html(part), "5 choices, 2.50 times the uniform load");
  expect_lacks(report::make_report(report::parse_metrics(step + "\n", "made "), false), "experts");
  for (const char* wrong : {R"({"load":[[1,2,3]],"dropped":0,"ranks":2})", R"({"load":[[]],"dropped":0,"ranks":1})",
                            R"({"load":[[-1]],"dropped":0,"ranks":1})", R"({"load":3,"dropped":0,"ranks":1})"})
    EXPECT_THROW(record(wrong), InputError) << wrong;
}

}  // namespace
}  // namespace tessera
