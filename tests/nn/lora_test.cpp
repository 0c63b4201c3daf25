// Adapters beside a frozen weight: what they add, what is kept for them, and their names.

#include "models/adapters/adapters.h"
#include "tests/support/tensors.h"

namespace tessera {
namespace {

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

// Column `first + j` of row i, with plain loops.
double expected(const Lora& l, const Var& x, int64_t first, int64_t i, int64_t j, const Tensor& base, double scale) {
  const auto at = [](const Var& m, int64_t row, int64_t column) {
    return m.value().data<double>()[row * m.dim(1) + column];
  };
  double sum = base.flat_rows().select(0, i).data<double>()[first + j];
  for (int64_t r = 0; r < l.a.weight.dim(0); ++r) {
    double low = 0;
    for (int64_t c = 0; c < l.a.weight.dim(1); ++c)
      low += x.value().data<double>()[i * l.a.weight.dim(1) + c] * at(l.a.weight, r, c);
    sum += scale * low * at(l.b.weight, j, r);
  }
  return sum;
}

TEST(Lora, AddsItsProductToItsColumns) {
  Linear layer(8, 20, {});
  layer.freeze();
  Lora& adapter = layer.adapt("part", 6, 10, {.rank = 3, .scale = 2, .starts_idle = false});
  layer.materialize(1, make_arena(), DType::float64, DType::float64);
  const Var x(test::drawn({2, 3, 8}, DType::float64, "x"));
  const Tensor y = layer(x).value(), base = linear(x.value(), layer.weight.value(), layer.bias->value());
  for (int64_t i = 0; i < 6; ++i)
    for (int64_t j = 0; j < 20; ++j) {
      const double found = y.flat_rows().select(0, i).data<double>()[j];
      const bool inside = j >= 6 && j < 16;
      const double want =
          inside ? expected(adapter, x, 6, i, j - 6, base, 2) : base.flat_rows().select(0, i).data<double>()[j];
      EXPECT_NEAR(found, want, 1e-12) << i << " " << j;
    }
}

TEST(Lora, BeginsAsTheModelThatItAdapts) {
  for (const Family family : {Family::gpt2, Family::llama}) {
    ModelConfig adapted = small(family), plain = adapted;
    adapted.lora.starts_idle = true;
    plain.lora = {};
    const auto a = make_model(adapted), b = make_model(plain);
    for (LanguageModel* model : {a.get(), b.get()}) model->materialize(5, make_arena(), DType::float32, DType::float32);
    const Tensor ids = Tensor::of<int32_t>(std::vector<int32_t>{1, 2, 3, 4, 5, 6}, {1, 6}, make_arena());
    EXPECT_TRUE(test::same_bits(a->hidden(ids).value(), b->hidden(ids).value()));
  }
}

TEST(Lora, OnlyAdaptersHaveGradients) {
  const auto model = make_model(small(Family::llama));
  const ArenaPtr arena = make_arena();
  model->materialize(5, arena, DType::float32, DType::float32);
  int64_t trained = 0;
  for (const Parameter* p : model->parameters()) {
    EXPECT_EQ(p->trainable, p->name.find(".lora_") != std::string::npos) << p->name;
    if (p->trainable) trained += p->whole.numel();
  }
  EXPECT_EQ(trained, 2 * 3 * (8 + 4));  // two layers of A (3, 8) and B (4, 3)
  EXPECT_EQ(model->parameters()[1]->name.find("blocks.0."), 0u);
  const std::vector<AttachedLora> adapters = adapters_of(*model);
  ASSERT_EQ(adapters.size(), 2u);
  EXPECT_EQ(adapters[1].adapter->full_name(), "blocks.1.attn.qkv.v_proj");
  EXPECT_EQ(adapters[1].adapter->first(), 12);
  EXPECT_LE(arena->usage(Category::gradients).live, 4 * 2 * (32 + 16));
}

TEST(Lora, TheScaleFollowsTheRank) {
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
  const ArenaPtr arena = make_arena();
  model->materialize(5, arena, DType::float32, DType::float32);
  for (const Parameter* p : model->parameters())
    EXPECT_EQ(p->trainable, p->name.find(".lora_") != std::string::npos) << p->name;
  EXPECT_EQ(adapters_of(*model).size(), 2u * 4);
  const Tensor ids = Tensor::of<int32_t>(std::vector<int32_t>{1, 2, 3, 4, 5, 6}, {1, 6}, arena);
  model->set_step({.training = true});
  backward(model->loss(ids, ids, 1).mean);
  for (const AttachedLora& attached : adapters_of(*model)) {  // through experts and the router of the layer above
    const std::vector<float> gradient = attached.adapter->b.weight.grad().to_vector<float>();
    EXPECT_TRUE(std::ranges::any_of(gradient, [](float g) { return g != 0; })) << attached.adapter->full_name();
  }
  for (const char* name : {"gate_proj", "up_proj", "down_proj"}) {
    c.lora.targets = {"q_proj", name};
    try {
      make_model(c);
      ADD_FAILURE() << name;
    } catch (const FieldError& e) {
      EXPECT_NE(
          std::string(e.what()).find("expected some of q_proj, k_proj, v_proj, o_proj (experts have no adapters)"),
          std::string::npos)
          << e.what();
    }
  }
}

TEST(Lora, UnknownLayersAreNamed) {
  ModelConfig c = small(Family::llama);
  c.lora.targets = {"q_proj", "c_attn"};
  try {
    make_model(c);
    FAIL();
  } catch (const FieldError& e) {
    EXPECT_NE(std::string(e.what()).find("found 'c_attn'"), std::string::npos) << e.what();
  }
}

}  // namespace
}  // namespace tessera
