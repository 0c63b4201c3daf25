// What is said of Tessera's own runs, beside what verify then counts.
#include <gtest/gtest.h>

#include <algorithm>
#include <map>

#include "planner/own.h"
#include "tests/support/draw.h"
#include "verify/verify.h"

namespace tessera::planner {
namespace {

Case drawn(uint64_t trial) {
  test::Draw d("cases", trial);
  const bool llama = d.between(0, 1) == 1;
  Case c{.hardware = hardware_named("laptop")};
  c.model = {
      .layers = d.between(2, 7), .channels = 32, .heads = 4, .gated = llama, .vocab = d.between(40, 70), .context = 16};
  c.model.tied = d.between(0, 1) == 1;
  c.model.positions = llama ? Positions::rope : Positions::learned;
  Plan& p = c.layout.plan;
  p = {.pp = d.between(1, 2), .dp = d.between(1, 2), .cp = d.between(1, 2), .tp = d.of<int64_t>({1, 2})};
  p.sp = p.tp > 1 && d.between(0, 1) == 1;
  p.zero = static_cast<ZeroStage>(d.between(0, 3));
  p.schedule = d.of({ScheduleKind::gpipe, ScheduleKind::one_f_one_b, ScheduleKind::zb_h1});
  p.microbatches = 2 * d.between(1, 2);
  p.recompute = static_cast<Recompute>(d.between(0, 4));
  p.threads_per_rank = 1;
  c.layout.sequences = d.between(1, 2);
  c.software = own_software(d.of({DType::float32, DType::bfloat16}), DType::float32);
  return c;
}

TEST(OwnRuns, AreAsVerifyCountsThem) {
  for (uint64_t trial = 0; trial < test::plans(10); ++trial) {
    const Case c = drawn(trial);
    Job job = own_job(c).value();
    job.optim.steps = 1;
    const Prediction p = predict(c);
    const VerifyResult r = verify(job);
    const std::string plan = to_text(job.plan);
    EXPECT_TRUE(r.passed()) << plan << "\n" << (r.failures.empty() ? "" : r.failures.front());
    std::map<std::string, std::map<std::string, double>> sent;
    for (const SentBytes& s : r.sent)
      if (s.bytes > 0) sent[s.axis][s.operation] = static_cast<double>(s.bytes) / static_cast<double>(job.plan.ranks());
    EXPECT_EQ(p.bytes, sent) << plan;
    ASSERT_EQ(p.memory.size(), static_cast<size_t>(job.plan.pp));
    const size_t alike = r.peak.size() / p.memory.size();
    for (size_t stage = 0; stage < p.memory.size(); ++stage) {
      const auto first = r.expected_peak.begin() + static_cast<int64_t>(stage * alike);
      const auto fullest = std::max_element(first, first + static_cast<int64_t>(alike));
      EXPECT_EQ(p.memory[stage].peak(), static_cast<double>(*fullest)) << plan << ", stage " << stage;
      const HeldBytes& held = r.held[static_cast<size_t>(fullest - r.expected_peak.begin())];
      EXPECT_EQ(p.memory[stage].parameters, static_cast<double>(held.parameters)) << plan;
      EXPECT_EQ(p.memory[stage].gradients, static_cast<double>(held.gradients)) << plan;
      EXPECT_EQ(p.memory[stage].optimizer, static_cast<double>(held.optimizer)) << plan;
    }
  }
}

}  // namespace
}  // namespace tessera::planner
