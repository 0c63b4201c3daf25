// Rules of recorded steps: each pattern of facts has its cause.
#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <vector>

#include "verify/diagnosis/diagnosis.h"

namespace tessera {
namespace {

RecordedTensor wrong(const char* kind, const char* name) {
  RecordedTensor t{.kind = kind, .name = name, .distance = 0.5, .tolerance = 1e-5, .ndim = 2};
  return t;
}

// A step with these wrong tensors.
RecordedStep step(const std::vector<RecordedTensor>& tensors) {
  RecordedStep s{.tokens = 128, .wrong = tensors, .gradients = 20};
  return s;
}

std::string cause(const RecordedStep& s) {
  const std::vector<Diagnosis> all = diagnose(s);
  return all.empty() ? "" : std::string(all[0].cause);
}

TEST(RecordedStep, WithoutDifferencesHasNoCause) { EXPECT_EQ(cause(RecordedStep()), ""); }

TEST(RecordedStep, RowsIdentifyTheCause) {
  RecordedStep s;
  s.dropped = 2;
  EXPECT_EQ(cause(s), "microbatch-dropped");
  s.repeated = 2;
  EXPECT_EQ(cause(s), "microbatch-repeated");
  s.foreign = 1;
  EXPECT_EQ(cause(s), "wrong-sequences");
  EXPECT_EQ(cause(step({wrong("targets", "targets")})), "wrong-targets");
}

TEST(RecordedStep, OutputsIdentifyTheCause) {
  RecordedTensor output = wrong("output", "model.layers.0.self_attn");
  output.first_token = 7;
  RecordedStep s = step({output});
  s.document = true;
  EXPECT_EQ(cause(s), "document-boundary");
  s.document = false, s.dropout = true, s.tp = 2;
  EXPECT_EQ(cause(s), "dropout-seeds");
  output.first_token = 0, output.same_shift = true;
  s = step({output});
  s.tp = 2;
  EXPECT_EQ(cause(s), "bias-added-per-rank");
  output.same_shift = false, output.some_samples = true;
  s = step({output});
  s.pp = 2;
  EXPECT_EQ(cause(s), "wrong-message");
  s = step({});
  s.gaps = {"output 'x': 3 of 4 elements are in no slice"};
  EXPECT_EQ(cause(s), "wrong-slice");
}

TEST(RecordedStep, LossesIdentifyTheCause) {
  const RecordedTensor loss = wrong("loss", "loss"), head = wrong("output_grad", "lm_head");
  RecordedStep s = step({loss, head});
  s.logits_sum = 0.1, s.loss_difference = 0.05;
  EXPECT_EQ(cause(s), "vocabulary-padding");
  s.tp = 4, s.loss_difference = std::log(4.0);
  EXPECT_EQ(cause(s), "factor-tp");
  const RecordedTensor router = wrong("grad", "model.layers.1.mlp.gate.weight");
  EXPECT_EQ(cause(step({loss, wrong("output_grad", "model.layers.1.self_attn"), router})), "auxiliary-loss");
  EXPECT_EQ(cause(step({wrong("output_grad", "model.layers.1.self_attn"), router})), "router-gradient");
}

TEST(RecordedStep, GradientsIdentifyTheCause) {
  RecordedTensor tied = wrong("grad", "model.embed_tokens.weight");
  RecordedStep s = step({tied});
  s.pp = 2;
  EXPECT_EQ(cause(s), "tied-not-summed");
  RecordedTensor expert = wrong("grad", "model.layers.0.mlp.experts.0.down_proj.weight");
  EXPECT_EQ(cause(step({expert})), "wrong-expert-group");
  expert.factor = 2;
  s = step({expert});
  s.ep = s.dp = 2;
  EXPECT_EQ(cause(s), "factor-ep");
  RecordedTensor plain = wrong("grad", "model.layers.0.mlp.down_proj.weight");
  EXPECT_EQ(cause(step({plain})), "wrong-weight-gradient");
  plain.of_parameter = 1;
  EXPECT_EQ(cause(step({plain})), "stale-buffer");
}

TEST(RecordedStep, EveryCauseHasAText) {
  for (const char* name : {"clip-norm", "mean-of-means", "stale-parameters", "weight-decay", "update-order"})
    EXPECT_FALSE(text_of_cause(name).empty()) << name;
  EXPECT_TRUE(text_of_cause("no such cause").empty());
}

}  // namespace
}  // namespace tessera
