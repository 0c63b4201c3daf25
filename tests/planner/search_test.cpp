// The search compared with brute force, its layouts with the checks of a run, and recommendations.
#include <fmt/format.h>

#include <algorithm>
#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <tuple>
#include <vector>

#include "planner/recommend.h"
#include "tests/support/draw.h"
#include "tests/support/errors.h"
#include "train/config.h"

namespace tessera::planner {
namespace {

// A small model on GPUs with little memory, so that some plans do not fit.
SearchRequest small(int64_t ranks = 4, int64_t batch = 4) {
  SearchRequest q{.model = {.layers = 4, .channels = 512, .heads = 4, .kv_heads = 2, .vocab = 4096, .context = 256},
                  .hardware = hardware_named("h100"),
                  .software = software_named("megatron"),
                  .ranks = ranks,
                  .batch = batch};
  q.hardware.ranks_per_node = 2;
  q.hardware.memory_bytes = 0.25e9;
  q.hardware.reserved_bytes = 0;
  return q;
}

SearchRequest on_h100(const char* model, const char* software, int64_t ranks, int64_t batch) {
  return {.model = to_model_shape(*preset(model)),
          .hardware = hardware_named("h100"),
          .software = software_named(software),
          .ranks = ranks,
          .batch = batch};
}

std::string refusal(const SearchRequest& q) {
  return error_message([&] { search(q); });
}

// The fastest plan that fits, of all layouts, and their number.
struct BruteForce {
  std::optional<Candidate> best;
  int64_t layouts = 0;
};
BruteForce brute_force(const SearchRequest& q) {
  Estimator estimate(q);
  std::vector<Candidate> all;
  for (const Layout& base : bases(q))
    for (const Layout& layout : variants(q, base)) all.push_back({layout, estimate.simulated(layout)});
  std::ranges::sort(all, {}, [](const Candidate& c) { return c.prediction.step_s; });
  for (Candidate& c : all) {
    if (c.prediction.over_bytes > q.hardware.memory_bytes / 10) continue;
    c.prediction = estimate.as_run(c.layout, c.prediction);
    if (c.prediction.fits) return {c, std::ssize(all)};
  }
  return {{}, std::ssize(all)};
}

TEST(Search, MatchesBruteForce) {
  for (const auto& [ranks, batch, memory] : {std::tuple<int64_t, int64_t, double>{1, 4, 1e9},
                                             {2, 4, 0.3e9},
                                             {4, 4, 0.25e9},
                                             {4, 8, 0.15e9},
                                             {8, 8, 0.2e9}}) {
    SearchRequest q = small(ranks, batch);
    q.hardware.memory_bytes = memory;
    const SearchResult found = search(q);
    const auto [best, layouts] = brute_force(q);
    ASSERT_EQ(found.best.empty(), !best) << ranks;
    if (!best) continue;
    EXPECT_NEAR(found.best[0].prediction.step_s / best->prediction.step_s, 1, 1e-9)
        << ranks << ": " << to_text(found.best[0].layout.plan) << " and " << to_text(best->layout.plan);
    EXPECT_LE(found.simulated, layouts);
    for (size_t i = 1; i < found.best.size(); ++i)
      EXPECT_LE(found.best[i - 1].prediction.step_s, found.best[i].prediction.step_s);
    for (const Candidate& c : found.best) EXPECT_TRUE(c.prediction.fits);
    for (const Candidate& c : found.too_large) {
      EXPECT_FALSE(c.prediction.fits);
      EXPECT_GT(c.prediction.over_bytes, 0);
      EXPECT_NE(c.prediction.largest, "");
    }
  }
}

SearchRequest random_request(uint64_t trial) {
  test::Sampler sample("questions", trial);
  SearchRequest q = small(sample.of({1, 2, 4, 8}), sample.of({4, 6, 8}));
  q.model.layers = sample.between(3, 6);
  q.model.context = sample.of({128, 256});
  q.model.gated = sample.between(0, 1) == 1;
  if (q.model.gated) q.model.positions = Positions::rope;
  q.software = software_named(sample.of({"megatron", "fsdp", "tessera"}));
  q.hardware.memory_bytes = 1e6 * static_cast<double>(sample.between(120, 600));
  if (sample.between(0, 3) == 0) q.fixed.zero = sample.of({ZeroStage::none, ZeroStage::two});
  return q;
}

// Closed forms select the plans to simulate, so in rare cases the search misses a plan that is faster by less than the
// model error.
TEST(Search, RandomRequestsMatchBruteForce) {
  int64_t requests = 0, slower = 0;
  for (uint64_t trial = 0; trial < test::plans(12); ++trial) {
    const SearchRequest q = random_request(trial);
    const SearchResult found = search(q);
    const auto [best, layouts] = brute_force(q);
    ASSERT_EQ(found.best.empty(), !best) << trial;
    if (!best) continue;
    const double ratio = found.best[0].prediction.step_s / best->prediction.step_s;
    EXPECT_GE(ratio, 1 - 1e-9) << trial;
    EXPECT_LE(ratio, 1 + kCloseCall / 2) << trial << ": " << to_text(found.best[0].layout.plan) << " and "
                                         << to_text(best->layout.plan);
    slower += ratio < 1 + 1e-9 ? 0 : 1;
    ++requests;
  }
  EXPECT_LE(slower, 1 + requests / 20);
}

// Candidates are bitwise identical to predict().
TEST(Search, CandidatesMatchPredictionsExactly) {
  for (uint64_t trial = 0; trial < test::plans(12); ++trial) {
    const SearchRequest q = random_request(trial);
    for (const Candidate& c : search(q, 4).best) {
      const Prediction p = predict(make_case(q, c.layout));
      const std::string plan = fmt::format("{}: {}", trial, to_text(c.layout.plan));
      EXPECT_EQ(c.prediction.step_s, p.step_s) << plan;
      EXPECT_EQ(c.prediction.bubble, p.bubble) << plan;
      EXPECT_EQ(c.prediction.bytes, p.bytes) << plan;
      EXPECT_EQ(c.prediction.largest, p.largest) << plan;
      ASSERT_EQ(c.prediction.memory.size(), p.memory.size()) << plan;
      for (const auto& [name, part] : kMemoryParts)
        EXPECT_EQ(c.prediction.memory[p.peak_rank].*part, p.memory[p.peak_rank].*part) << plan << ' ' << name;
    }
  }
}

// A dry run, not only the closed forms, confirms that the listed plans of Tessera fit.
TEST(Search, ListsPlansCheckedByDryRun) {
  for (const auto& [hardware, batch] : {std::pair{"rtx4090", 8}, {"rtx4090", 64}, {"a100-40", 64}}) {
    SearchRequest q = on_h100("llama2-7b", "tessera", 8, batch);
    q.hardware = hardware_named(hardware);
    const SearchResult found = search(q);
    EXPECT_GT(found.best.size(), 5U);
    for (const Candidate& c : found.best) {
      EXPECT_FALSE(c.described) << hardware << ": " << to_text(c.layout.plan);
      EXPECT_TRUE(predict(make_case(q, c.layout)).fits) << hardware << ": " << to_text(c.layout.plan);
    }
  }
}

// Exactly the layouts that check() accepts.
TEST(Search, EnumeratesAllValidLayouts) {
  const SearchRequest q = small(8, 8);
  std::set<std::string> searched, allowed;
  ModelConfig model{.layers = 4, .heads = 4, .channels = 512, .context = 256, .vocab = 4096, .kv_heads = 2};
  for (const int64_t pp : {1, 2, 4, 8})
    for (const int64_t tp : {1, 2, 4, 8})
      for (const int64_t cp : {1, 2, 4, 8})
        for (int64_t m = 1; m <= 8; ++m)
          for (const bool sp : {false, true})
            for (const ContextMode mode : {ContextMode::ring, ContextMode::ulysses})
              for (const ScheduleKind schedule :
                   {ScheduleKind::one_f_one_b, ScheduleKind::gpipe, ScheduleKind::zb_h1, ScheduleKind::zb_h2,
                    ScheduleKind::zb_v, ScheduleKind::v_half, ScheduleKind::v_min, ScheduleKind::interleaved}) {
                if (8 % (pp * tp * cp) != 0 || (sp && tp == 1) || (cp == 1 && mode == ContextMode::ulysses)) continue;
                if (pp == 1 && schedule != ScheduleKind::one_f_one_b) continue;
                TrainConfig job{.model = model, .optim = {.batch = 8}};
                job.plan = {.pp = pp, .dp = 8 / pp / tp / cp, .cp = cp, .tp = tp, .sp = sp, .schedule = schedule};
                job.plan.cp_mode = mode, job.plan.microbatches = m;
                if (schedule == ScheduleKind::interleaved) job.plan.chunks = 2;
                try {
                  check(job);
                  allowed.insert(to_text(job.plan));
                } catch (const FieldError&) {
                }
              }
  EXPECT_GT(allowed.size(), 100U);
  for (const Layout& base : bases(q))
    for (const Layout& l : variants(q, base)) {
      searched.insert(to_text(l.plan));
      TrainConfig job{.model = model, .optim = {.batch = 8}, .plan = l.plan};
      EXPECT_NO_THROW(check(job)) << to_text(l.plan);
      EXPECT_EQ(l.batch(), 8);
      EXPECT_EQ(l.plan.ranks(), 8);
    }
  for (const std::string& plan : allowed) EXPECT_TRUE(searched.contains(plan)) << plan;
}

// The data axis is dp x cp.
TEST(Search, OffersZeroOnlyWithDataOrContextRanks) {
  using Stages = std::set<ZeroStage>;
  const Stages all{ZeroStage::none, ZeroStage::one, ZeroStage::two, ZeroStage::three};
  for (const auto& [dp, cp, expected] :
       {std::tuple<int64_t, int64_t, Stages>{2, 1, all}, {1, 2, all}, {2, 2, all}, {1, 1, {ZeroStage::none}}}) {
    SearchRequest q = small(dp * cp);
    q.fixed = {.dp = dp, .cp = cp};
    for (const Layout& base : bases(q)) {
      Stages offered;
      for (const Layout& l : variants(q, base)) offered.insert(l.plan.zero);
      EXPECT_EQ(offered, expected) << to_text(base.plan);
    }
  }
}

TEST(Search, RespectsFixedChoices) {
  SearchRequest q = small(8, 8);
  q.hardware.memory_bytes = 1e9;
  q.fixed = {.pp = 2,
             .tp = 2,
             .microbatches = 4,
             .sp = true,
             .zero = ZeroStage::two,
             .schedule = ScheduleKind::zb_h1,
             .recompute = Recompute::block};
  const SearchResult a = search(q);
  ASSERT_FALSE(a.best.empty());
  for (const Candidate& c : a.best) {
    const Plan& p = c.layout.plan;
    EXPECT_EQ(std::tuple(p.pp, p.tp, p.microbatches, p.sp, p.zero, p.schedule, p.recompute),
              std::tuple(2, 2, 4, true, ZeroStage::two, ScheduleKind::zb_h1, Recompute::block))
        << to_text(p);
  }
  q.fixed.dp = 2, q.fixed.cp = 1;
  EXPECT_EQ(search(q).best.size(), 1U);
  q.fixed = {.pp = 2, .chunks = 2};
  for (const Candidate& c : search(q).best) EXPECT_EQ(c.layout.plan.chunks, 2);
}

TEST(Search, StopsIfCallbackThrows) {
  SearchRequest q = small(8);
  int calls = 0;
  const SearchResult full = search(q, 10, [&] { ++calls; });
  EXPECT_GE(calls, full.feasible + full.estimated + full.simulated);  // at least once per visited plan
  for (const int at : {1, static_cast<int>(full.feasible) + 1, calls}) {
    int before = 0;
    const auto end = [&] {
      if (++before == at) throw Error("enough");
    };
    EXPECT_THROW(search(q, 10, end), Error);
    EXPECT_EQ(before, at);
  }
}

TEST(Search, RejectsIndivisibleSizes) {
  EXPECT_EQ(refusal(small(7)),
            "`ranks`: 7 cannot be factored into axes that fit the layers, heads, tokens and a batch of 4; nearest "
            "valid value: 8");
  SearchRequest q = small(6, 6);
  q.fixed.tp = 3;
  EXPECT_EQ(refusal(q), "`tp`: 3 does not divide the 4 heads; nearest valid value: 2 or 4");
  q = small(8);
  q.fixed.pp = 8;
  EXPECT_EQ(refusal(q), "`pp`: 8 ranks exceed the 4 layers");
  q.fixed = {.pp = 2, .dp = 3};
  EXPECT_EQ(refusal(q), "`ranks`: pp 2 x dp 3 does not divide the 8 ranks");
  q.fixed = {.pp = 2, .microbatches = 1, .schedule = ScheduleKind::interleaved};
  EXPECT_EQ(refusal(q),
            "`schedule`: interleaved has more stages than the model's 4 layers, or requires `microbatches` to be a "
            "multiple of `pp`");
}

TEST(Search, LimitsNumberOfSimulations) {
  SearchRequest q = on_h100("llama3-70b", "megatron", 256, 512);
  const SearchResult a = search(q);
  ASSERT_EQ(a.best.size(), 10U);
  EXPECT_GT(a.feasible, 1000);
  EXPECT_LE(a.simulated, a.feasible / 4);
  std::set<std::string> meshes;
  for (const Candidate& c : a.best) {
    const Plan& p = c.layout.plan;
    meshes.insert(fmt::format("{} {} {} {} {}", p.pp, p.dp, p.cp, p.tp, static_cast<int>(p.zero)));
  }
  EXPECT_EQ(meshes.size(), 10U);  // all distinct
}

TEST(Recommendation, ExplainsPlanAndAlternatives) {
  SearchRequest q = on_h100("llama2-7b", "megatron", 16, 64);
  const SearchResult a = search(q);
  const Recommendation r = recommend(q, a);
  EXPECT_EQ(r.plan.layout, a.best[0].layout);
  EXPECT_GE(r.why.size(), 4U);
  ASSERT_GE(r.why_not.size(), 4U);
  EXPECT_TRUE(r.why_not[0].because.starts_with("runner-up: ")) << r.why_not[0].because;
  for (const WhyNot& w : r.why_not) {
    EXPECT_FALSE(w.layout == r.plan.layout);
    EXPECT_FALSE(w.because.empty());
    EXPECT_EQ(w.layout.plan.ranks(), 16);
    EXPECT_EQ(w.layout.batch(), 64);
  }
  EXPECT_FALSE(r.weakest_assumption.empty());
  for (const double fraction : {0.919, 0.921}) {  // fraction of the memory used by the peak rank
    q.hardware.memory_bytes =
        q.hardware.reserved_bytes + a.best[0].prediction.memory[a.best[0].prediction.peak_rank].peak() / fraction;
    EXPECT_EQ(recommend(q, a).why[2].find("tight") != std::string::npos, fraction > 0.92) << fraction;
  }
}

// Differences below 0.1% of the time and 0.1 GB are not reported.
TEST(Recommendation, ComparesTimeAndMemory) {
  const auto candidate = [](double seconds, double gigabytes) {
    return Candidate{{}, {.step_s = seconds, .parts = {.tp = seconds}, .memory = {{.parameters = 1e9 * gigabytes}}}};
  };
  const std::tuple<double, double, const char*> table[] = {
      {1.0009, 8.09, "same time"},
      {1.0011, 8.11, "0.1% slower: +1.1 ms tp; 0.1 GB more on the peak rank"},
      {0.9991, 7.91, "same time"},
      {0.9989, 7.89, "0.1% faster; 0.1 GB less on the peak rank"},
      {3.5, 8, "250.0% slower: +2.50 s tp"}};
  for (const auto& [seconds, gigabytes, message] : table)
    EXPECT_EQ(compared(candidate(seconds, gigabytes), candidate(1, 8)), message);
  Candidate large = candidate(1, 8);
  large.prediction.fits = false, large.prediction.over_bytes = 1.26e9, large.prediction.largest = "optimizer";
  EXPECT_EQ(compared(large, candidate(1, 8)), "does not fit: 1.3 GB over capacity, mostly optimizer");
}

// On the reported hardware another plan is indeed faster.
TEST(Recommendation, NamesTippingPoint) {
  SearchRequest q = on_h100("llama2-7b", "tessera", 8, 256);
  SearchResult a = search(q);
  ASSERT_GE(a.best.size(), 5U);
  const std::optional<TippingPoint> turn = nearest_tipping_point(q, a);
  ASSERT_TRUE(turn);
  EXPECT_GT(turn->winner, 0U);
  SearchRequest other = q;
  other.hardware = turn->hardware;
  EXPECT_LT(predict(make_case(other, a.best[turn->winner].layout)).step_s,
            predict(make_case(other, a.best[0].layout)).step_s);
  EXPECT_EQ(weakest_assumption(q, a).substr(0, turn->what.size()), turn->what);
  a.best.resize(1);
  EXPECT_TRUE(weakest_assumption(q, a).starts_with("none: "));
}

}  // namespace
}  // namespace tessera::planner
