// The rules of the diagnosis on made-up observations: nothing is run.

#include "tests/support/errors.h"
#include "tests/verify/plans.h"
#include "verify/defects/defects.h"

namespace tessera {
namespace {

using Kind = TensorDifference::Kind;

std::string_view first_of(const Observations& seen) { return diagnose(seen).at(0).cause; }

TensorDifference gradient(const std::string& name, std::vector<int64_t> shape, std::optional<double> factor = {}) {
  TensorDifference out;
  out.step = 1;
  out.kind = Kind::gradient;
  out.name = name;
  out.shape = std::move(shape);
  out.distance = 0.5;
  out.elements = out.wrong = 4;
  out.factor = factor;
  return out;
}

Observations of_two() {
  Observations o;
  o.dp = 2;
  o.batch = 4;
  o.trained = 2;
  return o;
}

TEST(Diagnosis, OfARunThatIsRightIsNothing) { EXPECT_TRUE(diagnose(of_two()).empty()); }

TEST(Diagnosis, TellsAScaleFromASumThatIsMadeTwice) {
  Observations o = of_two();
  o.tensors = {gradient("tokens.weight", {4, 2}, 2.0), gradient("norm.weight", {2}, 2.0)};
  EXPECT_EQ(first_of(o), "wrong-scale");
  o.sent = {{"dp", "all_reduce", 2, 2, 64, 32}};
  EXPECT_EQ(first_of(o), "summed-twice");
  o.sent = {{"dp", "all_reduce", 0, 2, 0, 32}};
  EXPECT_EQ(first_of(o), "missing-gradient-sum");
  o.sent.clear();
  o.tensors[1].factor = 3.0;
  EXPECT_EQ(first_of(o), "unknown");
}

TEST(Diagnosis, TellsWhichSumOfTheTensorAxisIsMissing) {
  Observations o = of_two();
  o.tp = 2;
  o.sent = {{"tp", "all_reduce", 6, 8, 600, 620}};
  o.tensors = {gradient("blocks.1.norm1.weight", {2}), gradient("blocks.1.norm1.bias", {2})};
  EXPECT_EQ(first_of(o), "weight-not-summed");
  o.tensors.push_back(gradient("tokens.weight", {4, 2}));
  EXPECT_EQ(first_of(o), "missing-backward-sum");
  o.numbers = {{1, "loss", 2, 1}};
  EXPECT_EQ(first_of(o), "missing-forward-sum");
}

// Where a bound is wide, nothing may be wrong but bytes.
TEST(Diagnosis, TellsAWeightFromAnActivationByItsBytes) {
  Observations o = of_two();
  o.sent = {{"tp", "all_reduce", 6, 8, 600, 620}};
  EXPECT_EQ(first_of(o), "weight-not-summed");
  o.sent[0].expected_bytes = 1000;
  EXPECT_EQ(first_of(o), "missing-backward-sum");
}

TEST(Diagnosis, ReadsSequencesFromTheirShares) {
  Observations o = of_two();
  o.microbatches = 1;  // so two sequences each
  o.tensors = {gradient("tokens.weight", {4, 2})};
  const auto with = [&](std::vector<double> shares) {
    o.mixture = Mixture{1, std::move(shares), 0.01};
    return first_of(o);
  };
  EXPECT_EQ(with({1, 1, 0, 0}), "microbatch-skipped");
  EXPECT_EQ(with({2, 2, 0, 0}), "microbatch-repeated");
  EXPECT_EQ(with({1, 2, 1, 0}), "wrong-sequences");
  EXPECT_EQ(with({1, 1, 1, 1}), "unknown");
}

TEST(Diagnosis, ReadsUpdates) {
  Observations o = of_two();
  TensorDifference p = gradient("tokens.weight", {4, 2}), m = p;
  p.kind = Kind::parameter;
  m.kind = Kind::state;
  m.name += ".m";
  m.factor = 10.0;
  o.tensors = {p, m};
  EXPECT_EQ(first_of(o), "clipping");
  o.tensors[0].unchanged = true;
  EXPECT_EQ(first_of(o), "update-skipped");
  o.tensors[0].wrong = 1;  // one of four elements
  EXPECT_EQ(first_of(o), "stale-part");
  o.permuted = true;
  EXPECT_EQ(first_of(o), "misplaced-gather");
}

TEST(Diagnosis, HasASentenceForTheCauseOfEachDefect) {
  for (const Defect& d : defects()) EXPECT_FALSE(text_of_cause(d.cause).empty()) << d.name;
  EXPECT_EQ(text_of_cause("unknown"), "no rule fits");
  EXPECT_EQ(text_of_cause("a-cause"), "");
}

TEST(Defects, SayWhatAPlanLacks) {
  TrainOptions o = test::small_plan();
  o["dp"] = 2;
  EXPECT_EQ(error_of([&] { check_applies(defect("unsummed-head-norm"), job_of(o)); }),
            "`defect`: unsummed-head-norm cannot be planted in this plan; it can with `tp` 2 and `family` llama and "
            "`qk_norm`");
  EXPECT_EQ(error_of([&] { check_applies(defect("ring-order"), job_of(o)); }),
            "`defect`: ring-order cannot be planted in this plan; it can with `dp` 3");
  EXPECT_TRUE(error_of([&] { defect("a-bug"); }).ends_with("found 'a-bug'"));
}

TEST(Defects, AreDrawnFromThoseThatApply) {
  TrainOptions o = test::small_plan();
  o.ranks = o["tp"] = 2;
  std::set<std::string_view> drawn;
  for (uint64_t draw = 0; draw < 60; ++draw) {
    const Defect& d = random_defect(job_of(o), draw);
    EXPECT_EQ(&d, &random_defect(job_of(o), draw));
    EXPECT_TRUE(d.needs(job_of(o)).empty()) << d.name;
    drawn.insert(d.name);
  }
  EXPECT_GE(drawn.size(), 5U);
}

}  // namespace
}  // namespace tessera
