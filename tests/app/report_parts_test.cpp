// The parts that a report is worked out from: clocks of hosts, processors of ranks, and the pipeline of one step.
#include <gtest/gtest.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "app/report/report.h"
#include "app/trace/timeline.h"
#include "parallel/comm/launch.h"
#include "parallel/pipeline/schedule.h"
#include "parallel/pipeline/simulate.h"
#include "tensor/error.h"

namespace tessera {
namespace {

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
      made.events.push_back({"step", "step", begin, begin + 100 * slow, step, -1, -1, 0, "", "", 0, 0});
      for (const TimedAction& t : sim.actions[rank])
        made.events.push_back({"", t.action.str(), begin + 7 + t.start * slow, begin + 7 + t.end * slow, step,
                               t.action.stage, t.action.microbatch, t.end - t.start, "", "", 0, 0});
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
  // Where cores are shared, a pass counts for as long as it had one: half of what it took here.
  r.shared = true;
  const auto alone = report::measure_pipeline(r, step);
  ASSERT_TRUE(alone);
  EXPECT_NEAR(alone->times.stages[0].backward, 5, 1e-9);
  EXPECT_NEAR(alone->replayed.makespan, p->replayed.makespan / 2, 1e-9);
  EXPECT_NEAR(alone->replayed.bubble_share(), p->replayed.bubble_share(), 1e-9);
  EXPECT_EQ(alone->times.message, 0);
  r.shared = false;
  r.ranks[1].events.pop_back();  // belongs to step 3, which is not drawn
  EXPECT_TRUE(report::measure_pipeline(r, step));
  std::erase_if(r.ranks[1].events, [](const report::Event& e) { return e.name == "1B2"; });
  EXPECT_FALSE(report::measure_pipeline(r, step));
}

TEST(Report, EachPanelOfThePipelineSaysHowLongARankIsIdle) {
  const report::Record r = made_record();
  const report::StepSpan step = report::median_step(r);
  const std::string part = report::as_html(report::pipeline_part(r, step, report::measure_pipeline(r, step)));
  size_t found = 0;
  for (size_t at = 0; (at = part.find("idle | rank ", at)) != std::string::npos; ++at) ++found;
  EXPECT_EQ(found, 3 * 2U) << "planned, replayed and measured, of two ranks each";
  // Rank 0 of 1f1b waits once for B0: p - 1 times F + B, of 3 (F + B) and that.
  EXPECT_NE(part.find("idle | rank 0 is idle for 3 units of 12 units"), std::string::npos);
  EXPECT_NE(part.find("idle | rank 1 is idle for 3 units of 12 units"), std::string::npos);
}

TEST(RankLog, ComesToRankZeroAsItWas) {
  launch({.ranks = 2, .threads_per_rank = 1, .timeout_s = 60}, [](Communicator& world) {
    RankLog own = log_of("host", 1.5, 2.5, {3, 5});
    own.peaks[1] = 77;
    own.events = {{"send", "pp", 11, 0.25, 0.5, 0.75, 13, TraceKind::action, 0.125}};
    own.memory = {{0.375, {1, 2, 3}}};
    const std::vector<RankLog> all = gather_logs(world, own);
    ASSERT_EQ(all.size(), world.rank() == 0 ? 2U : 0U);
    for (const RankLog& log : all) {
      EXPECT_EQ(std::tie(log.host, log.origin, log.cores, log.threads, log.peaks),
                std::tie(own.host, own.origin, own.cores, own.threads, own.peaks));
      const auto fields = [](const TraceEvent& e) {
        return std::tuple(e.what, e.axis, e.bytes, e.requested, e.begin, e.end, e.sent, e.kind, e.processor);
      };
      EXPECT_EQ(fields(log.events.at(0)), fields(own.events.at(0)));
      EXPECT_EQ(log.steps.at(0).begin, own.steps.at(0).begin);
      EXPECT_EQ(log.memory.at(0).time, 0.375);
      EXPECT_EQ(log.memory.at(0).live, own.memory.at(0).live);
    }
  });
}

TEST(Report, LoadsOfExpertsAreByAnEvenShare) {
  const std::string step = R"({"event":"step","step":1,"loss":2,"tokens_per_s":9})";
  const auto record = [&](const char* experts) {
    return report::parse_metrics(step + "\n" + R"({"event":"summary","experts":)" + experts + "}\n", "made ");
  };
  const report::Record r = record(R"({"load":[[2,2,2,2],[1,5,1,1]],"dropped":4,"ranks":2})");
  const report::Part part = report::experts_part(r, {});
  const std::string text = report::as_text({part});
  EXPECT_NE(text.find("4 of 20 choices found no place\n"), std::string::npos) << text;
  EXPECT_NE(text.find("layer 1      0.50   2.50   0.50   0.50\n  by rank    1.50   0.50\n"), std::string::npos) << text;
  EXPECT_NE(report::as_html(part).find("5 choices, 2.50 times an even share"), std::string::npos);
  EXPECT_EQ(report::report_of(report::parse_metrics(step + "\n", "made "), false).find("experts"), std::string::npos);
  for (const char* wrong : {R"({"load":[[1,2,3]],"dropped":0,"ranks":2})", R"({"load":[[]],"dropped":0,"ranks":1})",
                            R"({"load":[[-1]],"dropped":0,"ranks":1})", R"({"load":3,"dropped":0,"ranks":1})"})
    EXPECT_THROW(record(wrong), InputError) << wrong;
}

}  // namespace
}  // namespace tessera
