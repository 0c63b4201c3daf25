// 4-bit layers: each receives inputs from its already quantized predecessors; and GPTQ has a lower error than
// round-to-nearest.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "tests/support/errors.h"
#include "tests/support/tensors.h"
#include "train/quantize/layers.h"

namespace tessera {
namespace {

constexpr int64_t kVocab = 29, kContext = 16;

const ModelConfig kGpt2{.layers = 2, .heads = 2, .channels = 32, .context = kContext, .vocab = kVocab};
const ModelConfig kLlama = [] {
  ModelConfig c = kGpt2;
  c.family = Family::llama, c.heads = 4, c.kv_heads = 2, c.ffn = 64;
  return c;
}();

// Weights are large enough for layers to matter.
std::unique_ptr<LanguageModel> random_model(const ModelConfig& config) {
  std::unique_ptr<LanguageModel> model = make_model(config);
  model->freeze();
  model->materialize(5, make_arena(), DType::float32, DType::float32);
  for (Parameter* p : model->parameters())
    if (p->full_shape.ndim() == 2) {
      const Philox random = Philox::named(7, p->name);
      for (int64_t i = 0; i < p->full_shape.numel(); ++i)
        p->var.value().data<float>()[i] = static_cast<float>(0.15 * random.normal(static_cast<uint64_t>(i)));
    }
  return model;
}

// A predictable text: 85 tokens are 5 full windows and a partial one.
TokenFile tokens() {
  std::vector<int32_t> out{1, 2};
  const Philox random = Philox::named(3, "tokens");
  while (out.size() < 86)
    out.push_back(static_cast<int32_t>((out.back() * 3 + out[out.size() - 2] + random.below(3, out.size())) % kVocab));
  return TokenFile::from_tokens(out, kVocab, "drawn");
}

std::vector<Linear*> linear_layers(LanguageModel& model) {
  std::vector<Linear*> out;
  for (int64_t i = 0; i < model.config.layers; ++i)
    for (Linear* l : model.layer(i).all<Linear>()) out.push_back(l);
  return out;
}

// The model's output for some of the windows.
Tensor hidden(LanguageModel& model, const Windows& windows, int64_t first = 0, int64_t count = 5) {
  const NoGrad no_grad;
  std::vector<int32_t> ids(static_cast<size_t>(count * kContext)), targets(ids);
  windows.load(first, count, ids.data(), targets.data());
  model.set_step({});
  return model.hidden(Tensor::of<int32_t>(ids, {count, kContext}, make_arena())).value();
}

TEST(QuantizeLayers, InputsComeFromQuantizedPredecessors) {
  const TokenFile text = tokens();
  const Windows windows(text, kContext);
  for (const ModelConfig& config : {kLlama, kGpt2}) {
    const auto model = random_model(config);
    std::map<std::string, Tensor> before;
    for (Linear* l : linear_layers(*model)) before[l->parameter(l->weight).name] = l->weight.value().clone();
    std::vector<std::string> heard;
    const std::vector<QuantizedWeight> made =
        quantize_layers(*model, &windows, {.group = 16, .at_once = 2}, [&](const auto& w) { heard.push_back(w.name); });
    ASSERT_EQ(made.size(), 8u);
    EXPECT_EQ(heard.front(), "blocks.0.attn.qkv.weight");
    EXPECT_EQ(heard.back(), "blocks.1.mlp.down.weight");
    for (size_t i = 0; i < made.size(); ++i) {
      Linear& l = *linear_layers(*model)[i];
      std::vector<float> decoded(static_cast<size_t>(l.weight.value().numel()));
      made[i].matrix.decode(0, decoded);
      EXPECT_EQ(l.weight.value().to_vector<float>(), decoded) << made[i].name;
      // Measuring inputs in the final model is valid, because those of a layer depend only on preceding layers.
      InputSquares inputs(l.weight.dim(1));
      int64_t max_rows = 5;  // targets of the last window
      l.hooks.matmul = [&](const Var& x, const Var& w, const Var& b, PackedWeights* packs) {
        const Tensor rows = x.value().flat_rows();
        inputs.add(rows.narrow(0, 0, std::min(rows.dim(0), max_rows)));
        return linear(x, w, b, packs);
      };
      hidden(*model, windows, 5, 1);
      max_rows = 5 * kContext;
      hidden(*model, windows);
      l.hooks.matmul = {};
      const double error = output_error(before.at(made[i].name), made[i].matrix, inputs);
      EXPECT_NEAR(error, made[i].error, 1e-4 * error) << made[i].name;
      EXPECT_GT(error, 0);
    }
  }
}

TEST(QuantizeLayers, GptqHasLowerErrorThanRoundToNearest) {
  const TokenFile text = tokens();
  const Windows windows(text, kContext);
  for (const ModelConfig& config : {kLlama, kGpt2}) {
    const Tensor before = hidden(*random_model(config), windows);
    const auto rounded = random_model(config), better = random_model(config), blind = random_model(config);
    quantize_layers(*rounded, &windows, {.method = Rounding::nearest, .group = 32});
    quantize_layers(*better, &windows, {.group = 32});
    quantize_layers(*blind, nullptr, {.method = Rounding::nearest, .group = 32});
    const auto off = [&](LanguageModel& model) { return std::pow(test::distance(hidden(model, windows), before), 2); };
    EXPECT_LT(off(*better), 0.5 * off(*rounded));
    EXPECT_TRUE(test::bitwise_equal(hidden(*blind, windows), hidden(*rounded, windows)));
  }
}

TEST(QuantizeLayers, RejectsMismatchedArguments) {
  const TokenFile text = tokens();
  const Windows windows(text, kContext), longer(text, 2 * kContext);
  const auto expect_refused = [&](const Rows* rows, const QuantizeOptions& o, const std::string& message) {
    expect_error(Status::usage, {message}, [&] { quantize_layers(*random_model(kGpt2), rows, o); });
  };
  expect_refused(&windows, {.group = 24}, "`group`: expected a divisor of the 32 inputs of blocks.0.attn.qkv, got 24");
  expect_refused(&windows, {.group = 64}, "`group`: expected a divisor of the 32 inputs");
  expect_refused(&longer, {.group = 16},
                 "calibration windows have 32 tokens; expected at most the model's context length, 16");
  expect_refused(nullptr, {.group = 16}, "calibration data is missing");
}

}  // namespace
}  // namespace tessera
