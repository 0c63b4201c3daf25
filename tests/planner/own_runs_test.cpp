// The predictions for Tessera's own runs, compared with what verify then counts.
#include <gtest/gtest.h>

#include "planner/memory.h"
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

// A rank's `peak_bytes` as `tessera train` counted it in the GPU's arena, in MB: on an H100 80GB HBM3 on 2026-11-26,
// bf16 with fp32 gradients, master weights and moments, a vocabulary of 50304. The models are those of
// bench/gpu_parts.py in its parts `pytorch` and `shapes`, on one rank; the layouts those of its part `strategies`, of
// the first model on two ranks that share the card. Attention is cuDNN's, but the ring's, which takes as much.
struct OnTheCard {
  const char* name;
  ModelShape model;
  int64_t sequences;
  double megabytes;
};

struct OnTwoRanks {
  Plan plan;
  int64_t sequences;
  double megabytes;
};

ModelShape gpt(int64_t layers, int64_t heads, int64_t channels, int64_t context) {
  return {.layers = layers, .channels = channels, .heads = heads, .vocab = 50304, .context = context};
}

ModelShape llama(int64_t layers, int64_t heads, int64_t channels, int64_t kv_heads, int64_t ffn) {
  ModelShape m = gpt(layers, heads, channels, 1024);
  m.kv_heads = kv_heads;
  m.ffn = ffn;
  m.gated = true;
  m.positions = Positions::rope;
  m.tied = false;
  return m;
}

ModelShape with_experts(ModelShape m) {
  m.experts = 8;
  m.experts_per_token = 2;
  return m;
}

const OnTheCard kOnTheCard[] = {
    {"gpt2", gpt(12, 12, 768, 1024), 32, 15378},
    {"gpt2-8k", gpt(12, 12, 768, 8192), 4, 15477},
    {"gpt2-32k", gpt(12, 12, 768, 32768), 1, 15816},
    {"gpt2-medium", gpt(24, 16, 1024, 1024), 16, 21053},
    {"llama", llama(12, 12, 768, 4, 2048), 32, 15079},
    {"llama-1b", llama(16, 32, 2048, 8, 8192), 4, 26663},
    {"llama-experts", with_experts(llama(12, 12, 768, 4, 1024)), 32, 20569},
};

const OnTwoRanks kOnTwoRanks[] = {
    {{.dp = 2}, 16, 8809},
    {{.dp = 2, .zero = ZeroStage::one}, 16, 8062},
    {{.dp = 2, .zero = ZeroStage::three}, 16, 7921},
    {{.tp = 2}, 32, 8983},
    {{.tp = 2, .sp = true}, 32, 7797},
    {{.cp = 2}, 32, 8809},
    {{.cp = 2, .cp_mode = ContextMode::ulysses}, 32, 9111},
    {{.pp = 2, .microbatches = 4}, 8, 5037},
    {{.pp = 2, .schedule = ScheduleKind::zb_h1, .microbatches = 4}, 8, 5048},
};

void expect_found(const std::string& what, const ModelShape& model, const Layout& layout, double megabytes) {
  const Case c{.model = model,
               .layout = layout,
               .hardware = hardware_named("h100"),
               .software = own_software(DType::bfloat16, DType::float32)};
  ASSERT_TRUE(own_job(c)) << what;
  EXPECT_NEAR(predict(c).memory.at(0).peak() / 1e6 / megabytes, 1, 0.005) << what;
}

TEST(OwnRuns, HoldOnAGpuWhatWasFoundThere) {
#if defined(__SANITIZE_ADDRESS__)
  GTEST_SKIP() << "the address sanitizer writes an eighth of what is only reserved";
#endif
  for (const OnTheCard& found : kOnTheCard)
    expect_found(found.name, found.model, {.sequences = found.sequences}, found.megabytes);
  for (const OnTwoRanks& found : kOnTwoRanks)
    expect_found(to_text(found.plan), kOnTheCard[0].model, {.plan = found.plan, .sequences = found.sequences},
                 found.megabytes);
}

}  // namespace
}  // namespace tessera::planner
