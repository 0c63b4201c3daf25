// Modules: names, units, initial values, ties, wrappers; elements of shards; layers, losses; adapters on a frozen
// weight.

#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "autograd/fusion.h"
#include "models/adapters/adapters.h"
#include "tests/support/errors.h"
#include "tests/support/tensors.h"

namespace tessera {
namespace {

using test::bitwise_equal;

// Two linear layers, the second a separate unit.
struct Pair : Module {
  Pair()
      : first(child<Linear>("first", 3, 5, Linear::Options{})),
        second(child<Linear>("second", 5, 3, Linear::Options{.bias = false})) {
    second.make_unit();
  }
  Var forward(const Var& x) override { return second(first(x)); }
  Linear &first, &second;
};

TEST(Module, ParameterNamesAndUnitsMatchModuleTree) {
  Pair model;
  std::vector<std::string> names;
  for (const Parameter* p : model.parameters()) names.push_back(p->name);
  EXPECT_EQ(names, (std::vector<std::string>{"first.weight", "first.bias", "second.weight"}));
  EXPECT_EQ(model.parameter_count(), 15 + 5 + 15);
  EXPECT_EQ(model.second.full_name(), "second");
  const ArenaPtr arena = make_arena();
  const auto& units = model.materialize(3, arena, DType::float32, DType::float64);
  ASSERT_EQ(units.size(), 2U);
  EXPECT_EQ(units[0].name, "model");
  EXPECT_EQ(units[1].name, "second");
  ASSERT_EQ(units[0].slots.size(), 2U);
  EXPECT_TRUE(units[0].slots[0].parameter->decays);   // a matrix
  EXPECT_FALSE(units[0].slots[1].parameter->decays);  // a bias
  EXPECT_EQ(units[0].slots[1].begin % 16, 0);
  EXPECT_EQ(units[0].grads.dtype(), DType::float64);
  EXPECT_EQ(model.first.weight.value().storage(), units[0].values.storage());
}

TEST(Module, InitialValuesDependOnlyOnSeedNameAndIndex) {
  const ArenaPtr arena = make_arena();
  Pair model, other;
  model.materialize(3, arena, DType::float64, DType::float64);
  const Tensor w = model.second.weight.value();
  for (const int64_t i : {0, 7, 14})
    EXPECT_EQ(w.data<double>()[i], 0.02 * Philox::named(3, "second.weight").normal(static_cast<uint64_t>(i)));
  EXPECT_EQ(model.first.bias->value().to_vector<double>(), std::vector<double>(5, 0));
  other.materialize(4, arena, DType::float64, DType::float64);
  EXPECT_NE(other.second.weight.value().to_vector<double>(), w.to_vector<double>());
}

// Two micro-batches of a weight with two uses: (a0 + b0) + (a1 + b1), which in float32 differs from ((a0 + b0) + a1) +
// b1.
TEST(Module, AccumulatesUsesOfTiedWeightPerBackwardPass) {
  const ArenaPtr arena = make_arena();
  Pair model;
  model.materialize(3, arena, DType::float32, DType::float32);
  const auto times = [&](float value) {  // a use with gradient `value` everywhere
    return sum(model.first.weight * Var(Tensor::of<float>(std::vector<float>(15, value), {5, 3}, arena)));
  };
  const float a0 = 1, b0 = 3e-8F, a1 = 5e-8F, b1 = -1;
  int hooks = 0;
  model.first.weight.on_grad([&] { ++hooks; });
  for (int step = 0; step < 2; ++step) {
    model.clear_gradients();
    backward(times(b0) + times(a0));  // newest to oldest
    EXPECT_EQ(model.first.weight.grad().to_vector<float>(), std::vector<float>(15, a0 + b0));
    backward(times(b1) + times(a1));
    model.zero_missing_gradients();
    EXPECT_EQ(model.first.weight.grad().to_vector<float>(), std::vector<float>(15, (a0 + b0) + (a1 + b1)));
    EXPECT_NE((a0 + b0) + (a1 + b1), ((a0 + b0) + a1) + b1);
    EXPECT_EQ(model.second.weight.grad().to_vector<float>(), std::vector<float>(15, 0));  // no gradient arrived
    EXPECT_EQ(hooks, 2 * (step + 1));  // once per backward, after both uses
  }
}

TEST(Module, WrappersRunOutermostFirst) {
  const ArenaPtr arena = make_arena();
  Pair model;
  model.materialize(3, arena, DType::float64, DType::float64);
  const Var x(Tensor::of<double>(std::array{1.0, 2.0, 3.0}, {1, 3}, arena));
  const std::vector<double> plain = model(x).value().to_vector<double>();
  std::string order;
  model.second.wrap([&](const Module::Inner& inner, const Var& in) {
    order += "a";
    return scale(inner(in), 2);
  });
  model.second.wrap([&](const Module::Inner& inner, const Var& in) {
    order += "b";
    return inner(scale(in, 3));
  });
  const std::vector<double> wrapped = model(x).value().to_vector<double>();
  EXPECT_EQ(order, "ba");
  for (size_t i = 0; i < plain.size(); ++i) EXPECT_NEAR(wrapped[i], 6 * plain[i], 1e-15);
}

TEST(Module, RejectsInvalidOperations) {
  EXPECT_THROW(Linear(0, 3, {}), Error);
  EXPECT_THROW(Attention(10, {.heads = 3}), Error);
  struct NoForward : Module {
  } module;
  EXPECT_THROW(module(Var()), Error);
}

TEST(Layers, RmsNormScalesToUnitMeanSquare) {
  const ArenaPtr arena = make_arena();
  RMSNorm norm(4);
  norm.materialize(1, arena, DType::float64, DType::float64);
  const Var x(Tensor::of<double>(std::array{1.0, -2.0, 3.0, 4.0}, {1, 4}, arena), true);
  const Tensor y = norm(x).value();
  const double rms = std::sqrt(30.0 / 4 + 1e-5);
  for (int64_t i = 0; i < 4; ++i) EXPECT_NEAR(y.data<double>()[i], x.value().data<double>()[i] / rms, 1e-12);
  const auto [sum_of_both, normed] = norm.add(x, scale(x, 1));
  EXPECT_EQ(sum_of_both.value().to_vector<double>(), (std::vector<double>{2, -4, 6, 8}));
  EXPECT_NEAR(normed.value().to_vector<double>()[3], 8 / std::sqrt(30.0 + 1e-5), 1e-12);
}

TEST(Losses, MeanSquaredErrorAndGradientMatchHandComputation) {
  const ArenaPtr arena = make_arena();
  const Var p(Tensor::of<double>(std::array{1.0, 2.0, 5.0, 0.0}, {2, 2}, arena), true);
  const Var t(Tensor::of<double>(std::array{0.0, 2.0, 3.0, 4.0}, {2, 2}, arena));
  const Var loss = mean_squared_error(p, t);
  EXPECT_EQ(loss.value().item<double>(), (1.0 + 0 + 4 + 16) / 4);
  backward(loss);
  EXPECT_EQ(p.grad().to_vector<double>(), (std::vector<double>{0.5, 0, 1, -2}));
  EXPECT_THROW(mean_squared_error(p, sum(t)), Error);
}

// Shards of parameters: the positions of their elements in the full tensor.

// Every element of the shard, compared with an index computed by plain loops.
TEST(Parameter, ShardRunsCoverExactlyItsElements) {
  const Philox random = Philox::named(3, "cuts");
  uint64_t at = 0;
  const auto sample = [&](int64_t low, int64_t high) {
    return low + static_cast<int64_t>(random.below(static_cast<uint64_t>(high - low + 1), at++));
  };
  for (int trial = 0; trial < 200; ++trial) {
    const Shape shape{sample(1, 4), sample(1, 7), sample(1, 3)};
    const auto dim = static_cast<int>(sample(0, 2));
    Parameter parameter{.name = "p", .full_shape = shape, .shard = {.dim = dim}};
    std::vector<ShardSpec::Run>& runs = parameter.shard.runs;
    for (int64_t from = 0; from < shape[dim];) {
      const int64_t begin = from + sample(0, 1), size = sample(1, 2);
      if (begin + size > shape[dim]) break;
      runs.push_back({begin, size});
      from = begin + size;
    }
    if (runs.empty()) runs.push_back({0, 1});
    const Shape here = parameter.local();
    std::vector<int64_t> indices;  // along the dim
    for (const ShardSpec::Run& run : runs)
      for (int64_t i = 0; i < run.size; ++i) indices.push_back(run.begin + i);
    std::vector<int64_t> expected;
    for (int64_t a = 0; a < here[0]; ++a)
      for (int64_t b = 0; b < here[1]; ++b)
        for (int64_t c = 0; c < here[2]; ++c) {
          int64_t i[3] = {a, b, c};
          i[dim] = indices[static_cast<size_t>(i[dim])];
          expected.push_back((i[0] * shape[1] + i[1]) * shape[2] + i[2]);
        }
    const int64_t begin = sample(0, here.numel() - 1), end = sample(begin, here.numel());
    std::vector<int64_t> found;
    int64_t next = begin;
    for_each_run(parameter, begin, end, [&](int64_t from, int64_t to, int64_t count) {
      EXPECT_EQ(from, next);
      next += count;
      for (int64_t i = 0; i < count; ++i) found.push_back(to + i);
    });
    EXPECT_EQ(found, std::vector<int64_t>(expected.begin() + begin, expected.begin() + end)) << trial;
  }
}

TEST(Parameter, InitialShardValuesMatchFullParameter) {
  Linear unsharded(5, 6, {}), part(5, 6, {});
  part.shard(part.weight, {.runs = {{1, 2}, {4, 1}}});
  EXPECT_THROW(part.shard(part.weight, {.runs = {{0, 1}}}), Error);
  EXPECT_THROW(part.shard(*part.bias, {.runs = {{5, 2}}}), Error);
  unsharded.materialize(9, make_arena(), DType::float32, DType::float32);
  part.materialize(9, make_arena(), DType::float32, DType::float32);
  const Tensor all = unsharded.weight.value(), some = part.weight.value();
  ASSERT_EQ(some.numel(), 15);
  EXPECT_TRUE(bitwise_equal({some.narrow(0, 0, 2), some.select(0, 2)}, {all.narrow(0, 1, 2), all.select(0, 4)}));
}

TEST(Module, ExcludesUnitsOfOtherRanks) {
  Mlp mlp(8, 32, {});
  mlp.up.make_unit();
  mlp.down.make_unit();
  EXPECT_EQ(mlp.parameters().size(), 4u);
  mlp.up.set_local(false);
  ASSERT_EQ(mlp.layout().size(), 1u);
  EXPECT_EQ(mlp.layout()[0].name, "down");
  EXPECT_EQ(mlp.parameters().size(), 2u);
}

// One op for both layers of an Mlp is bitwise equal to separate layers.

Tensor normal(uint64_t seed, const Shape& shape, DType dtype) { return test::normal(shape, dtype, seed, "mlp"); }

// The output and the gradients of x and both layers' weights and biases.
template <class F>
std::vector<Tensor> results(DType dtype, bool deferred, const F& f) {
  std::vector<Var> v;
  const Shape shapes[] = {{3, 5, 16}, {40, 16}, {40}, {24, 40}, {24}};
  for (uint64_t i = 0; i < 5; ++i) v.emplace_back(normal(i, shapes[i], dtype), true);
  const Var y = f(v);
  DeferredWeightGrads later;
  backward(y, {.seed = normal(9, {3, 5, 24}, dtype), .defer = deferred ? &later : nullptr});
  later.run();
  std::vector<Tensor> all{y.value()};
  for (const Var& one : v) all.push_back(one.grad());
  return all;
}

TEST(GeluMlp, IsBitwiseEqualToSeparateLayers) {
  for (const DType dtype : {DType::float32, DType::bfloat16, DType::float64})
    for (const bool deferred : {false, true})
      for (const bool recompute : {false, true}) {
        const auto layers = results(dtype, deferred, [&](const std::vector<Var>& v) {
          return linear(activate(linear(v[0], v[1], Var()), {.recompute = recompute}, v[2]), v[3], v[4]);
        });
        const auto one = results(dtype, deferred, [&](const std::vector<Var>& v) {
          return mlp(v[0], {.w = v[1], .b = v[2]}, {.w = v[3], .b = v[4]}, {.recompute = recompute});
        });
        EXPECT_TRUE(bitwise_equal(one, layers)) << to_string(dtype);
      }
}

// The norm after the op computes the last bias gradient together with its own gradients, bitwise identical.
TEST(GeluMlp, NormComputesBiasGradient) {
  const auto gradient = [](bool rides) {
    std::vector<Var> v;
    for (const Shape& shape : {Shape{6, 16}, Shape{40, 16}, Shape{40}, Shape{24, 40}, Shape{24}, Shape{24}})
      v.emplace_back(normal(v.size(), shape, DType::float32), true);
    Var y = mlp(v[0], {.w = v[1], .b = v[2]}, {.w = v[3], .b = v[4]});
    EXPECT_TRUE(fusion::row_sums_requested(y));
    if (!rides) y = reshape(y, y.shape());  // an op that does not forward row sums
    backward(sum(norm(y, v[5], Var()) * Var(normal(9, {6, 24}, DType::float32))));
    return v[4].grad();
  };
  EXPECT_TRUE(bitwise_equal(gradient(true), gradient(false)));
}

// A wrapped layer, as under tensor parallelism, is called: code between the layers is not bypassed.
TEST(GeluMlp, CallsWrappedLayers) {
  Mlp mlp(8, 32, {});
  mlp.materialize(1, make_arena(), DType::float32, DType::float32);
  const Var x(normal(1, {2, 8}, DType::float32));
  const Tensor plain = mlp(x).value();
  int calls = 0;
  mlp.down.wrap([&](const Module::Inner& inner, const Var& in) {
    ++calls;
    return inner(in);
  });
  EXPECT_TRUE(bitwise_equal(mlp(x).value(), plain));
  EXPECT_EQ(calls, 1);
}

// Adapters on a frozen weight: their output, saved tensors, and names.

ModelConfig small(Family family) {
  return {
      .family = family,
      .layers = 2,
      .heads = 2,
      .channels = 8,
      .context = 6,
      .vocab = 11,
      .kv_heads = 1,
      .lora = {.rank = 3, .alpha = 6, .targets = {family == Family::gpt2 ? "c_attn" : "v_proj"}, .starts_idle = false}};
}

Tensor six_ids() { return Tensor::of<int32_t>(std::array{1, 2, 3, 4, 5, 6}, {1, 6}, make_arena()); }

// Column `first + j` of row i, with plain loops.
double expected(const Lora& l, const Tensor& x, int64_t first, int64_t i, int64_t j, const Tensor& base, double scale) {
  const auto at = [](const Tensor& m, int64_t row, int64_t column) {
    return m.data<double>()[row * m.dim(-1) + column];
  };
  double sum = at(base, i, first + j);
  for (int64_t r = 0; r < l.a.weight.dim(0); ++r) {
    double low = 0;
    for (int64_t c = 0; c < l.a.weight.dim(1); ++c) low += at(x, i, c) * at(l.a.weight.value(), r, c);
    sum += scale * low * at(l.b.weight.value(), j, r);
  }
  return sum;
}

TEST(WeightDecay, AppliesOnlyToMatrices) {
  const auto expect = [](const ModelConfig& config, const std::string& decaying, const std::string& others) {
    const std::unique_ptr<LanguageModel> model = make_model(config);
    std::set<std::string> found[2];
    for (const Parameter* p : model->parameters())
      if (p->trainable) found[p->decays ? 0 : 1].insert(p->name.substr(p->name.starts_with("blocks.0.") ? 9 : 0));
    EXPECT_EQ(fmt::format("{}", fmt::join(found[0], " ")), decaying);
    EXPECT_EQ(fmt::format("{}", fmt::join(found[1], " ")), others);
  };
  expect({.layers = 1}, "attn.proj.weight attn.qkv.weight mlp.down.weight mlp.up.weight positions.weight tokens.weight",
         "attn.proj.bias attn.qkv.bias mlp.down.bias mlp.up.bias norm.bias norm.weight norm1.bias norm1.weight "
         "norm2.bias norm2.weight");
  ModelConfig llama{.family = Family::llama, .layers = 1, .tied = false, .qkv_bias = true, .qk_norm = true};
  const std::string others =
      "attn.norm_k.weight attn.norm_q.weight attn.qkv.bias norm.weight norm1.weight norm2.weight";
  expect(llama, "attn.proj.weight attn.qkv.weight head.weight mlp.down.weight mlp.gate_up.weight tokens.weight",
         others);
  llama.experts = {.count = 2, .shared = 1};
  expect(llama,
         "attn.proj.weight attn.qkv.weight head.weight mlp.experts.0.down.weight mlp.experts.0.gate_up.weight "
         "mlp.experts.1.down.weight mlp.experts.1.gate_up.weight mlp.router.weight mlp.shared.down.weight "
         "mlp.shared.gate_up.weight tokens.weight",
         others);
  llama.experts = {}, llama.lora = {.rank = 2, .alpha = 2, .targets = {"q_proj", "down_proj"}};
  expect(llama,
         "attn.qkv.q_proj.lora_A.weight attn.qkv.q_proj.lora_B.weight mlp.down.down_proj.lora_A.weight "
         "mlp.down.down_proj.lora_B.weight",
         "");
}

TEST(Lora, OutputIsAddedToAdaptedColumns) {
  Linear layer(8, 20, {});
  layer.freeze();
  Lora& adapter = layer.adapt("part", 6, 10, {.rank = 3, .scale = 2, .starts_idle = false});
  layer.materialize(1, make_arena(), DType::float64, DType::float64);
  const Tensor x = test::random_tensor({2, 3, 8}, DType::float64, "x"), y = layer(Var(x)).value(),
               base = linear(x, layer.weight.value(), layer.bias->value());
  for (int64_t i = 0; i < 6; ++i)
    for (int64_t j = 0; j < 20; ++j) {
      const bool inside = j >= 6 && j < 16;
      const double want = inside ? expected(adapter, x, 6, i, j - 6, base, 2) : base.data<double>()[i * 20 + j];
      EXPECT_NEAR(y.data<double>()[i * 20 + j], want, 1e-12) << i << " " << j;
    }
}

TEST(Lora, InitialOutputMatchesBaseModel) {
  for (const Family family : {Family::gpt2, Family::llama}) {
    ModelConfig adapted = small(family), plain = adapted;
    adapted.lora.starts_idle = true;
    plain.lora = {};
    const auto a = make_model(adapted), b = make_model(plain);
    for (LanguageModel* model : {a.get(), b.get()}) model->materialize(5, make_arena(), DType::float32, DType::float32);
    EXPECT_TRUE(bitwise_equal(a->hidden(six_ids()).value(), b->hidden(six_ids()).value()));
  }
}

TEST(Lora, OnlyAdaptersHaveGradients) {
  const auto model = make_model(small(Family::llama));
  const ArenaPtr arena = make_arena();
  model->materialize(5, arena, DType::float32, DType::float32);
  int64_t trained = 0;
  for (const Parameter* p : model->parameters()) {
    EXPECT_EQ(p->trainable, p->name.find(".lora_") != std::string::npos) << p->name;
    if (p->trainable) trained += p->full_shape.numel();
  }
  EXPECT_EQ(trained, 2 * 3 * (8 + 4));  // two layers of A (3, 8) and B (4, 3)
  EXPECT_EQ(model->parameters()[1]->name.find("blocks.0."), 0u);
  const std::vector<AttachedLora> adapters = adapter_tensors(*model);
  ASSERT_EQ(adapters.size(), 2u);
  EXPECT_EQ(adapters[1].adapter->full_name(), "blocks.1.attn.qkv.v_proj");
  EXPECT_EQ(adapters[1].adapter->first(), 12);
  EXPECT_LE(arena->usage(Category::gradients).live, 4 * 2 * (32 + 16));
}

TEST(Lora, ScaleDependsOnRank) {
  LoraConfig c{.rank = 16, .alpha = 8};
  EXPECT_EQ(c.scale(), 0.5);
  c.rank_stabilised = true;
  EXPECT_EQ(c.scale(), 2);
}

TEST(Lora, ExpertsAndRoutersAreFrozen) {
  ModelConfig c = small(Family::llama);
  c.experts = {.count = 4, .shared = 1};
  c.lora.targets = {"q_proj", "k_proj", "v_proj", "o_proj"};
  const auto model = make_model(c);
  model->materialize(5, make_arena(), DType::float32, DType::float32);
  for (const Parameter* p : model->parameters())
    EXPECT_EQ(p->trainable, p->name.find(".lora_") != std::string::npos) << p->name;
  EXPECT_EQ(adapter_tensors(*model).size(), 2u * 4);
  model->set_step({.training = true});
  backward(model->loss(six_ids(), six_ids(), 1).mean);
  for (const AttachedLora& attached : adapter_tensors(*model)) {  // including experts and the router of the layer above
    const std::vector<float> gradient = attached.adapter->b.weight.grad().to_vector<float>();
    EXPECT_TRUE(std::ranges::any_of(gradient, [](float g) { return g != 0; })) << attached.adapter->full_name();
  }
  for (const char* name : {"gate_proj", "up_proj", "down_proj"}) {
    c.lora.targets = {"q_proj", name};
    EXPECT_TRUE(has(error_message([&] { make_model(c); }),
                    "expected one or more of q_proj, k_proj, v_proj, o_proj (experts have no adapters)"));
  }
}

TEST(Lora, ErrorsNameUnknownLayers) {
  ModelConfig c = small(Family::llama);
  c.lora.targets = {"q_proj", "c_attn"};
  EXPECT_TRUE(has(error_message([&] { make_model(c); }), "got 'c_attn'"));
}

}  // namespace
}  // namespace tessera
