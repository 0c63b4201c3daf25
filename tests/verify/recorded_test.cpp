// Rules of recorded steps: each pattern of facts has its cause. Each cause has at least three steps, which differ in
// layer, axis and size, and steps of a similar mechanism that must not be named so.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

#include "verify/diagnosis/diagnosis.h"

namespace tessera {
namespace {

RecordedTensor wrong(const char* kind, const char* name) {
  return {.kind = kind, .name = name, .distance = 0.5, .tolerance = 1e-5, .ndim = 2};
}
RecordedTensor grad(const char* name) { return wrong("grad", name); }

RecordedTensor on(const char* axis, RecordedTensor t) {
  t.axis = axis;
  return t;
}
RecordedTensor times(double factor, RecordedTensor t) {
  t.factor = factor;
  return t;
}
RecordedTensor vector(RecordedTensor t) {
  t.ndim = 1;
  return t;
}
// Wrong in these tokens.
RecordedTensor tokens(int64_t first, int64_t end, RecordedTensor t) {
  t.first_token = first, t.end_token = end;
  return t;
}
RecordedTensor downstream(RecordedTensor t) {
  t.downstream = true;
  return t;
}

// A step of 20 parameters with these wrong tensors.
RecordedStep step(const std::vector<RecordedTensor>& tensors, RecordedStep s = {}) {
  s.tokens = 128, s.gradients = 20, s.wrong = tensors;
  return s;
}
// All gradients are `factor` times the expected ones, and output gradients `output` times those of the global mean.
RecordedStep scaled(double factor, double output, RecordedStep s) {
  for (const char* name : {"lm_head.weight", "model.layers.3.mlp.up_proj.weight", "model.norm.weight"})
    s.wrong.push_back(times(factor, grad(name)));
  s.tokens = 128, s.gradients = 3, s.output_factor = output;
  return s;
}

std::string cause(const RecordedStep& s) {
  const std::vector<Diagnosis> all = diagnose(s);
  return all.empty() ? "" : std::string(all[0].cause);
}

struct Case {
  const char* cause;
  RecordedStep step;
};
void expect_causes(const std::vector<Case>& cases) {
  for (size_t i = 0; i < cases.size(); ++i) {
    EXPECT_EQ(cause(cases[i].step), cases[i].cause) << i;
    EXPECT_FALSE(text_of_cause(cases[i].cause).empty()) << cases[i].cause;
    for (const Diagnosis& d : diagnose(cases[i].step)) EXPECT_FALSE(d.evidence.empty()) << d.cause;
  }
}

TEST(RecordedStep, WithoutDifferencesHasNoCause) { EXPECT_EQ(cause(RecordedStep()), ""); }

TEST(RecordedStep, RowsIdentifyTheCause) {
  expect_causes({{"microbatch-dropped", {.dropped = 2}},
                 {"microbatch-dropped", step({wrong("input_ids", "input_ids")}, {.dp = 4, .dropped = 1})},
                 {"microbatch-repeated", {.dropped = 2, .repeated = 2}},
                 {"microbatch-repeated", step({wrong("input_ids", "input_ids")}, {.dp = 2, .repeated = 1})},
                 {"wrong-sequences", {.dropped = 2, .repeated = 1, .foreign = 1}},
                 {"wrong-targets", step({wrong("targets", "targets"), grad("lm_head.weight")}, {.cp = 2})}});
}

// The loss is a mean over some axes, and the reductions average over some: the factor belongs to the axis that is in
// one of the two only.
TEST(RecordedStep, FactorsBelongToTheAxisThatLossAndReductionsDisagreeOn) {
  expect_causes({
      {"factor-dp", scaled(2, 2, {.dp = 2})},
      {"factor-dp", scaled(4, 4, {.dp = 4, .cp = 4})},
      {"factor-dp", scaled(0.125, 1, {.dp = 8})},
      {"factor-dp", scaled(2, 2, {.dp = 2, .cp = 2, .microbatches = 2})},
      {"factor-cp", scaled(2, 4, {.dp = 2, .cp = 2})},
      {"factor-cp", scaled(4, 16, {.dp = 4, .cp = 4})},
      {"factor-cp", scaled(0.25, 1, {.cp = 4})},
      {"factor-cp", scaled(0.5, 2, {.dp = 2, .cp = 2})},
      {"factor-microbatches", scaled(4, 4, {.microbatches = 4})},
      {"factor-microbatches", scaled(2, 4, {.dp = 2, .microbatches = 2})},
      {"factor-microbatches", scaled(0.125, 2, {.dp = 2, .microbatches = 8})},
      {"factor-microbatches", scaled(0.25, 0, {.microbatches = 4})},  // output gradients are not recorded
      {"summed-twice", scaled(2, 1, {.microbatches = 4})},
      {"summed-twice", scaled(16, 4, {.dp = 4})},
      {"summed-twice", scaled(2, 1, {})},
      {"sum-instead-of-mean", scaled(128, 1, {.dp = 2})},
      {"unknown", scaled(1.5, 1, {.dp = 2})},
  });
  EXPECT_NE(diagnose(scaled(2, 4, {.dp = 2, .cp = 2}))[0].evidence.find("the reductions divide them by 2"),
            std::string::npos);
}

TEST(RecordedStep, FactorsOfSomeGradientsAreThoseOfTheirGroup) {
  const char* const expert = "model.layers.0.mlp.experts.0.down_proj.weight";
  expect_causes({
      {"factor-tp", step({vector(times(2, grad("model.norm.weight")))}, {.dp = 2, .tp = 2})},
      {"factor-tp", step({vector(times(0.25, grad("model.layers.7.input_layernorm.weight")))}, {.dp = 4, .tp = 4})},
      {"factor-tp", step({times(8, grad("lm_head.weight"))}, {.tp = 8})},
      {"factor-tp", step({times(4, wrong("output_grad", "model.layers.2"))}, {.tp = 4})},
      {"factor-dp", scaled(4, 4, {.dp = 4, .tp = 4})},
      {"factor-ep", step({times(2, grad(expert))}, {.dp = 2, .ep = 2})},
      {"factor-ep", step({times(0.25, grad("model.layers.5.mlp.experts.7.up_proj.weight"))}, {.dp = 8, .ep = 4})},
      {"factor-ep", step({times(8, grad(expert))}, {.dp = 8, .ep = 4})},
      {"wrong-expert-group", step({grad(expert)}, {.dp = 2, .ep = 2})},
      {"wrong-expert-group", step({on("tp", grad("model.layers.1.mlp.gate.weight"))}, {.tp = 4})},
      {"wrong-expert-group", step({grad("model.layers.9.block_sparse_moe.gate.weight")}, {.dp = 4, .ep = 4})},
  });
}

TEST(RecordedStep, CoefficientsOfMicrobatchesIdentifyTheCause) {
  const std::vector<RecordedTensor> all{grad("lm_head.weight"), grad("model.layers.0.mlp.up_proj.weight")};
  expect_causes({
      {"mean-of-means", step(all, {.microbatches = 2, .weights = {2.5, 0.625}, .targets = {4, 16}})},
      {"mean-of-means", step(all, {.dp = 4, .weights = {2, 1, 1, 0.5}, .targets = {8, 16, 16, 32}})},
      {"mean-of-means", step(all, {.dp = 2, .weights = {1.2, 0.9}, .targets = {10, 20}})},
      {"microbatch-dropped", step(all, {.microbatches = 4, .weights = {1, 1, 0, 1}, .targets = {16, 16, 16, 16}})},
      {"microbatch-dropped", step(all, {.dp = 2, .microbatches = 2, .weights = {0, 1, 0, 1}, .targets = {4, 8, 4, 8}})},
      {"microbatch-repeated", step(all, {.microbatches = 3, .weights = {2, 1, 1}, .targets = {16, 16, 16}})},
      {"microbatch-repeated", step(all, {.microbatches = 4, .weights = {1, 2, 0, 1}, .targets = {16, 16, 16, 16}})},
      {"factor-microbatches",
       step(all, {.pp = 2, .microbatches = 4, .weights = {.25, .25, .5, .5}, .targets = {8, 8, 8, 8}})},
      {"not-synchronized", step(all, {.dp = 4, .weights = {2, 2, 2, 0}, .targets = {16, 16, 16, 16}})},
  });
}

TEST(RecordedStep, ReplicasThatDifferIdentifyTheReduction) {
  RecordedTensor parameter = on("dp", wrong("parameter", "model.layers.1.mlp.gate_proj.weight"));
  RecordedTensor stale = parameter, twice = parameter, deep = on("dp_shard", wrong("parameter", "lm_head.weight"));
  stale.of_update = 1e-2, deep.of_update = 3e-4, twice.of_update = -1e-2;
  RecordedTensor other_slice = wrong("parameter", "model.layers.0.self_attn.q_proj.weight");
  other_slice.elsewhere = true;
  RecordedTensor some_ranks = wrong("output", "model.layers.1.mlp");
  some_ranks.some_data_ranks = true;
  const RecordedTensor norm = vector(grad("model.norm.weight"));
  expect_causes({
      {"not-synchronized", step({on("dp", grad("lm_head.weight"))}, {.dp = 2})},
      {"not-synchronized", step({on("dp_replicate", grad("model.layers.5.mlp.up_proj.weight"))}, {.dp = 8})},
      {"not-synchronized", step({on("cp", grad("lm_head.weight")), on("cp", norm)}, {.cp = 2})},
      {"not-synchronized", step({parameter}, {.dp = 2})},
      {"not-synchronized", step({twice}, {.dp = 2})},  // further, not older values
      {"stale-parameters", step({stale}, {.dp = 2})},
      {"stale-parameters", step({deep}, {.dp = 16})},
      {"stale-parameters", step({on("dp", wrong("updated", "model.norm.weight"))}, {.dp = 2})},
      {"stale-parameters", step({some_ranks}, {.dp = 4})},
      {"wrong-slice", step({other_slice}, {.tp = 2})},
      {"wrong-slice", step({}, {.gaps = {"output 'x': 3 of 4 elements are in no slice"}})},
      {"wrong-slice", step({wrong("output", "model.layers.0.mlp")}, {.tp = 2})},
      {"norm-gradient-not-summed", step({on("tp", norm)}, {.tp = 2})},
      {"norm-gradient-not-summed", step({on("tp", vector(grad("model.layers.3.self_attn.o_proj.bias")))}, {.tp = 8})},
      {"norm-gradient-not-summed", step({vector(grad("model.layers.1.self_attn.k_norm.weight"))}, {.tp = 4})},
      {"not-synchronized", step({on("tp", grad("model.layers.1.self_attn.k_proj.weight"))}, {.tp = 4})},
      {"tied-not-summed", step({grad("model.embed_tokens.weight")}, {.pp = 2})},
      {"tied-not-summed", step({on("pp", grad("transformer.wte.weight"))}, {.pp = 4})},
      {"tied-not-summed", step({on("ranks", grad("lm_head.weight"))}, {.dp = 2, .pp = 8})},
      {"not-synchronized", step({on("dp", grad("model.embed_tokens.weight"))}, {.dp = 2})},
  });
}

TEST(RecordedStep, WrongTokensIdentifyPositionsAndMasks) {
  const RecordedTensor attention = wrong("output", "model.layers.0.self_attn"),
                       deep = wrong("output", "transformer.h.7.attn");
  RecordedTensor small = tokens(4, 16, attention);
  small.distance = 0.05;
  const RecordedStep two{.cp = 2, .sequence = 16, .chunk = 8}, four{.cp = 4, .sequence = 128, .chunk = 32},
      zigzag{.cp = 2, .sequence = 16, .chunk = 4};
  RecordedTensor rounded = tokens(1, 16, attention), rounded_deep = tokens(1, 128, deep);
  rounded.distance = 1e-3, rounded_deep.distance = 8e-3;
  RecordedStep table = step({wrong("output", "model.embed_tokens")}, {.tp = 2});
  table.document = true;  // wrong for some tokens only
  RecordedStep documents = step({tokens(7, 16, attention)}, two), one_rank = step({tokens(40, 128, deep)}, {});
  documents.document = one_rank.document = true;
  expect_causes({
      {"wrong-positions", step({tokens(4, 16, attention)}, two)},  // inside of the first rank's chunk
      {"wrong-positions", step({tokens(16, 128, deep)}, four)},
      {"wrong-positions", step({small}, zigzag)},
      {"wrong-positions", step({wrong("output", "transformer.wpe")}, {.dp = 2})},
      {"wrong-mask", step({tokens(4, 16, attention)}, zigzag)},  // the chunks of the ranks: a local mask
      {"wrong-mask", step({tokens(8, 16, attention)}, two)},
      {"wrong-mask", step({tokens(7, 16, attention)}, two)},  // a boundary of no partition
      {"wrong-mask", step({tokens(50, 128, deep)}, four)},
      {"wrong-mask", step({tokens(0, 15, attention)}, {.sequence = 16})},  // not causal
      {"rotary-rounding", step({rounded}, {.sequence = 16})},
      {"rotary-rounding", step({rounded_deep}, {.tp = 2, .sequence = 128})},
      {"wrong-mask", step({tokens(1, 16, attention)}, {.sequence = 16})},  // too large for rounding
      {"wrong-mask", step({small}, {.sequence = 16})},                     // not from the first rotated token on
      {"document-boundary", documents},
      {"document-boundary", one_rank},
      {"wrong-slice", table},
      {"unknown", step({tokens(0, 16, attention)}, {.sequence = 16})},
  });
}

TEST(RecordedStep, MasksIdentifyDropout) {
  const RecordedTensor mlp = wrong("output", "model.layers.0.mlp"), deep = wrong("output", "model.layers.6.self_attn");
  RecordedStep shifted = step({deep}, {.pp = 2});
  shifted.wrong[0].some_samples = true;
  expect_causes({
      {"dropout-seeds", step({tokens(8, 16, mlp)}, {.tp = 2, .same_masks = true})},
      {"dropout-seeds", step({}, {.dp = 4, .dropout = true, .same_masks = true})},
      {"dropout-seeds", step({on("tp", deep)}, {.tp = 4, .dropout = true})},
      {"missing-forward-sum", step({on("tp", deep)}, {.tp = 4})},
      {"recomputed-differently", step({wrong("output_grad", "model.layers.1")}, {.recomputed = {"model.layers.1"}})},
      {"recomputed-differently", step({deep}, {.dropout = true, .recomputed = {"model.layers.6"}})},
      {"wrong-message", shifted},
      {"unknown", step({tokens(0, 16, mlp)}, {.sequence = 16})},
  });
}

TEST(RecordedStep, OutputsIdentifyRowParallelLayers) {
  RecordedTensor bias = wrong("output", "model.layers.0.self_attn"), deep = wrong("output", "model.layers.9.mlp");
  bias.same_shift = deep.same_shift = true;
  expect_causes({{"bias-added-per-rank", step({bias}, {.tp = 2})},
                 {"bias-added-per-rank", step({deep}, {.tp = 8})},
                 {"missing-forward-sum", step({on("tp", deep)}, {.tp = 8})},
                 {"wrong-slice", step({wrong("output", "model.embed_tokens")}, {.tp = 2})}});
}

// The first wrong output gradient, and whether gradients of weights after it are right.
TEST(RecordedStep, BackwardPassIdentifiesItsWrongPart) {
  const RecordedTensor attention = wrong("output_grad", "model.layers.1.self_attn"),
                       block = wrong("output_grad", "transformer.h.4"), norm = wrong("output_grad", "model.norm");
  const RecordedTensor keys = downstream(grad("model.layers.2.self_attn.k_proj.weight"));
  const RecordedTensor router = grad("model.layers.1.mlp.gate.weight"), before = grad("model.layers.0.mlp.gate.weight");
  expect_causes({
      {"input-gradient-not-summed", step({norm, before}, {.tp = 2})},
      {"input-gradient-not-summed", step({on("tp", block)}, {.tp = 8})},
      {"input-gradient-not-summed", step({attention, before}, {.dp = 2, .ep = 2})},  // of experts
      {"context-gradient-not-summed",
       step({block, downstream(grad("transformer.h.5.attn.c_attn.weight"))}, {.dp = 2, .cp = 4})},
      {"context-gradient-not-summed", step({norm, keys, before}, {.cp = 2})},
      {"context-gradient-not-summed", step({norm, keys}, {.tp = 2, .cp = 2})},
      {"unknown", step({norm, keys, downstream(grad("model.layers.2.self_attn.q_proj.weight"))}, {.cp = 2})},
      {"input-gradient-not-summed", step({block, before}, {.tp = 2, .cp = 2})},
      {"router-gradient", step({attention, downstream(router), before}, {.dp = 2, .ep = 2})},
      {"router-gradient", step({attention, downstream(router)}, {.cp = 2})},
      {"router-gradient", step({attention, downstream(router)}, {.tp = 4})},
      {"router-gradient", step({wrong("output_grad", "model.layers.3.mlp.gate"), before}, {.tp = 2})},
      {"wrong-slice", step({wrong("output_grad", "model.layers.3.mlp.gate_proj"), before}, {.tp = 2})},
      {"wrong-slice", step({attention, downstream(grad("model.layers.1.mlp.up_proj.weight")), before}, {.tp = 2})},
      {"wrong-slice", step({block, downstream(grad("transformer.h.5.attn.c_attn.weight"))}, {.tp = 4})},
      {"wrong-slice", step({wrong("output_grad", "model.layers.3.mlp.up_proj")}, {.tp = 2})},
      {"unknown", step({attention, downstream(grad("model.layers.1.mlp.up_proj.weight"))}, {.dp = 2})},
  });
}

TEST(RecordedStep, LossesIdentifyTheCause) {
  const RecordedTensor loss = wrong("loss", "loss"), head = wrong("output_grad", "lm_head"),
                       attention = wrong("output_grad", "model.layers.1.self_attn"),
                       router = grad("model.layers.1.mlp.gate.weight");
  expect_causes({
      {"vocabulary-padding", step({loss, head}, {.loss_difference = 0.05, .logits_sum = 0.1})},
      {"vocabulary-padding", step({head}, {.tp = 2, .loss_difference = 0.01, .logits_sum = 0.01})},
      {"vocabulary-padding", step({loss, head}, {.padded_vocabulary = true})},
      {"factor-tp", step({loss, head}, {.tp = 4, .loss_difference = std::log(4.0), .logits_sum = 0.1})},
      {"auxiliary-loss", step({loss, attention, router}, {.dp = 2})},
      {"auxiliary-loss", step({loss, wrong("output_grad", "model.layers.7.self_attn"),
                               grad("model.layers.7.block_sparse_moe.gate.weight")},
                              {.ep = 8})},
      {"unknown", step({loss, head}, {.loss_difference = -0.05})},
  });
}

TEST(RecordedStep, WeightGradientsIdentifyTheirComputation) {
  RecordedTensor plain = grad("model.layers.0.mlp.down_proj.weight"), added = plain, half = grad("lm_head.weight");
  added.of_parameter = 1, half.of_parameter = 0.5;
  expect_causes({{"wrong-weight-gradient", step({plain}, {.pp = 2})},
                 {"wrong-weight-gradient", step({grad("model.layers.11.self_attn.q_proj.weight")}, {.tp = 2})},
                 {"stale-buffer", step({added}, {.dp = 2})},
                 {"stale-buffer", step({half}, {})}});
}

TEST(RecordedStep, UpdatesIdentifyTheCause) {
  const RecordedTensor norm = wrong("norm", "grad_norm"), clipped = wrong("clipped_grad", "lm_head.weight"),
                       updated = wrong("updated", "model.layers.2.input_layernorm.weight"),
                       rate = wrong("lr", "model.norm.weight");
  expect_causes({
      {"clip-norm", step({norm}, {.tp = 2, .norm_ratio = 1.2})},
      {"clip-norm", step({norm, clipped}, {.pp = 4, .norm_ratio = 0.4})},
      {"clip-norm", step({clipped}, {.clip_ratio = 0.5})},
      {"loss-scale", step({norm}, {.loss_scale = 1024, .norm_ratio = 1024})},
      {"loss-scale",
       [] {
         RecordedStep s = scaled(1024, 1024, {.dp = 2});
         s.loss_scale = 1024;
         return s;
       }()},
      {"loss-scale", scaled(65536, 1, {})},
      {"weight-decay", step({rate}, {.decay = "weight_decay of model.norm.weight is 0.1 instead of 0"})},
      {"weight-decay", step({updated}, {.dp = 4, .decay = "updated without its weight_decay"})},
      {"update-order", step({rate}, {.order = "the learning rate is 1e-4 instead of 2e-4"})},
      {"update-order", step({updated}, {.dp = 8, .order = "updated with the gradients before clipping"})},
      {"unknown", step({updated}, {})},
  });
}

TEST(RecordedStep, EveryCauseHasAText) {
  EXPECT_FALSE(text_of_cause("factor-cp").empty());
  EXPECT_TRUE(text_of_cause("no such cause").empty());
}

}  // namespace
}  // namespace tessera
